"""The customer: scripted, or a model over a real HTTP endpoint. Fact 33."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers_agentic import FakeEngine, Reply
from helpers_tau2 import CONFIG, FakeDesk
from tau2.data_model.message import AssistantMessage, UserMessage

from agentic.common.errors import InfrastructureError, RoleBadResponse
from agentic.common.roles import Role
from agentic.toolorchestra.environment import Observation, ToolCall
from agentic.toolorchestra.tau2.environments import domain_facts
from agentic.toolorchestra.tau2.episode import Tau2Episode
from agentic.toolorchestra.tau2.tasks import find_task
from agentic.toolorchestra.tau2.users import MOST_ASKS, STOP, ModelUser, ScriptedUser, guidelines

TASK = find_task("mock", "create_task_1")
TELECOM = find_task("telecom", "[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]")


def user_role(url: str, **overrides: Any) -> Role:
    settings: dict[str, Any] = {"api": "chat", "model": "qwen-something", "temperature": 0.0, "max_new_tokens": 4096}
    return Role("user", url, **({"timeout_s": 60.0, "retries": 0} | settings | overrides))


class Script:
    """Says the texts in order, whatever it is asked."""

    def __init__(self, *texts: str | Reply) -> None:
        self.texts = list(texts)

    def __call__(self, prompt: str) -> str | Reply:
        return self.texts.pop(0)


async def episode_with(engine: FakeEngine, domain: str = "mock", task: Any = TASK) -> Tau2Episode:
    episode = Tau2Episode(task, domain, ModelUser(task, user_role(engine.url)), FakeDesk(), CONFIG)  # type: ignore
    await episode.start()
    return episode


async def test_thoughts_are_neither_recorded_nor_read_for_markers() -> None:
    """Fact 33."""
    script = Script(
        f"<think>I could say {STOP} now.</think>\n\nA task, please.",
        f"The instructions mention {STOP}.</think>Thank you.",
        f"<think>Over.</think>{STOP}",
    )
    with FakeEngine(script) as engine:
        episode = await episode_with(engine)
        assert episode.termination is None
        assert await episode.say("Which?") == Observation("user", ("Thank you.",))
        assert await episode.say("Bye.") == Observation("end")
        shown = [json.dumps(request.body["messages"]) for request in engine.requests]
    assert [m.content for m in episode.messages if isinstance(m, UserMessage)] == [
        "A task, please.",
        "Thank you.",
        STOP,
    ]
    assert not any("think>" in str(m.content) for m in episode.messages) and not any(
        "think>" in text for text in shown
    )


async def test_what_the_model_is_shown() -> None:
    """The package's guidelines and the scenario, roles exchanged; no word about tags or tools of the agent."""
    with FakeEngine(Script("A task, please.", "Lunch.")) as engine:
        episode = await episode_with(engine)
        await episode.act([ToolCall("get_users", {})])
        await episode.say("Which title?")
        first, second = (request.body["messages"] for request in engine.requests)
    assert first[0]["content"].startswith(guidelines(False)) and str(TASK.user_scenario) in first[0]["content"]
    assert "<tool_call>" not in first[0]["content"] and "<message>" not in first[0]["content"]
    assert first[1:] == [{"role": "user", "content": "Hi! How can I help you today?"}]
    spoken = [{"role": "assistant", "content": "A task, please."}, {"role": "user", "content": "Which title?"}]
    assert second == [*first, *spoken]


@pytest.mark.parametrize("useless", ["", "  \n", "<think>never closed", "<think>closed</think>\n", "<tool_call>{"])
async def test_a_useless_message_is_asked_for_again(useless: str) -> None:
    with FakeEngine(Script(useless, "A task, please.", STOP)) as engine:
        episode = await episode_with(engine)
        again = engine.requests[1].body["messages"]
        await episode.say("Done.")
        after = engine.requests[2].body["messages"]
    assert episode.messages[1].content == "A task, please."
    assert again[-1]["content"].startswith("(Your last message could not be used: ")
    # The question itself leaves no trace.
    assert again[-1] not in after and len(after) == 4


async def test_a_user_that_stays_silent_is_an_infrastructure_failure() -> None:
    with FakeEngine(lambda prompt: "") as engine:
        with pytest.raises(RoleBadResponse, match="no usable user message in 3 attempts") as caught:
            await episode_with(engine)
    assert caught.value.reason == "role_bad_response:user" and len(engine.requests) == MOST_ASKS


async def test_a_user_that_is_down_is_an_infrastructure_failure() -> None:
    with FakeEngine(lambda prompt: Reply("no", status=503)) as engine:
        with pytest.raises(InfrastructureError, match="role_unavailable:user"):
            await episode_with(engine)


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_the_user_has_tools_of_its_own() -> None:
    """Telecom: calls before the text, run in the environment, results only for the user."""
    script = Script(
        "No data.",
        "Let me see. " + call_text("check_status_bar"),
        call_text("toggle_airplane_mode"),
        "Airplane mode is off.",
    )
    with FakeEngine(script) as engine:
        episode = await episode_with(engine, "telecom", TELECOM)
        assert await episode.say("Airplane mode?") == Observation("user", ("Airplane mode is off.",))
        system = engine.requests[0].body["messages"][0]["content"]
        seen = engine.requests[2].body["messages"]
    assert system.startswith(guidelines(True)) and '"name": "toggle_airplane_mode"' in system
    assert len(domain_facts("telecom").user_tools) == 30
    assert seen[-1]["content"].startswith("<tool_response>\n") and seen[-2]["content"].startswith(
        "Let me see.\n<tool_"
    )
    called = [m for m in episode.messages if isinstance(m, UserMessage) and m.tool_calls]
    assert [m.tool_calls[0].requestor for m in called if m.tool_calls] == ["user", "user"]
    # Said beside a call, it is kept and ends nothing.
    assert called[0].content == "Let me see." and called[1].content is None
    assert len({m.tool_calls[0].id for m in called if m.tool_calls}) == 2
    outcome = await episode.outcome("turn_limit")
    assert outcome.reward == 0.0


@pytest.mark.parametrize("bad", [call_text("refuel_data"), '<tool_call>{"name": "toggle_roaming"}</tool_call>'])
async def test_a_malformed_call_of_the_user_is_asked_for_again(bad: str) -> None:
    with FakeEngine(Script(bad, "No data.")) as engine:
        episode = await episode_with(engine, "telecom", TELECOM)
        reminder = engine.requests[1].body["messages"][-1]["content"]
    assert episode.messages[1].content == "No data." and len(episode.messages) == 2
    assert "refuel_data" in reminder or "arguments" in reminder


async def test_the_scripted_user() -> None:
    user = ScriptedUser.for_task(find_task("airline", "7"), confirmations=1)
    hello = AssistantMessage(role="assistant", content="Hi!")
    texts = [(await user.reply([hello])).content or "" for _ in range(3)]
    assert "XEHM4B" in texts[0] and "daiki_muller_1116" in texts[0] and "very persistent" in texts[0]
    assert texts[1:] == ["Yes, please go ahead.", STOP]
    plain = ScriptedUser.for_task(find_task("mock", "update_task_with_message_history"))
    assert "mark the task as completed" in ((await plain.reply([hello])).content or "")
