"""The rollout buffer: groups, the HTTP service, the generator and the rollout function that reads from it."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from fastapi.testclient import TestClient
from helpers_rollout import rollout_args, save_tiny_tokenizer, serve_in_thread

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.misc import SingletonMeta
from slime_plugins.rollout_buffer import buffer as service
from slime_plugins.rollout_buffer import rollout_buffer_example as example
from slime_plugins.rollout_buffer.generator import base_generator
from slime_plugins.rollout_buffer.group_queue import BufferQueue, RolloutBuffer


def item(instance: str, reward: float = 1.0, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{reward:g}"}]
    return {"uid": "u", "instance_id": instance, "messages": messages, "reward": reward, "extra_info": {}, **more}


def test_only_complete_groups_are_read_and_once() -> None:
    queue = BufferQueue(2)
    for name, reward in (("a", 1.0), ("b", 0.0), ("a", 0.0)):
        queue.append(item(name, reward))
    first = queue.get()
    assert [i["instance_id"] for i in first["data"]] == ["a", "a"]
    assert first["meta_info"] == {
        "total_samples": 3,
        "num_groups": 2,
        "avg_group_size": 1.5,
        "avg_reward": pytest.approx(1 / 3),
        "finished_groups": ["a"],
    }
    assert queue.get()["data"] == [] and len(queue) == 1
    queue.append(item("b", 1.0))
    second = queue.get()
    assert len(second["data"]) == 2 and second["meta_info"]["total_samples"] == 1


def test_a_generator_may_shape_its_groups() -> None:
    functions = {
        "transform_group_func": lambda group, task: (group[0], group[1][:1]),
        "is_valid_group_func": lambda group, size, task: True,
        "get_group_data_meta_info_func": lambda data: {"mine": len(data)},
    }
    rollouts = RolloutBuffer(9, "math", **functions)  # type: ignore[arg-type]
    rollouts.write(item("a"))
    rollouts.write(item("a"))
    result = rollouts.read()
    assert len(result["data"]) == 1 and result["meta_info"] == {"mine": 1, "finished_groups": ["a"]}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(service, "buffer", RolloutBuffer(2))
    with TestClient(service.app) as running:
        yield running


def test_the_service(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.post("/get_rollout_data", json={}).json()["success"] is False
    for reward in (0.0, 1.0):
        assert client.post("/buffer/write", json=item("a", reward)).json()["success"] is True
    answer = client.post("/get_rollout_data", json={}).json()
    assert answer["success"] and [i["reward"] for i in answer["data"]["data"]] == [0.0, 1.0]
    assert answer["data"]["meta_info"]["finished_groups"] == ["a"]
    broken = client.post("/buffer/write", json={"uid": "x"})
    assert broken.status_code == 500 and broken.json()["success"] is False
    started: list[Any] = []
    monkeypatch.setattr(base_generator, "run_rollout", started.append)
    payload = {"task_type": "math", "num_repeat_per_sample": "4"}
    assert "started" in client.post("/start_rollout", json=payload).json()["message"]
    assert started == [payload] and service.buffer.buffer.group_size == 4
    monkeypatch.setattr(service, "MAX_BODY_BYTES", 3)
    assert client.post("/buffer/write", json=item("a")).status_code == 413


def test_unknown_task_types_are_named() -> None:
    with pytest.raises(ValueError, match="unknown task_type 'no'; known: math"):
        service.run_rollout({"task_type": "no", "num_repeat_per_sample": "1"})


# --- the generator ----------------------------------------------------------------------------------------------------


def chat_client(replies: list[tuple[str, str]]) -> tuple[Any, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def create(**kwargs: Any) -> Any:
        asked.append(kwargs)
        text, finish = replies[len(asked) - 1]
        choice = SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=finish)
        return SimpleNamespace(choices=[choice])

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create))), asked


def test_an_aborted_answer_goes_on_from_what_it_has() -> None:
    client, asked = chat_client([("one ", "abort"), ("two", "stop")])
    prompt = [{"role": "user", "content": "q"}]
    messages = base_generator.query_single_turn(client, prompt, {"max_tokens": 4})
    assert messages[-1] == {"role": "assistant", "content": "one two"}
    assert asked[0]["messages"] == prompt and asked[1]["messages"][-1]["content"] == "one "
    assert asked[1]["extra_body"]["continue_final_message"] is True and asked[1]["max_tokens"] == 4


def test_groups_are_normalised() -> None:
    _, items = base_generator.normalize_group_data(("a", [item("a", 1.0), item("a", 0.0)]))
    assert items[0]["reward"] == pytest.approx(0.7071, abs=1e-3) and items[0]["raw_reward"] == 1.0
    assert [i["reward"] for i in base_generator.normalize_group_data(("a", [item("a")]))[1]] == [0.0]
    answer = {"messages": [{"role": "assistant", "content": r"\boxed{2}"}], "label": "2"}
    assert base_generator.get_rule_based_math_reward(answer) == 1.0
    assert base_generator.is_valid_group(("a", [1, 2]), 2) and not base_generator.is_valid_group(("a", [1]), 2)


def fixed_answer(client: Any, messages: Any, params: Any) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": r"\boxed{4}"}]


def test_the_generator_fills_the_buffer(tmp_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}", "label": str(2 * i)}) + "\n" for i in range(3)))
    maker = base_generator.BaseGenerator("http://e", "http://b", num_repeat_per_sample=2, skip_instance_ids=["0"])
    tasks, done = list(maker._tasks(str(file))), []
    assert [t["instance_id"] for t in tasks] == ["1", "1", "2", "2"]
    source: Any = SimpleNamespace(get=iter([*tasks, None]).__next__)
    sink = SimpleNamespace(put=done.append)
    base_generator.worker_process(source, sink, fixed_answer, base_generator.get_rule_based_math_reward, None, {})
    assert done[-1] is None and [i["reward"] for i in done[:-1]] == [0.0, 0.0, 1.0, 1.0]


# --- the rollout function ---------------------------------------------------------------------------------------------


def test_the_newest_whole_groups_are_kept() -> None:
    items = [item(name) for name in "abcabc"]
    selected = example.select_rollout_data(None, items, 3)
    assert [i["instance_id"] for i in selected] == ["b", "b", "c", "c"]


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """A service that answers: nothing, one group, two groups."""
    SingletonMeta.clear_instances()
    monkeypatch.setattr(example, "POLL_S", 0.01)
    example._started.clear()
    answers = [[], [item("x", r) for r in (0.0, 1.0)], [item(n, r) for n in "yz" for r in (0.5, 1.0)]]
    asked: list[dict[str, Any]] = []

    async def start(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"message": "ok"})

    async def read(request: web.Request) -> web.Response:
        data = answers.pop(0) if answers else []
        info = {"total_samples": len(data), "num_groups": 1, "avg_reward": 0.5, "finished_groups": ["x"]}
        return web.json_response({"success": bool(data), "data": {"data": data, "meta_info": info}})

    app = web.Application()
    app.router.add_post("/start_rollout", start)
    app.router.add_post("/get_rollout_data", read)
    with serve_in_thread(app) as port:
        yield rollout_args(
            save_tiny_tokenizer(tmp_path),
            rollout_buffer_url=f"http://127.0.0.1:{port}/",
            rollout_global_dataset=False,
            fetch_trajectory_retry_times=3,
            min_batch_collection_ratio=1,
            rollout_task_type="math",
            num_epoch=None,
            prompt_data="data.jsonl",
            asked=asked,
        )


def test_rollouts_come_from_the_service(args: Namespace) -> None:
    source = RolloutDataSourceWithBuffer(args)
    output = example.generate_rollout(args, 0, source)
    assert [[s.reward for s in group] for group in output.samples] == [[0.5, 1.0], [0.5, 1.0]]
    sample = output.samples[0][1]
    assert sample.loss_mask is not None and len(sample.loss_mask) == sample.response_length < len(sample.tokens)
    assert sample.response == "a1" and sample.metadata["instance_id"] == "y"
    assert output.metrics is not None and output.metrics["rollout/buffer/total_samples"] == 6
    assert source.get_metadata()["finished_groups"] == ["x", "x"]
    assert args.asked[0]["num_repeat_per_sample"] == "2" and args.asked[0]["task_type"] == "math"
    with pytest.raises(RuntimeError, match="--fetch-trajectory-retry-times 3"):
        example.generate_rollout(args, 1, source)
    assert len(args.asked) == 1, "the service is started once"


def test_what_the_rollout_function_needs(args: Namespace) -> None:
    with pytest.raises(ValueError, match="--eval-function-path"):
        example.generate_rollout(args, 0, None, evaluation=True)
    args.rollout_buffer_url = None
    with pytest.raises(ValueError, match="--rollout-buffer-url"):
        asyncio.run(example.generate_rollout_async(args, 0, None))
