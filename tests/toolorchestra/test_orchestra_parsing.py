"""Facts 11 to 14 of parsing: what a turn may look like, and what never raises."""

from __future__ import annotations

import json

import pytest
from helpers_orchestra import FINISH, SEARCH, TOOLS, call, schema
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic.toolorchestra.environment import ToolCall
from agentic.toolorchestra.parsing import ParsedTurn, parse_turn, read_call, without_thought

CONVERSATION = [schema("call_expert", "expert", "expert-1", "expert-2"), schema("get_order", "order_id")]
ORDER = call("get_order", order_id="W1")


def qa(text: str, **options: bool) -> ParsedTurn:
    return parse_turn(text, TOOLS, "qa", **options)


def talk(text: str, max_calls: int = 5) -> ParsedTurn:
    return parse_turn(text, CONVERSATION, "func_call", max_calls)


def test_a_call_in_the_thought_is_no_call():
    """Fact 11."""
    parsed = qa(f"<think>first {SEARCH}\n</think>\n\n{FINISH}")
    assert [asked.name for asked in parsed.calls] == ["answer"] and parsed.format_ok and not parsed.errors


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("search", model="search-9"), "'search-9'"),
        ('<tool_call>{"name": "search", "arguments": {"model": "search-1"}}', "not closed"),
        ('<tool_call>{"name": "search", "arguments": {"model": "search-1"}, "id": 1}</tool_call>', "exactly the keys"),
        ('<tool_call>{"name": "search"}</tool_call>', "exactly the keys"),
        ('<tool_call>["search"]</tool_call>', "exactly the keys"),
        ('<tool_call>{"name": "search", "arguments": ["search-1"]}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', '"model" is missing'),
        ('<tool_call>{"name": "nope", "arguments": {}}</tool_call>', "no tool 'nope'; tools: search, answer"),
        ('<tool_call>{"name": ["search"], "arguments": {}}</tool_call>', "no tool"),
        ('<tool_call>{"name": "search", "arguments": {"model": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "search", "name": "answer", "arguments": {}}</tool_call>', "twice"),
        ('<tool_call>{"name": "search", "arguments": {"model": "\\ud800"}}</tool_call>', "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('{"name": "search", "arguments": {"model": "search-1"}}', "no tool call"),
        (f"<think>I should {SEARCH}", "thought is not closed"),
        (f"</think>again <think>{SEARCH}", "thought is not closed"),
        ("", "no tool call"),
    ],
)
def test_what_is_no_call(text: str, error: str):
    """Fact 12: no call, and the error says what was wrong."""
    parsed = qa(text)
    assert parsed.calls == () and not parsed.format_ok
    assert len(parsed.errors) == 1 and error in parsed.errors[0] and len(parsed.errors[0]) < 300


def test_arguments_as_text_are_decoded_once():
    inner = json.dumps({"model": "search-1"})
    once = f'<tool_call>{json.dumps({"name": "search", "arguments": inner})}</tool_call>'
    assert qa(once).calls == (ToolCall("search", {"model": "search-1"}),)
    twice = f'<tool_call>{json.dumps({"name": "search", "arguments": json.dumps(inner)})}</tool_call>'
    assert qa(twice).calls == ()


def test_questions_run_each_tool_once_and_nothing_after_the_answer():
    """Fact 13."""
    parsed = qa(SEARCH + call("search", model="search-2") + FINISH + SEARCH)
    assert parsed.calls == (ToolCall("search", {"model": "search-1"}), ToolCall("answer", {"model": "answer-1"}))
    assert parsed.ignored == 2
    assert [asked.name for asked in qa(FINISH + SEARCH).calls] == ["answer"]


def test_an_expert_has_the_turn_for_itself():
    """Fact 14."""
    parsed = talk(ORDER + call("call_expert", expert="expert-2") + ORDER)
    assert parsed.calls == (ToolCall("call_expert", {"expert": "expert-2"}),) and parsed.ignored == 2


def test_calls_of_a_turn_are_capped():
    parsed = talk(ORDER * 7, max_calls=5)
    assert len(parsed.calls) == 5 and parsed.ignored == 2


def test_a_good_call_beside_a_bad_one():
    parsed = talk(ORDER + call("call_expert", expert="nobody"))
    assert [asked.name for asked in parsed.calls] == ["get_order"] and parsed.format_ok
    assert "allowed: expert-1, expert-2" in parsed.errors[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<think>plan ###STOP###</think>\n\nHello there.", "Hello there."),
        ("I check. <message> Hello. </message>", "Hello."),
        ("<message>a</message> and <message>b</message>", "a\nb"),
        (f"<message>Wait.</message>{ORDER}", ""),
        ("<message>not closed", ""),
        ("<tool_call>{}</tool_call> I am broken", ""),
        ("<tool_call>{}</tool_call><message>Sorry.</message>", "Sorry."),
        ("</tool_call> odd", ""),
        (" \n ", ""),
    ],
)
def test_messages_to_the_user(text: str, message: str):
    parsed = talk(text)
    assert parsed.message_text == message
    assert parsed.format_ok == bool(message or parsed.calls)


def test_questions_have_no_messages():
    parsed = qa("It is four.")
    assert parsed.message_text == "" and not parsed.format_ok


def test_a_prompt_that_opens_the_thought():
    assert qa(SEARCH, thought_open=True).errors == ("the thought is not closed",)
    assert qa(f"hm {FINISH}</think>{SEARCH}", thought_open=True).calls == (ToolCall("search", {"model": "search-1"}),)
    assert without_thought("a</think>b", thought_open=True) == "b"


def test_further_parameters_are_refused_only_where_the_schema_says_so():
    closed = schema("get_order", "order_id")
    closed["function"]["parameters"]["additionalProperties"] = False
    text = call("get_order", order_id="W1", colour="red")
    assert talk(text).calls[0].arguments == {"order_id": "W1", "colour": "red"}
    assert "no parameter 'colour'" in parse_turn(text, [closed], "func_call").errors[0]


def test_read_call_of_one_object():
    assert read_call('{"name": "get_order", "arguments": {"order_id": "W1"}}', CONVERSATION) is not None
    assert read_call("[", CONVERSATION) is None


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<message>", "</message>", "{", "}", SEARCH, ORDER]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8)).map("".join), st.sampled_from(["qa", "func_call"]))
def test_no_text_raises(text: str, category: str):
    tools = TOOLS if category == "qa" else CONVERSATION
    parsed = parse_turn(text, tools, category)
    assert parsed.format_ok == bool(parsed.calls or parsed.message_text)
    assert parsed.format_ok or parsed.errors
    assert not parsed.calls or without_thought(text) is not None
