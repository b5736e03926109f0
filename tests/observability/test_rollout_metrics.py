"""Metrics of rollouts and evaluations: missing and dict rewards, fan-out, constant groups, log hooks."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from slime.observability.rollout_metrics import (
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
    log_eval_rollout_data,
    log_rollout_data,
)
from slime.utils.types import Sample

S = Sample.Status


def sample(group, reward, status=S.COMPLETED, rollout_id=None, **kwargs):
    return Sample(
        group_index=group,
        reward=reward,
        status=status,
        rollout_id=rollout_id,
        response_length=kwargs.pop("response_length", 4),
        **kwargs,
    )


def metrics_args(tmp_path=None, **overrides):
    path = str(tmp_path / "m.jsonl") if tmp_path else None
    return Namespace(**{"metrics_jsonl": path, "reward_key": None, "rollout_num_gpus": 2, **overrides})


def test_missing_rewards_are_left_out_and_failures_counted():
    failed = sample(0, None, S.FAILED, metadata={"failure_reason": "tool_timeout"})
    samples = [failed, sample(0, 1.0), sample(1, 0.0, S.TRUNCATED), sample(1, 0.0)]
    metrics = compute_metrics_from_samples(metrics_args(), samples)
    assert metrics["raw_reward"] == pytest.approx(1 / 3)
    assert (metrics["failed_ratio"], metrics["truncated_ratio"], metrics["aborted_ratio"]) == (0.25, 0.25, 0.0)
    assert metrics["failure_reason/tool_timeout"] == 1
    assert metrics["zero_std_ratio"] == 1.0  # group 0 has one scored rollout and does not count
    assert metrics["response_len/mean"] == 4.0


def test_a_rollout_counts_once_however_many_samples_it_has():
    samples = [sample(0, 1.0, rollout_id=0)] * 3 + [sample(0, 0.0, rollout_id=1)]
    metrics = compute_metrics_from_samples(metrics_args(), samples)
    assert (metrics["raw_reward"], metrics["num_rollouts"], metrics["num_samples"]) == (0.5, 2, 4)
    assert metrics["zero_std_ratio"] == 0.0


def test_dict_rewards():
    samples = [sample(0, {"score": 1.0, "kind": "a"}), sample(0, {"score": 0.0, "kind": "b"}), sample(0, {"x": 1})]
    metrics = compute_metrics_from_samples(metrics_args(reward_key="score", log_reward_category="kind"), samples)
    assert metrics["raw_reward"] == 0.5
    assert (metrics["reward_category/a"], metrics["reward_category/b"]) == (0.5, 0.5)
    assert "raw_reward" not in compute_metrics_from_samples(metrics_args(), samples)


def test_all_missing_or_nothing_at_all():
    metrics = compute_metrics_from_samples(metrics_args(), [sample(0, None, S.ABORTED, response_length=0)])
    assert "raw_reward" not in metrics and "zero_std_ratio" not in metrics and metrics["aborted_ratio"] == 1.0
    assert compute_metrics_from_samples(metrics_args(), []) == {}


def test_performance():
    a = sample(0, 1.0, response_length=30, loss_mask=[1] * 20 + [0] * 10, non_generation_time=2.0)
    b = sample(0, 1.0, response_length=10)
    a.prefix_cache_info.add({"cached_tokens": 5, "prompt_tokens": 20})
    metrics = compute_perf_metrics_from_samples(metrics_args(), [a, b], rollout_time=10.0)
    assert metrics["rollout_time"] == 10.0 and metrics["tokens_per_second"] == 4.0
    assert metrics["effective_tokens_per_second"] == 3.0 and metrics["tokens_per_gpu_per_second"] == 2.0
    assert metrics["longest_sample_tokens_per_second"] == 3.0 and metrics["non_generation_time/max"] == 2.0
    assert metrics["prefix_cache_hit_rate"] == 0.25 and "spec_accept_rate" not in metrics
    assert compute_perf_metrics_from_samples(metrics_args(), [], 1.0) == {"rollout_time": 1.0}


def test_speculative_counters():
    a = sample(0, 1.0)
    a.spec_info.add(
        {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2, "completion_tokens": 5}
    )
    metrics = compute_perf_metrics_from_samples(metrics_args(sglang_speculative_algorithm="EAGLE"), [a], 1.0)
    assert (metrics["spec_accept_rate"], metrics["spec_accept_length"]) == (0.75, 2.5)


CALLS: list = []


def takes_over(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    CALLS.append((rollout_id, len(samples), rollout_extra_metrics, rollout_time))
    return True


def adds_only(rollout_id, args, data, extra_metrics):
    CALLS.append((rollout_id, sorted(data), extra_metrics))
    return None


def test_rollout_line(tmp_path):
    args = metrics_args(tmp_path)
    log_rollout_data(7, args, [sample(0, 1.0), sample(0, 0.0)], {"rollout/dynamic_filter/drop_x": 1}, 2.0)
    (line,) = [json.loads(text) for text in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert line["step_key"] == "rollout/step" and line["rollout/step"] == 7
    assert line["rollout/raw_reward"] == 0.5 and line["perf/rollout_time"] == 2.0
    assert line["rollout/dynamic_filter/drop_x"] == 1 and line["rollout/response_len/mean"] == 4.0


def test_rollout_hook_may_take_over_and_replays_are_not_logged(tmp_path):
    CALLS.clear()
    hooked = metrics_args(tmp_path, custom_rollout_log_function_path=f"{__name__}.takes_over")
    assert log_rollout_data(1, hooked, [sample(0, 1.0)], None, 2.0) is None
    assert CALLS == [(1, 1, None, 2.0)]
    replay = metrics_args(tmp_path, load_debug_rollout_data="x")
    assert log_rollout_data(1, replay, [sample(0, 1.0)], None, 2.0) is None
    assert not (tmp_path / "m.jsonl").exists()


def test_eval_line(tmp_path):
    CALLS.clear()
    args = metrics_args(tmp_path, log_passrate=True, custom_eval_rollout_log_function_path=f"{__name__}.adds_only")
    failed = sample(0, None, S.FAILED, metadata={"failure_reason": "judge"})
    samples = [failed, sample(0, 1.0), sample(1, 1.0), sample(1, 1.0)]
    data = {"d": {"rewards": [0.0, 1.0, 1.0, 1.0], "truncated": [0, 1, 0, 0], "samples": samples, "failed": 1}}
    metrics = log_eval_rollout_data(3, args, data, {"eval/extra": 2})
    assert CALLS == [(3, ["d"], {"eval/extra": 2})]
    assert (metrics["eval/d"], metrics["eval/d/n"], metrics["eval/d/truncated_ratio"]) == (0.75, 4, 0.25)
    assert metrics["eval/d/failed"] == 1 and metrics["eval/d/failure_reason/judge"] == 1
    assert (metrics["eval/d-pass@1"], metrics["eval/d-pass@2"]) == (0.75, 1.0)
    assert metrics["eval/step"] == 3 and metrics["eval/extra"] == 2


def test_eval_without_samples_and_with_missing_rewards():
    metrics = log_eval_rollout_data(0, metrics_args(), {"d": {"rewards": [None, 1.0]}, "empty": {"rewards": []}})
    assert metrics["eval/d"] == 0.5 and metrics["eval/empty/n"] == 0 and "eval/empty" not in metrics
