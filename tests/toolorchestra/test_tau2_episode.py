"""The episode under tau2's protocol: offered tools, turns, experts, limits, dual control. Mostly the small mock domain."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers_tau2 import CONFIG, FakeDesk, expert_reply, gold_run, make, tool_names
from tau2.data_model.message import AssistantMessage, Message, ToolMessage, UserMessage

from agentic.common.errors import ConfigError
from agentic.common.roles import Role
from agentic.toolorchestra.environment import Observation, ToolCall
from agentic.toolorchestra.tau2 import texts
from agentic.toolorchestra.tau2.environments import domain_facts
from agentic.toolorchestra.tau2.episode import Tau2Episode, make_episode
from agentic.toolorchestra.tau2.tasks import DOMAINS, find_task
from agentic.toolorchestra.tau2.users import STOP, ModelUser, ScriptedUser

TASK = find_task("mock", "create_task_1")
CREATE = ToolCall("create_task", {"user_id": "user_1", "title": "Important Meeting"})
EXPERTS = ("expert-1", "expert-2")


def calls_of(episode: Tau2Episode) -> list[str]:
    messages = [m for m in episode.messages if isinstance(m, (AssistantMessage, UserMessage))]
    return [call.name for message in messages for call in message.tool_calls or []]


def ask_expert(name: str = "expert-2") -> ToolCall:
    return ToolCall("call_expert", {"expert": name})


# --------------------------------------------------------------------------------------------------------------------
# What the policy is offered.


@pytest.mark.parametrize("domain", DOMAINS)
def test_experts_replace_transfers_in_every_policy(domain: str) -> None:
    official = domain_facts(domain).policy
    text = texts.with_experts(official, domain)
    assert text != official and "consult an expert with call_expert" in text
    lowered = text.lower()
    assert "transfer_to_human_agents" not in lowered and "transferring" not in lowered
    assert "hold on" not in lowered and "transfer is needed" not in lowered
    # Nothing else changed.
    assert len(text) > 0.9 * len(official)


def test_a_policy_that_changed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="policy of domain 'x': .* it mentions no transfer"):
        texts.with_experts("Be kind.", "x")
    mixed = "You should transfer the user to a human agent. If lost, Transfer them to an Agent quickly."
    with pytest.raises(ConfigError, match="'Transfer them to an Agent' is left"):
        texts.with_experts(mixed, "x")
    with pytest.raises(ConfigError, match="is left"):
        texts.with_experts("You should transfer the user to a human agent. Call transfer_to_human_agents.", "x")


def test_unrelated_transfers_stay() -> None:
    assert "last eSIM transfer date" in texts.with_experts(domain_facts("telecom").policy, "telecom")


@pytest.mark.parametrize("domain", DOMAINS)
def test_offered_tools(domain: str) -> None:
    task = find_task("mock", "create_task_1")
    episode = make(domain, task, desk=FakeDesk([*EXPERTS, "search-1"]))
    names = tool_names(episode)
    assert "transfer_to_human_agents" not in names and names.count("call_expert") == 1
    expert = episode.tools[-1]["function"]
    assert expert["parameters"]["properties"]["expert"]["enum"] == list(EXPERTS)
    assert expert["parameters"]["required"] == ["expert"] and "expert-2: a model" in expert["description"]
    official = [tool["function"]["name"] for tool in domain_facts(domain).tools]
    assert set(official) - set(names) == {"transfer_to_human_agents"}


async def test_without_experts_it_is_plain_tau2() -> None:
    episode = make("mock", TASK)
    system = (await episode.start())[0]["content"]
    assert "call_expert" not in tool_names(episode) and "transfer_to_human_agents" in tool_names(episode)
    assert domain_facts("mock").policy in system
    assert (await episode.act([ToolCall("transfer_to_human_agents", {"summary": "s"})])).texts == (
        "Transfer successful",
    )


async def test_first_prompt() -> None:
    messages = await make("mock", TASK, ["A task, please."], FakeDesk(EXPERTS)).start()
    assert [m["role"] for m in messages] == ["system", "assistant", "user"]
    assert messages[1]["content"] == "Hi! How can I help you today?" and messages[2]["content"] == "A task, please."
    assert "<message>" in messages[0]["content"] and texts.CONSULT in messages[0]["content"]


# --------------------------------------------------------------------------------------------------------------------
# Turns.


async def test_a_whole_episode() -> None:
    episode = make("mock", TASK, ["A task, please.", "And now?"])
    await episode.start()
    observation = await episode.act([CREATE])
    assert observation.kind == "tool" and json.loads(observation.texts[0])["title"] == "Important Meeting"
    assert await episode.say("Created.") == Observation("user", ("And now?",))
    assert await episode.say("That is all.") == Observation("end")
    assert (episode.termination, episode.steps, len(episode.messages)) == ("user_stop", 7, 8)
    outcome = await episode.outcome("turn_limit")
    assert (outcome.reward, outcome.valid_answer, outcome.termination) == (1.0, True, "user_stop")
    assert await episode.act([CREATE]) == Observation("end") == await episode.say("More?")
    episode.close()
    episode.close()
    with pytest.raises(ValueError, match="unclosed"):
        await episode.outcome()


async def test_several_calls_are_answered_in_order() -> None:
    episode = make("mock", TASK)
    await episode.start()
    unknown = ToolCall("nope", {})
    observation = await episode.act([ToolCall("get_users", {}), unknown, CREATE])
    assert len(observation.texts) == 3 and observation.texts[1].startswith("Error: Tool 'nope' not found")
    recorded = episode.messages[2:]
    assert isinstance(recorded[0], AssistantMessage) and len(recorded[0].tool_calls or []) == 3
    assert [m.id for m in recorded[1:] if isinstance(m, ToolMessage)] == [c.id for c in recorded[0].tool_calls or []]
    assert (episode.errors, episode.steps) == (1, 3)


async def test_empty_actions_are_refused() -> None:
    episode = make("mock", TASK)
    await episode.start()
    with pytest.raises(ValueError, match="without calls"):
        await episode.act([])
    with pytest.raises(ValueError, match="no empty message"):
        await episode.say(" \n")
    with pytest.raises(ValueError, match="has ended, or the termination"):
        await episode.outcome()
    assert len(episode.messages) == 2


@pytest.mark.parametrize("reason", ["turn_limit", "format_errors", "length"])
async def test_an_end_by_the_loop_is_zero_and_no_valid_answer(reason: str) -> None:
    episode = make("mock", TASK)
    await episode.start()
    await episode.act([CREATE])
    outcome = await episode.outcome(reason)
    assert (outcome.reward, outcome.valid_answer, outcome.termination) == (0.0, False, reason)


async def test_the_hidden_transfer_tool_is_refused_and_not_recorded() -> None:
    """Recorded, it would succeed in the official replay and contradict what the policy was told."""
    episode = make("mock", TASK, desk=FakeDesk(EXPERTS))
    await episode.start()
    transfer = ToolCall("transfer_to_human_agents", {"summary": "s"})
    observation = await episode.act([transfer, CREATE])
    assert observation.texts[0] == "Error: Tool 'transfer_to_human_agents' not found."
    assert json.loads(observation.texts[1])["title"] == "Important Meeting"
    assert calls_of(episode) == ["create_task"] and episode.errors == 1
    assert (await episode.act([transfer])).kind == "tool" and episode.errors == 2


async def test_powers_are_refused_before_they_can_hang_the_process() -> None:
    """tau2's calculator evaluates the text as it comes, in the process and again in the official replay."""
    power = ToolCall("calculate", {"expression": "9**9**9"})
    desk = FakeDesk(EXPERTS, [expert_reply("", power, ToolCall("calculate", {"expression": "2 * 21"}))])
    episode = make("retail", find_task("retail", "0"), desk=desk)
    await episode.start()
    assert (await episode.act([power])).texts == ("Error: Invalid characters in expression",)
    (text,) = (await episode.act([ask_expert()])).texts
    assert "Error: Invalid characters" in text and text.endswith('calculate({"expression": "2 * 21"}) returned:\n42.0')
    assert calls_of(episode) == ["calculate"] and episode.errors == 2


async def test_arguments_are_not_shared_with_the_record() -> None:
    episode = make("mock", TASK)
    await episode.start()
    arguments: dict[str, Any] = {"user_id": "user_1", "title": "T"}
    await episode.act([ToolCall("create_task", arguments)])
    arguments["title"] = "changed"
    recorded = episode.messages[2]
    assert isinstance(recorded, AssistantMessage) and recorded.tool_calls
    assert recorded.tool_calls[0].arguments["title"] == "T"


# --------------------------------------------------------------------------------------------------------------------
# Limits.


async def test_too_many_errors_after_ten_errors_and_21_steps() -> None:
    """Fact 26, second part."""
    episode = make("mock", TASK)
    await episode.start()
    turns = 0
    while (await episode.act([ToolCall("nope", {})])).kind == "tool":
        turns += 1
    assert (turns, episode.errors, episode.steps, episode.termination) == (9, 10, 21, "too_many_errors")
    outcome = await episode.outcome()
    assert (outcome.reward, outcome.valid_answer) == (0.0, False)


async def test_max_steps_counts_messages_and_lets_a_pending_call_finish() -> None:
    config = replace(CONFIG, tau2_max_steps=4, tau2_eval_max_steps=6)
    episode = make("mock", TASK, config=config)
    await episode.start()
    assert (await episode.act([CREATE])).kind == "tool"
    assert (await episode.act([CREATE])).kind == "end"
    assert (episode.steps, episode.termination) == (5, "max_steps")
    longer = make("mock", TASK, config=config, evaluation=True)
    await longer.start()
    assert [(await longer.act([CREATE])).kind for _ in range(3)] == ["tool", "tool", "end"]


async def test_max_steps_before_the_user_answers() -> None:
    episode = make("mock", TASK, config=replace(CONFIG, tau2_max_steps=2))
    await episode.start()
    assert await episode.say("Hello?") == Observation("end")
    assert isinstance(episode.messages[-1], AssistantMessage) and episode.termination == "max_steps"


async def test_a_stop_of_the_user_beats_a_limit_in_the_same_step() -> None:
    episode = make("mock", TASK, config=replace(CONFIG, tau2_max_steps=5))
    await episode.start()
    await episode.act([CREATE])
    assert (await episode.say("Created.")).kind == "end"
    assert (episode.steps, episode.termination) == (5, "user_stop")
    assert (await episode.outcome()).reward == 1.0


@pytest.mark.parametrize(
    ("text", "termination"),
    [(f"Thanks! {STOP}", "user_stop"), ("###TRANSFER###", "user_stop"), ("Eh. ###OUT-OF-SCOPE###", "out_of_scope")],
)
async def test_markers_of_the_user(text: str, termination: str) -> None:
    episode = make("mock", TASK, ["A task.", text])
    await episode.start()
    await episode.act([CREATE])
    assert (await episode.say("Created.")).kind == "end"
    outcome = await episode.outcome()
    assert (outcome.termination, outcome.reward) == (termination, 1.0)


async def test_a_user_that_stops_at_once() -> None:
    episode = make("mock", TASK, [STOP])
    await episode.start()
    assert (await episode.act([CREATE])).kind == "end" and calls_of(episode) == []


# --------------------------------------------------------------------------------------------------------------------
# Experts.


async def test_beside_an_expert_nothing_else_runs() -> None:
    """Fact 14."""
    desk = FakeDesk(EXPERTS, [expert_reply("", ToolCall("get_users", {}))])
    episode = make("mock", TASK, desk=desk)
    await episode.start()
    observation = await episode.act([CREATE, ask_expert(), CREATE])
    assert [asked[0] for asked in desk.asked] == ["expert-2"] and calls_of(episode) == ["get_users"]
    assert len(observation.texts) == 1
    assert observation.texts[0].startswith("expert-2 called tools.\nget_users({}) returned:\n")
    assert "user_1" in observation.texts[0]


async def test_an_expert_sees_the_original_policy_tools_and_conversation() -> None:
    desk = FakeDesk(EXPERTS, [expert_reply("Which title?")])
    episode = make("mock", TASK, ["A task.", "Lunch."], desk)
    await episode.start()
    await episode.act([ToolCall("get_users", {})])
    observation = await episode.act([ask_expert("expert-1")])
    assert observation == Observation(
        "tool", ("expert-1 wrote to the user:\nWhich title?\nThe user answered:\nLunch.",)
    )
    _, messages, tools = desk.asked[0]
    names = [tool["function"]["name"] for tool in tools]
    assert "transfer_to_human_agents" in names and "call_expert" not in names
    assert domain_facts("mock").policy in messages[0]["content"]
    assert [m["role"] for m in messages[1:]] == ["assistant", "user", "assistant", "tool"]
    call, result = messages[3]["tool_calls"][0], messages[4]
    assert call["id"] == result["tool_call_id"] and call["function"] == {"name": "get_users", "arguments": "{}"}
    assert [type(m).__name__ for m in episode.messages[-2:]] == ["AssistantMessage", "UserMessage"]
    assert episode.messages[-2].content == "Which title?"


async def test_an_expert_may_transfer_and_end_the_episode() -> None:
    transfer = ToolCall("transfer_to_human_agents", {"summary": "s"})
    desk = FakeDesk(EXPERTS, [expert_reply("", CREATE, transfer), expert_reply("<think>x</think>Bye.")])
    episode = make("mock", TASK, desk=desk)
    await episode.start()
    assert (await episode.act([ask_expert()])).kind == "tool"
    assert await episode.act([ask_expert()]) == Observation("end")
    assert episode.messages[-2].content == "Bye." and (await episode.outcome()).reward == 1.0
    assert calls_of(episode) == ["create_task", "transfer_to_human_agents"]


async def test_useless_experts_are_errors_that_nothing_records() -> None:
    desk = FakeDesk(EXPERTS, [expert_reply(" \n")])
    episode = make("mock", TASK, desk=desk)
    await episode.start()
    before = len(episode.messages)
    assert (await episode.act([ask_expert()])).texts == (
        "Error: expert-2 neither called a tool nor wrote to the user.",
    )
    unknown = await episode.act([ToolCall("call_expert", {"expert": "expert-9"})])
    assert unknown.texts == ("Error: There is no expert 'expert-9'; experts: expert-1, expert-2",)
    assert len(episode.messages) == before and episode.errors == 2


async def test_calls_of_an_expert_are_capped() -> None:
    desk = FakeDesk(EXPERTS, [expert_reply("", *[ToolCall("get_users", {})] * 9)])
    episode = make("mock", TASK, desk=desk, config=replace(CONFIG, max_calls_per_turn=3))
    await episode.start()
    await episode.act([ask_expert()])
    assert calls_of(episode) == ["get_users"] * 3


# --------------------------------------------------------------------------------------------------------------------
# Initial states, dual control.


async def test_a_history_is_continued() -> None:
    """The history of this task ends with a text of the agent, so the user speaks first."""
    task = find_task("mock", "update_task_with_message_history")
    episode = make("mock", task, ["Mark it completed."])
    messages = await episode.start()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert messages[2]["tool_calls"][0]["function"]["name"] == "create_task"
    await episode.act([ToolCall("update_task_status", {"task_id": "task_2", "status": "completed"})])
    assert (await episode.say("Done.")).kind == "end" and (await episode.outcome()).reward == 1.0
    # The task itself is untouched.
    assert len(task.initial_state.message_history) == 4  # type: ignore[union-attr,arg-type]


async def test_dual_control() -> None:
    """The user's own calls run in the environment, between the agent's message and the user's text."""
    task = find_task("telecom", "[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]")
    lines: list[Any] = ["No data.", ("toggle_airplane_mode", {}), ("check_status_bar", {}), "It is off now."]
    episode = make("telecom", task, lines)
    await episode.start()
    before = episode.steps
    assert await episode.say("Toggle airplane mode.") == Observation("user", ("It is off now.",))
    assert episode.steps - before == 6
    kinds: list[tuple[type[Message], str | None]] = [
        (type(m), getattr(m, "requestor", None)) for m in episode.messages
    ]
    assert kinds[-6:-1] == [
        (AssistantMessage, None),
        (UserMessage, None),
        (ToolMessage, "user"),
        (UserMessage, None),
        (ToolMessage, "user"),
    ]
    # The agent sees neither.
    assert [m["role"] for m in episode._conversation("", "")[1:]] == ["assistant", "user", "assistant", "user"]


async def test_a_gold_run_with_dual_control() -> None:
    task = find_task("telecom", "[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]")
    episode = await gold_run("telecom", task)
    outcome = await episode.outcome()
    assert (outcome.reward, outcome.breakdown) == (1.0, {"ENV_ASSERTION": 1.0})


# --------------------------------------------------------------------------------------------------------------------
# Construction from a sample.


def test_episodes_of_samples() -> None:
    metadata = {"category": "func_call", "domain": "mock", "task_id": "create_task_1"}
    scripted = make_episode(metadata, None, FakeDesk(), CONFIG)  # type: ignore[arg-type]
    assert isinstance(scripted._user, ScriptedUser) and scripted.category == "func_call"
    by_model = replace(CONFIG, user="llm")
    with pytest.raises(ConfigError, match="needs the role `user`"):
        make_episode(metadata, None, FakeDesk(), by_model)  # type: ignore[arg-type]
    role = Role("user", "http://127.0.0.1:9", api="chat", model="m", temperature=0.0, max_new_tokens=64)
    assert isinstance(make_episode(metadata, role, FakeDesk(), by_model)._user, ModelUser)  # type: ignore[arg-type]
