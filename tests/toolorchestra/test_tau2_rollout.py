"""Whole rollouts through the hook: policy, experts and user are scripted servers, the environments are tau2's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_agentic import FakeEngine
from helpers_orchestra import QWEN, call, script, stage

from agentic.toolorchestra.tau2 import pool
from agentic.toolorchestra.tau2.tasks import find_task
from slime.utils.types import Sample

THOUGHT = "<think>\nLet me see.\n</think>\n\n"


def metadata(domain: str, task_id: str, **more: Any) -> dict[str, Any]:
    return {"category": "func_call", "domain": domain, "task_id": task_id, **more}


def check_streams(s: Any, sample: Sample) -> None:
    """Every request extends the one before and is a prefix of the row."""
    sent = s.sent()
    for earlier, later in zip(sent, [*sent[1:], sample.tokens], strict=True):
        assert later[: len(earlier)] == earlier
    assert sample.loss_mask is not None and len(sample.loss_mask) == sample.response_length


@pytest.mark.parametrize(
    ("domain", "task_id", "evaluation"), [("retail", "0", False), ("mock", "create_task_1", True)]
)
async def test_the_reference_solution_of_a_real_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str, task_id: str, evaluation: bool
) -> None:
    task = find_task(domain, task_id)
    actions = task.evaluation_criteria.actions  # type: ignore[union-attr]
    turns = [THOUGHT + call(action.name, **action.arguments) for action in actions or []]
    # The scripted user says yes three times before it stops.
    turns.append(THOUGHT + "<message>It is done.</message>")
    with stage(tmp_path, monkeypatch, script(*turns), user="scripted", tau2_workers=1) as s:
        try:
            sample = await s.run(s.sample(**metadata(domain, task_id)), evaluation=evaluation)
        finally:
            pool.close_pool()
    record = sample.metadata["orch"]
    assert (record["outcome"], record["termination"], record["valid_answer"]) == (1.0, "user_stop", True)
    assert record["breakdown"] == {"DB": 1.0, "COMMUNICATE": 1.0} and record["turns"] == len(turns) + 3
    assert sample.status is Sample.Status.COMPLETED
    check_streams(s, sample)


async def test_an_expert_and_a_user_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expert = script(
        THOUGHT + call("create_task", user_id="user_1", title="Important Meeting"), "Your task is created."
    )
    user = script("<think>I want ###STOP### later.</think>A task for user_1, please.", "Thanks! ###STOP###")
    policy = script(THOUGHT + call("call_expert", expert="expert-1"))
    with FakeEngine(expert) as experts, FakeEngine(user) as users:
        served = {"api": "chat", "model": "m", "price_in": 1.0, "price_out": 1.0}
        roles = {"strong": {"url": experts.url, **served}, "user": {"url": users.url, **served}}
        with stage(tmp_path, monkeypatch, policy, roles=roles, aliases='{"expert-1": "strong"}') as s:
            sample = await s.run(s.sample(**metadata("mock", "create_task_1")))
        offered = [tool["function"]["name"] for tool in experts.requests[0].body["tools"]]
    record = sample.metadata["orch"]
    assert (record["outcome"], record["termination"], record["turns"]) == (1.0, "user_stop", 2)
    assert record["counts"]["expert-1"] == 2 and record["dollars"] > 0.0
    assert "transfer_to_human_agents" in offered and "call_expert" not in offered
    check_streams(s, sample)
    text = QWEN.decode(sample.tokens)
    assert "A task for user_1, please." in text and "later" not in text
    assert "<tool_response>\nexpert-1 called tools.\ncreate_task(" in text
    assert "transfer_to_human_agents" not in text


async def test_a_user_that_is_silent_fails_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeEngine(lambda prompt: "") as users:
        roles = {"user": {"url": users.url, "api": "chat", "model": "m"}}
        with stage(tmp_path, monkeypatch, script("unused"), roles=roles) as s:
            sample = await s.run(s.sample(**metadata("mock", "create_task_1")))
    assert sample.remove_sample and sample.metadata["failure_reason"] == "role_bad_response:user"


async def test_a_task_with_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt holds the calls and results of the history."""
    turn = THOUGHT + call("update_task_status", task_id="task_2", status="completed")
    with stage(tmp_path, monkeypatch, script(turn, "<message>Done.</message>"), user="scripted") as s:
        sample = await s.run(s.sample(**metadata("mock", "update_task_with_message_history")))
    assert sample.metadata["orch"]["outcome"] == 1.0
    prompt = QWEN.decode(s.sent()[0])
    assert '{"name": "create_task", "arguments": {"user_id"' in prompt and "<tool_response>\n{" in prompt


async def test_an_unknown_task_is_a_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stage(tmp_path, monkeypatch, script("unused"), user="scripted") as s:
        sample = await s.run(s.sample(**metadata("retail", "4711")))
    assert sample.remove_sample and sample.metadata["failure_reason"] == "unknown_task"
