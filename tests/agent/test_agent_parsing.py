"""Tool calls and reasoning in model text: three spellings, broken ones, the engine's parsers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_agent import tool_schema
from hypothesis import given
from hypothesis import strategies as st

from slime.agent import parsing
from slime.agent.parsing import decode_arguments, mend, parse_model_output, parse_tool_uses, parse_xml_tool_uses

COUNT = {
    "name": "count",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
}
TOOLS = [tool_schema("look"), COUNT]


def parse(text: str, tools: list[dict] | None = TOOLS, reasoning: str | None = None) -> Any:
    return parse_model_output(text, tools_schema=tools, tool_parser_name=None, reasoning_parser_name=reasoning)


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "count", "arguments": {"n": 1, "s": "2"}}',
        '\n{"name": "count", "arguments": "{\\"n\\": 1, \\"s\\": \\"2\\"}"}\n',
        "\n<function=count>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n</function>\n",
        "count\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>2</arg_value>\n",
    ],
)
def test_spellings_of_a_call(block: str) -> None:
    parsed = parse(f"Let me count. <tool_call>{block}</tool_call>\n")
    assert parsed.tool_uses == [{"name": "count", "input": {"n": 1, "s": "2"}}]
    assert (parsed.text, parsed.reasoning, parsed.ill_formed) == ("Let me count.", "", False)


def test_several_calls_keep_their_order() -> None:
    text = "".join(f'<tool_call>{{"name": "look", "arguments": {{"q": "{i}"}}}}</tool_call>' for i in range(3))
    assert [use["input"]["q"] for use in parse(text).tool_uses] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "look", "arguments": {"q": "x"}}',
        '<tool_call>{"name": "look", "arguments": {"q": }}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["look"]</tool_call>',
        "<tool_call>look around, please</tool_call>",
        "<tool_call><function=look>q=1</function></tool_call>",
        '{"name": "look"}</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_broken_calls_stay_text_and_are_reported(text: str) -> None:
    parsed = parse(text)
    assert (parsed.text, parsed.tool_uses, parsed.ill_formed) == (text, [], True)


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for tools in (None, []):
        assert parse_tool_uses(text, tools, None) == (text, [], False)


def test_xml_parser_alone() -> None:
    text, uses = parse_xml_tool_uses('a <tool_call>{"name": "f", "arguments": {}}</tool_call> b', [])
    assert (text, uses) == ("a  b", [{"name": "f", "input": {}}])
    assert parse_xml_tool_uses("  plain ", TOOLS) == ("  plain ", [])


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": ', {"_raw_arguments": '{"a": '}),
        ("[1]", {"_raw_arguments": "[1]"}),
        ("[" * 100_000, {"_raw_arguments": "[" * 100_000}),
        ('{"a": "\\ud800"}', {"a": "?"}),
        ('{"a":' * 101 + "1" + "}" * 101, {"_raw_arguments": '{"a":' * 101 + "1" + "}" * 101}),
    ],
)
def test_arguments_become_a_dict(given_: Any, wanted: dict) -> None:
    assert decode_arguments(given_) == wanted


def test_reasoning_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_engine_reasoning_parser", lambda name: None)
    for text in ("<think>why\n</think>\n\nso", "why</think>so"):
        parsed = parse(text, reasoning="qwen3")
        assert (parsed.reasoning, parsed.text) == ("why", "so")
    assert parse("<think>no end", reasoning="qwen3").reasoning == "no end"
    assert parse("so", reasoning="qwen3").text == "so"
    assert parse("<think>why</think>so").text == "<think>why</think>so"


class FakeEngineParser:
    """The calls this module makes of the engine's parser."""

    def __init__(self, tools: list[Any], name: str) -> None:
        assert [tool.function["name"] for tool in tools] == ["look", "count"] and name == "special"

    def has_tool_call(self, text: str) -> bool:
        return "CALL" in text

    def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
        before, _, arguments = text.partition("CALL")
        calls = [SimpleNamespace(name="look", parameters=arguments)] if arguments else []
        return before, calls


def test_the_engines_parser_is_used_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_engine_tool_parser", lambda name: (FakeEngineParser, SimpleNamespace))
    good = json.dumps({"q": "x"})
    assert parse_tool_uses("a CALL" + good, TOOLS, "special") == ("a ", [{"name": "look", "input": {"q": "x"}}], False)
    text, uses, ill_formed = parse_tool_uses("a CALL{", TOOLS, "special")
    assert (uses, ill_formed) == ([{"name": "look", "input": {"_raw_arguments": "{"}}], True)
    assert parse_tool_uses("a CALL", TOOLS, "special") == ("a CALL", [], True)
    assert parse_tool_uses("plain", TOOLS, "special") == ("plain", [], False)


@given(st.text(alphabet='<tool_call>/{}"name:argumnts=funcprke_yvl \n', max_size=120))
def test_any_text_is_taken(text: str) -> None:
    parsed = parse(text)
    assert mend(parsed.text) == parsed.text
    assert all(isinstance(use["input"], dict) for use in parsed.tool_uses)
