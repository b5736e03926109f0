"""Model text to reasoning, text and tool calls.

Inputs: the decoded output and the tools offered. The engine's own parsers are used when they are named and can be
imported; otherwise `<tool_call>` blocks are read here, in three spellings:
    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
Invariants: nothing is executed; text that cannot be read stays text and is reported as `ill_formed`; without tools
nothing is parsed as a call. Leaves out: checking arguments against their schema, which the agent does.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

MOST_NESTED = 100

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_KEY_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_BARE_NAME = re.compile(r"\s*([\w.\-]+)\s*(.*)\Z", re.DOTALL)
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)


@dataclass
class ParsedModelOutput:
    """What an answer says."""

    reasoning: str
    text: str
    tool_uses: list[dict[str, Any]]
    """`{"name": str, "input": dict}` each, in order."""
    ill_formed: bool = False
    """A tool call was begun that cannot be read."""


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: list[dict] | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
) -> ParsedModelOutput:
    """Split an answer; without a reasoning parser's name there is no reasoning.

    Raises ValueError when the engine does not know a parser's name.
    """
    reasoning, body = _split_reasoning(raw_output, reasoning_parser_name)
    text, tool_uses, ill_formed = parse_tool_uses(body, tools_schema, tool_parser_name)
    return ParsedModelOutput(reasoning.strip(), text.strip(), tool_uses, ill_formed)


def parse_tool_uses(
    body_text: str, tools_schema: list[dict] | None, tool_parser_name: str | None
) -> tuple[str, list[dict[str, Any]], bool]:
    """(text outside of calls, calls, whether a call was begun that cannot be read)."""
    if not tools_schema:
        return body_text, [], False
    engine = _engine_tool_parser(tool_parser_name) if tool_parser_name else None
    if engine is not None:
        return _parse_with_engine(engine, body_text, tools_schema, str(tool_parser_name))
    text, tool_uses = parse_xml_tool_uses(body_text, tools_schema)
    return text, tool_uses, _OPEN in text or _CLOSE in text


def parse_xml_tool_uses(body_text: str, tools_schema: list[dict]) -> tuple[str, list[dict[str, Any]]]:
    """(text without the blocks that could be read, their calls)."""
    types = {schema["name"]: _parameter_types(schema) for schema in map(function_schema, tools_schema)}
    tool_uses: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        call = _read_block(match.group(1), types)
        if call is None:
            return match.group(0)
        tool_uses.append(call)
        return ""

    text = _BLOCK.sub(take, body_text)
    return (text.strip() if tool_uses else text), tool_uses


def function_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """`name`, `description` and `parameters` of a tool in OpenAI's or Anthropic's spelling."""
    nested = tool.get("function")
    function = nested if isinstance(nested, dict) else tool
    return {
        "name": function.get("name", ""),
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or function.get("input_schema") or {"type": "object"},
    }


def decode_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments as a dict; a string that is no JSON object is kept under `_raw_arguments`."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        decoded = load_json(arguments)
    except ValueError:
        decoded = None
    return decoded if isinstance(decoded, dict) else {"_raw_arguments": arguments}


def load_json(text: str | bytes) -> Any:
    """JSON whose strings a tokenizer takes (see `mend`). Raises ValueError, also for what nests too deep."""
    try:
        return mend(json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def mend(value: Any, depth: int = 0) -> Any:
    """A JSON value without lone surrogates, which `\\ud800` in JSON makes and no tokenizer takes.

    Raises ValueError when it nests deeper than `MOST_NESTED` levels: copying and encoding it would not be safe.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if depth > MOST_NESTED:
        raise ValueError(f"nested deeper than {MOST_NESTED} levels")
    if isinstance(value, list):
        return [mend(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {mend(key): mend(item, depth + 1) for key, item in value.items()}
    return value


def _parameter_types(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema["parameters"].get("properties") or {}
    return {name: value.get("type") for name, value in properties.items() if isinstance(value, dict)}


def _read_block(block: str, types: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The call inside one `<tool_call>` block, None when it cannot be read."""
    if block.lstrip().startswith("{"):
        return _read_json_call(block)
    if found := _FUNCTION.match(block):
        name, pairs, rest = found.group(1), _PARAMETER.findall(found.group(2)), _PARAMETER.sub("", found.group(2))
    elif found := _BARE_NAME.match(block):
        name, pairs, rest = found.group(1), _KEY_VALUE.findall(found.group(2)), _KEY_VALUE.sub("", found.group(2))
    else:
        return None
    if rest.strip():
        return None
    known = types.get(name, {})
    arguments = {key.strip(): _value(text, known.get(key.strip())) for key, text in pairs}
    return {"name": name, "input": arguments}


def _read_json_call(block: str) -> dict[str, Any] | None:
    try:
        call = load_json(block)
    except ValueError:
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        arguments = decode_arguments(arguments)
    return {"name": name, "input": arguments} if isinstance(arguments, dict) else None


def _value(text: str, kind: Any) -> Any:
    """A parameter's text as its schema has it: strings stay as they are, everything else is JSON when it can be."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    try:
        return load_json(text)
    except ValueError:
        return text


def _split_reasoning(text: str, parser_name: str | None) -> tuple[str, str]:
    if not parser_name:
        return "", text
    engine = _engine_reasoning_parser(parser_name)
    if engine is not None:
        reasoning, body = engine(model_type=parser_name, stream_reasoning=False).parse_non_stream(text)
        return reasoning or "", body or ""
    found = _THOUGHT.match(text)
    if found:
        return found.group(1), text[found.end() :]
    opened, begun, thought = text.partition("<think>")
    return (thought, opened) if begun and not opened.strip() else ("", text)


def _parse_with_engine(
    engine: Any, text: str, tools_schema: list[dict], parser_name: str
) -> tuple[str, list[dict[str, Any]], bool]:
    parser_class, tool_class = engine
    schemas = [function_schema(tool) for tool in tools_schema]
    parser = parser_class([tool_class(type="function", function=schema) for schema in schemas], parser_name)
    begun = parser.has_tool_call(text)
    rest, calls = parser.parse_non_stream(text)
    tool_uses = [{"name": call.name, "input": decode_arguments(call.parameters)} for call in calls]
    if begun and not tool_uses:
        return text, [], True
    return rest, tool_uses, any("_raw_arguments" in use["input"] for use in tool_uses)


@cache
def _engine_tool_parser(parser_name: str) -> Any | None:
    """(parser class, tool class) of the engine, or None when it cannot be imported here."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "tool parser %r: sglang cannot be imported, <tool_call> blocks are read: %s", parser_name, error
        )
        return None
    return FunctionCallParser, Tool


@cache
def _engine_reasoning_parser(parser_name: str) -> Any | None:
    """Parser class of the engine, or None when it cannot be imported here."""
    try:
        from sglang.srt.parser.reasoning_parser import ReasoningParser
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("reasoning parser %r: sglang cannot be imported, <think> is read: %s", parser_name, error)
        return None
    return ReasoningParser
