"""Acceptance facts 23 to 32 on the real package. What goes over every task, or needs minutes, is marked slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers_tau2 import gold_run, make
from tau2.data_model.message import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from tau2.data_model.tasks import Action, Task
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator

from agentic.toolorchestra.environment import ToolCall as Call
from agentic.toolorchestra.tau2.environments import (
    gold_hashes,
    initial_hashes,
    make_environment,
    replay_gold,
    state_hashes,
    task_environment,
)
from agentic.toolorchestra.tau2.episode import Tau2Episode
from agentic.toolorchestra.tau2.floors import floor, floor_of, idle_conversation
from agentic.toolorchestra.tau2.scoring import EVAL_EXCEPTION, REGULAR_ENDS, live_score, official_score
from agentic.toolorchestra.tau2.tasks import find_task, official_tasks

DOMAINS = ("airline", "retail", "telecom")
AIRLINE_IDLE = "0 1 4 5 6 10 13 26 28 31 34 36 41 43 45 46 47 48 49".split()
RETAIL_IDLE = "10 12 25 50 57 65 105".split()
FRESH = {"airline": "124e39a664b56402", "retail": "b25c9cb211f5efca"}
PREMATURE = ("max_steps", "too_many_errors", "agent_error", "user_error", "turn_limit")


@pytest.fixture(scope="module")
def airline() -> Tau2Episode:
    return asyncio.run(gold_run("airline", find_task("airline", "7")))


@pytest.fixture(scope="module")
def retail() -> Tau2Episode:
    return asyncio.run(gold_run("retail", find_task("retail", "0")))


def official(episode: Tau2Episode, messages: list[Message] | None = None, end: str = "user_stop") -> Any:
    return official_score(episode.domain, episode.task, messages or episode.messages, end)


# --------------------------------------------------------------------------------------------------------------------
# Fact 23.


@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_gold_run(domain: str, request: pytest.FixtureRequest) -> None:
    episode: Tau2Episode = request.getfixturevalue(domain)
    assert (len(episode.messages), episode.steps, episode.termination) == (14, 13, "user_stop")
    score = official(episode)
    assert (score.reward, score.breakdown) == (1.0, {"DB": 1.0, "COMMUNICATE": 1.0})
    assert (score.actions_matched, score.actions) == (5, 5)
    outcome = asyncio.run(episode.outcome())
    assert (outcome.reward, outcome.breakdown, outcome.valid_answer) == (1.0, score.breakdown, True)


@pytest.mark.parametrize(("domain", "task_id"), [("airline", "7"), ("retail", "0")])
async def test_gold_run_without_the_last_action(domain: str, task_id: str) -> None:
    episode = await gold_run(domain, find_task(domain, task_id), drop_last=1)
    outcome = await episode.outcome()
    assert (outcome.reward, outcome.breakdown["DB"], outcome.breakdown["COMMUNICATE"]) == (0.0, 0.0, 1.0)
    if domain == "retail":
        assert official(episode).breakdown == outcome.breakdown


# --------------------------------------------------------------------------------------------------------------------
# Facts 26 and 27.


async def test_an_unknown_tool_changes_nothing() -> None:
    task = find_task("retail", "0")
    episode = make("retail", task)
    await episode.start()
    assert episode._environment is not None
    before = episode._environment.get_db_hash()
    (text,) = (await episode.act([Call("nope", {})])).texts
    message = episode.messages[-1]
    assert isinstance(message, ToolMessage) and message.error and text.startswith("Error: Tool 'nope' not found")
    assert episode._environment.get_db_hash() == before
    for action in task.evaluation_criteria.actions:  # type: ignore[union-attr]
        await episode.act([Call(action.name, action.arguments)])
    await episode.say(" ".join(task.evaluation_criteria.communicate_info or ["Done."]))  # type: ignore[union-attr]
    assert (await episode.outcome()).reward == 1.0 == official(episode).reward


async def test_only_the_write_without_the_reads_is_rewarded() -> None:
    task = find_task("retail", "0")
    episode = make("retail", task)
    await episode.start()
    write = task.evaluation_criteria.actions[-1]  # type: ignore[union-attr,index]
    await episode.act([Call(write.name, write.arguments)])
    await episode.say("Done.")
    assert (await episode.outcome()).reward == 1.0


@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_fresh_hashes_also_after_writes(domain: str, request: pytest.FixtureRequest) -> None:
    episode: Tau2Episode = request.getfixturevalue(domain)
    written = gold_hashes(domain, episode.task).agent
    fresh = make_environment(domain).get_db_hash()
    assert fresh is not None and fresh.startswith(FRESH[domain]) and written != fresh
    assert initial_hashes(domain, episode.task).agent == fresh


# --------------------------------------------------------------------------------------------------------------------
# Facts 28 and 29: pinned, because rewards hang on them.


@pytest.mark.parametrize(
    ("said", "wanted", "met"), [(AssistantMessage, "1628", True), (AssistantMessage, "1,628", False)]
)
def test_what_counts_as_communicated(said: Any, wanted: str, met: bool) -> None:
    messages = [said(role="assistant", content="Total is $1,628 today")]
    (check,) = CommunicateEvaluator.evaluate_communicate_info(messages, [wanted])
    assert check.met is met


def test_what_the_user_says_is_not_communicated() -> None:
    messages: list[Any] = [UserMessage(role="user", content="It is 1628, right?")]
    (check,) = CommunicateEvaluator.evaluate_communicate_info(messages, ["1628"])
    assert not check.met


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"a": 1, "b": "x"}, True),
        ({"a": 1}, True),
        ({}, True),
        ({"a": 1, "b": "x", "c": 2}, False),
        ({"a": "1"}, False),
    ],
)
def test_what_counts_as_a_matching_action(arguments: dict[str, Any], match: bool) -> None:
    action = Action(action_id="0", name="f", arguments={"a": 1, "b": "x"})
    assert action.compare_with_tool_call(ToolCall(name="f", arguments=arguments)) is match


# --------------------------------------------------------------------------------------------------------------------
# Facts 31 and 32.


def test_premature_ends_are_zero(airline: Tau2Episode) -> None:
    assert official(airline, end="agent_stop").reward == 1.0
    for end in PREMATURE:
        score = official(airline, end=end)
        assert (score.reward, score.evaluated, score.breakdown) == (0.0, False, {})


def tampered(messages: list[Message]) -> list[Message]:
    changed = [message.model_copy(deep=True) for message in messages]
    result = next(message for message in changed if isinstance(message, ToolMessage))
    result.content = "something else"
    return changed


def swapped(messages: list[Message]) -> list[Message]:
    """Two results in the wrong order."""
    changed = list(messages)
    places = [i for i, message in enumerate(changed) if isinstance(message, ToolMessage)]
    changed[places[0]], changed[places[1]] = changed[places[1]], changed[places[0]]
    return changed


def dangling(messages: list[Message]) -> list[Message]:
    return [*messages, next(m for m in messages if isinstance(m, AssistantMessage) and m.tool_calls)]


@pytest.mark.parametrize("spoil", [tampered, swapped, dangling])
def test_an_evaluator_that_raises_is_zero_and_counted(
    spoil: Any, retail: Tau2Episode, caplog: pytest.LogCaptureFixture
) -> None:
    score = official(retail, spoil(retail.messages))
    assert (score.reward, score.evaluated, score.breakdown) == (0.0, False, {EVAL_EXCEPTION: 1.0})
    assert score.error.startswith("ValueError: ") and "tau2_eval_exception: evaluating task '0'" in caplog.text


# --------------------------------------------------------------------------------------------------------------------
# Facts 24 and 25, live judging equals the official one; over every task.


def check_sample(domain: str, tasks: list[Task]) -> None:
    """Gold runs, and for some tasks all but the last action: both ways of judging agree, gold is rewarded."""
    for number, task in enumerate(tasks):
        for drop_last in (0, 1) if number % 4 == 0 else (0,):
            episode = asyncio.run(gold_run(domain, task, drop_last=drop_last))
            assert episode._environment is not None
            live = live_score(domain, task, episode._environment, episode.messages, "user_stop")
            assert live == official(episode), (task.id, drop_last)
            assert drop_last or live.reward == 1.0, task.id


@pytest.mark.parametrize("domain", ["mock", "telecom"])
def test_gold_sample(domain: str) -> None:
    tasks = list(official_tasks(domain))[:5]
    check_sample(domain, [task for task in tasks if task.evaluation_criteria.actions])  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_gold_run_is_rewarded(domain: str) -> None:
    tasks = list(official_tasks(domain))
    assert len(tasks) == {"airline": 50, "retail": 114, "telecom": 114}[domain]
    check_sample(domain, tasks)


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_gold_hash_is_that_of_a_plain_replay(domain: str) -> None:
    for task in official_tasks(domain):
        assert gold_hashes(domain, task) == replay_gold(domain, task), task.id


def test_floor_of_small_domains() -> None:
    nothing = floor("telecom")
    assert (nothing.passed, nothing.total, nothing.rate) == ((), 114, 0.0)
    assert floor("mock").describe() == "do-nothing floor 1/9 = 0.111 (3 without a write)"


def test_floor_of_a_sample() -> None:
    chosen = [find_task("retail", name) for name in ("10", "57", "0", "1")]
    assert floor_of("retail", chosen).passed == ("10", "57")


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "passed"), [("airline", AIRLINE_IDLE), ("retail", RETAIL_IDLE), ("telecom", [])])
def test_floors(domain: str, passed: list[str]) -> None:
    assert list(floor(domain).passed) == passed
    idle = [task for task in official_tasks(domain) if official_idle(domain, task)]
    assert [task.id for task in idle] == passed
    train, test = floor(domain, "train"), floor(domain, "test")
    assert sorted(train.passed + test.passed) == sorted(passed) and train.total + test.total == floor(domain).total


def official_idle(domain: str, task: Task) -> bool:
    return official_score(domain, task, idle_conversation(task), "user_stop").reward == 1.0


def test_an_environment_shares_nothing() -> None:
    task = find_task("mock", "create_task_1")
    first, second = task_environment("mock", task), task_environment("mock", task)
    before = state_hashes(second)
    first.make_tool_call("create_task", user_id="user_1", title="T")
    assert state_hashes(first) != before == state_hashes(second) == state_hashes(task_environment("mock", task))


def test_regular_ends() -> None:
    assert set(REGULAR_ENDS) == {"user_stop", "agent_stop", "out_of_scope"}
