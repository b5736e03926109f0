"""Traces of samples, dumps of train data, and metrics of the training side."""

from __future__ import annotations

import asyncio
import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.observability import trace_utils as tr
from slime.observability import train_metric_utils as tm
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay
from slime.observability.rollout_metrics import compute_metrics_from_samples
from slime.observability.timer import Timer
from slime.observability.train_data_utils import restore_context_parallel_fields_to_cpu, save_debug_train_data
from slime.utils.types import Sample


def events(sample: Any) -> list[dict[str, Any]]:
    return list(sample.trace["events"])


def test_spans_nest_and_survive_copies() -> None:
    sample: Any = Sample(index=3, group_index=1)
    with tr.trace_span(sample, "episode", attrs={"a": 1}) as outer:
        tr.trace_event(sample, "tool", attrs={"name": "search"})
        with tr.trace_span([sample], "turn") as inner:
            inner.set("tokens", 5).update({"more": 6})
    outer.set_attr("late", True)
    start, tool, turn, turn_end, end = events(sample)
    assert [e["type"] for e in events(sample)] == ["span_start", "event", "span_start", "span_end", "span_end"]
    assert tool["parent_span_id"] == turn["parent_span_id"] == start["span_id"] == end["span_id"]
    assert turn_end["attrs"] == {"tokens": 5, "more": 6} and end["attrs"] == {"late": True}
    assert start["attrs"] == {"a": 1} and (tool["sample_id"], tool["group_id"]) == (3, 1) and outer.closed
    restored: Any = Sample.from_dict(pickle.loads(pickle.dumps(sample.to_dict())))
    assert events(restored) == events(sample)


def test_errors_are_recorded_and_pass() -> None:
    sample: Any = Sample()
    with pytest.raises(KeyError), tr.trace_span(sample, "x"):
        raise KeyError("gone")
    assert events(sample)[-1]["attrs"]["error"] == "KeyError"
    with pytest.raises(KeyError), tr.trace_span(sample, "x", record_error=False):
        raise KeyError("gone")
    assert events(sample)[-1]["attrs"] is None


async def test_decorated_functions_and_tasks() -> None:
    @tr.trace_function("call", target="sample", attrs_getter=lambda n, sample: {"n": n})
    async def call(n: int, sample: Any) -> int:
        await asyncio.sleep(0)
        tr.trace_event(sample, "inside")
        return n

    @tr.trace_function("plain", target_getter=lambda value: None)
    def plain(value: int) -> int:
        return value + 1

    one: Any = Sample(index=1)
    two: Any = Sample(index=2)
    assert await asyncio.gather(call(7, one), call(8, sample=two)) == [7, 8] and plain(1) == 2
    for sample, n in ((one, 7), (two, 8)):
        start, inside, end = events(sample)
        assert start["attrs"] == {"n": n} and inside["parent_span_id"] == start["span_id"] == end["span_id"]
    with pytest.raises(ValueError, match="target"):
        tr.trace_function("both")


def test_a_trace_goes_on_in_another_process() -> None:
    sample: Any = Sample(index=1)
    with tr.trace_span(sample, "outer") as span:
        payload = json.loads(json.dumps(tr.export_trace(tr.bind_trace(sample))))
    carrier: dict[str, Any] = {}
    handle = tr.import_trace(payload, carrier)
    tr.trace_event(handle, "far")
    assert handle.trace_id == sample.trace["trace_id"]
    assert carrier["events"][0]["parent_span_id"] == span.span_records[0][1]
    tr.trace_next_attempt(sample)
    assert events(sample)[-1]["attempt"] == 1 and tr.bind_trace(sample).attempt == 1


def test_engine_meta_in_a_trace() -> None:
    meta = {"prompt_tokens": 3, "finish_reason": {"type": "stop"}, "output_token_logprobs": [1], "e2e_latency": None}
    assert tr.build_sglang_meta_trace_attrs(meta) == {"prompt_tokens": 3, "finish_reason": "stop"}


# --- train data -------------------------------------------------------------------------------------------------------


def test_train_data_are_dumped_whole(tmp_path: Path) -> None:
    args = Namespace(save_debug_train_data=str(tmp_path / "x" / "{rollout_id}.pt"))
    save_debug_train_data(args, rollout_id=4, rollout_data={"tokens": [torch.tensor([1, 2])], "n": 3})
    data = torch.load(tmp_path / "x" / "4.pt", weights_only=True)
    assert (data["format_version"], data["rollout_id"], data["shards"][0]["n"]) == (2, 4, 3)
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["4.pt"]
    save_debug_train_data(Namespace(save_debug_train_data=None), rollout_id=5, rollout_data={})


def test_cut_fields_are_joined() -> None:
    data = {
        "total_lengths": [6, 5],
        "response_lengths": [4, 2],
        "log_probs": [torch.ones(2), torch.ones(2)],
        "tokens": [torch.arange(6), torch.arange(5)],
    }
    restored = restore_context_parallel_fields_to_cpu(data, lambda t, total, n: torch.zeros(n), keep_restored=True)
    assert restored is not None and [t.tolist() for t in restored["log_probs"]] == [[0.0] * 4, [1.0] * 2]
    assert (
        restore_context_parallel_fields_to_cpu(data, lambda t, total, n: torch.zeros(n), keep_restored=False) is None
    )
    assert len(data["log_probs"][0]) == 2


@pytest.mark.parametrize(
    ("experts", "message"),
    [(None, "no routed experts"), (torch.zeros(3, 2, 9), "shape"), (torch.full((3, 2, 2), 8), "outside of 0 to 8")],
)
def test_routed_experts_are_checked(experts: Any, message: str) -> None:
    args = Namespace(num_layers=2, moe_router_topk=2, num_experts=8)
    validate_rollout_routed_experts_for_replay([torch.zeros(3, 2, 2)], args)
    with pytest.raises(ValueError, match=message):
        validate_rollout_routed_experts_for_replay([torch.zeros(3, 2, 2), experts], args)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_sums_of_micro_batches_become_means() -> None:
    losses = [{"keys": ["loss", "kl"], "values": torch.tensor([4.0, 2.0, 1.0])} for _ in range(3)]
    common = {"step_global_batch_size": 6, "cp_size": 2, "dp_with_cp_group": None}
    per_rollout = tm.reduce_train_step_metrics(losses, calculate_per_token_loss=False, **common)  # type: ignore[arg-type]
    assert per_rollout == {"loss": 1.0, "kl": 0.5}
    per_token = tm.reduce_train_step_metrics(losses, calculate_per_token_loss=True, **common)  # type: ignore[arg-type]
    assert per_token == {"loss": 1.0, "kl": 0.5}
    assert tm.reduce_train_step_metrics([], calculate_per_token_loss=True, **common) == {}  # type: ignore[arg-type]


def test_contributions_of_all_ranks_give_the_mean_over_rollouts() -> None:
    """Rollout means 1, 2, 3, 6 on two data-parallel ranks of two context-parallel ones, which hold halves of the sums."""
    halves = [0.5 + 1.0, 0.5 + 1.0, 1.5 + 3.0, 1.5 + 3.0]
    pairs = [tm.rollout_log_metric_contribution(h, cp_size=2, num_rollouts_in_rollout=4, dp_size=2) for h in halves]
    assert sum(n for n, _ in pairs) / sum(d for _, d in pairs) == pytest.approx(3.0)


def test_gathering_on_one_rank() -> None:
    reduced = tm.gather_and_reduce_log_dict(
        {"a": (3.0, 2.0), "b": 4, "c": (0.0, 0.0)}, dp_size=1, dp_src_rank=0, dp_group=None
    )
    assert reduced == {"a": 1.5, "b": 4.0, "c": 0.0}


def test_logs_of_the_trainer(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    args = Namespace(metrics_jsonl=str(file), n_samples_per_prompt=2)
    data = {
        "loss_masks": [[1, 0], [1, 1]],
        "rewards": [1.0, 0.0],
        "log_probs": [torch.tensor([-1.0, 5.0]), torch.tensor([-2.0, -4.0])],
        "response_lengths": [2, 2],
        "round_number": [3, None],
        "raw_reward": [1, 0],
    }
    tm.log_rollout_data(7, args, data)
    tm.log_multi_turn_data(7, args, data)
    tm.log_passrate(7, args, data)
    Timer().add("x", 1.5)
    tm.log_perf_data(7, args, {"perf/y": 2})
    rollout, turns, passes, perf = map(json.loads, file.read_text().splitlines())
    assert (rollout["rollout/rewards"], rollout["rollout/log_probs"], rollout["rollout/step"]) == (0.5, -2.0, 7)
    assert turns["multi_turn/round_number_mean"] == 3.0 and turns["multi_turn/observed_tokens_mean"] == 0.5
    assert passes["passrate/pass@1"] == 0.5 and (perf["perf/x_time"], perf["perf/y"]) == (1.5, 2)
    assert Timer().log_dict() == {}


def test_metrics_of_turns_and_of_correct_samples() -> None:
    args = Namespace(log_multi_turn=True, log_correct_samples=True, reward_key=None)
    samples = [
        Sample(response_length=4, loss_mask=[1, 1, 0, 0], reward=1, metadata={"round_number": 2}),
        Sample(response_length=2, reward=0, metadata={"round_number": 4}),
    ]
    metrics = compute_metrics_from_samples(args, samples)
    assert metrics["multi_turn/round_number/mean"] == 3 and metrics["multi_turn/observed_tokens/max"] == 2
    assert metrics["correct_samples"] == 1 and metrics["correct_response_len/mean"] == 2
