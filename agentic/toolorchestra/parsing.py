"""Reads one turn: the thought is dropped, closed `<tool_call>` blocks become checked calls, the rest is a message.

Inputs: the decoded completion of a turn (Hermes convention of the Qwen templates) and the function schemas offered in
this sample. Invariants: nothing raises, whatever the text; nothing inside a thought is ever a call; a call is accepted
only whole (closed block, JSON object of exactly `name` and `arguments`, known name, required and enumerated parameters
right); errors are words for the policy. Calls are never written back: the token stream keeps what was generated.
Leaves out: types of further parameters (the environment answers for those), token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentic.toolorchestra.environment import ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MESSAGE_OPEN, MESSAGE_CLOSE = "<message>", "</message>"
_MESSAGE = re.compile(r"(?s)<message>(.*?)</message>")
EXPERT_CALL = "call_expert"
ANSWER_CALL = "answer"
_SHOWN_CHARS = 80
_MOST_ERRORS = 3


@dataclass(frozen=True)
class ParsedTurn:
    """What a turn asks for."""

    calls: tuple[ToolCall, ...] = ()
    """Calls to carry out, in order."""
    message_text: str = ""
    """Text to the user; empty when there is none, and always for `qa`."""
    format_ok: bool = False
    """There is a valid call or, for `func_call`, a usable message."""
    errors: tuple[str, ...] = ()
    """What was wrong, in words for the policy."""
    ignored: int = 0
    """Valid calls left out by the rules of `select_calls`."""


class _Bad(ValueError):
    """One block cannot be used; the text says why."""


def parse_turn(
    text: str, tools: Sequence[Mapping[str, Any]], category: str, max_calls: int = 5, thought_open: bool = False
) -> ParsedTurn:
    """Parse a completion without its end-of-turn token.

    `thought_open`: the prompt itself already opened the thought. `category` is `qa` or `func_call`. Never raises.
    """
    body = without_thought(text, thought_open)
    if body is None:
        return ParsedTurn(errors=("the thought is not closed",))
    blocks, errors = _blocks(body)
    calls = []
    for block in blocks:
        try:
            calls.append(_read_call(block, tools))
        except _Bad as error:
            errors.append(str(error))
    chosen = select_calls(calls, category, max_calls)
    message = "" if chosen or category == "qa" else _message(body, errors)
    if not chosen and not message and not errors:
        errors.append(_nothing_found(category))
    return ParsedTurn(chosen, message, bool(chosen or message), tuple(errors[:_MOST_ERRORS]), len(calls) - len(chosen))


def read_call(block: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    """The call of one JSON object with `name` and `arguments`; None when it cannot be used. Never raises."""
    try:
        return _read_call(block, tools)
    except _Bad:
        return None


def without_thought(text: str, thought_open: bool = False) -> str | None:
    """What follows the last closed thought; None when a thought is open at the end."""
    _, closed, body = text.rpartition(THINK_CLOSE)
    if THINK_OPEN in body or (thought_open and not closed):
        return None
    return body


def select_calls(calls: Sequence[ToolCall], category: str, max_calls: int) -> tuple[ToolCall, ...]:
    """The calls of a turn that are carried out.

    `qa`: each tool once, nothing after `answer`. `func_call`: the first `call_expert` alone, else the first `max_calls`.
    """
    if category != "qa":
        experts = tuple(call for call in calls if call.name == EXPERT_CALL)
        return experts[:1] or tuple(calls[:max_calls])
    chosen: dict[str, ToolCall] = {}
    for call in calls:
        chosen.setdefault(call.name, call)
        if call.name == ANSWER_CALL:
            break
    return tuple(chosen.values())[:max_calls]


def _blocks(body: str) -> tuple[list[str], list[str]]:
    """(contents of closed blocks, errors for those that are opened and not closed)."""
    blocks, errors = [], []
    pieces = body.split(CALL_OPEN)
    for piece in pieces[1:]:
        block, closed, _ = piece.partition(CALL_CLOSE)
        if closed:
            blocks.append(block)
        else:
            errors.append("a tool_call block is not closed")
    return blocks, errors


def _read_call(block: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    data = _load(block.strip())
    if not isinstance(data, dict) or set(data) != {"name", "arguments"}:
        keys = ", ".join(map(_shown, data)) if isinstance(data, dict) else type(data).__name__
        raise _Bad(f'a tool call must be a JSON object with exactly the keys "name" and "arguments", got {keys}')
    arguments = _load(data["arguments"]) if isinstance(data["arguments"], str) else data["arguments"]
    if not isinstance(arguments, dict):
        raise _Bad(f'"arguments" must be a JSON object, got {_shown(arguments)}')
    call = ToolCall(data["name"], arguments)
    check_call(call, tools)
    return call


def _load(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except _Bad:
        raise
    # Deep nesting ends in RecursionError, a lone surrogate in UnicodeEncodeError, a number of 5000 digits in ValueError.
    except (ValueError, RecursionError) as error:
        raise _Bad(f"not valid JSON ({str(error)[:_SHOWN_CHARS]}): {_shown(text)}") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise _Bad("a JSON object has a key twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise _Bad(f"{name} is not a JSON number")


def check_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> None:
    """Check name, required and enumerated parameters against the schemas.

    Raises:
        ValueError: what is wrong and what is allowed, in words for the policy.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    # A list or an object as name is not hashable.
    if not isinstance(call.name, str) or call.name not in schemas:
        raise _Bad(f"there is no tool {_shown(call.name)}; tools: {', '.join(schemas)}")
    for problem in _problems(call.arguments, schemas[call.name]):
        raise _Bad(f"{call.name}: {problem}")


def _problems(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in arguments:
            yield f'the parameter "{name}" is missing'
    for name, value in arguments.items():
        if name in properties:
            choices = properties[name].get("enum")
            if choices is not None and value not in choices:
                yield f'"{name}" is {_shown(value)}, allowed: {", ".join(map(str, choices))}'
        elif schema.get("additionalProperties") is False:
            yield f"there is no parameter {_shown(name)}"


def _message(body: str, errors: Sequence[str]) -> str:
    """The tagged message, else the whole text if it holds no trace of a failed call or tag."""
    tagged = [part.strip() for part in _MESSAGE.findall(body)]
    if any(tagged):
        return "\n".join(part for part in tagged if part)
    plain = not errors and not any(tag in body for tag in (CALL_CLOSE, MESSAGE_OPEN, MESSAGE_CLOSE))
    return body.strip() if plain else ""


def _nothing_found(category: str) -> str:
    if category == "qa":
        return "no tool call; write one tool_call block after the thought"
    return f"neither a tool call nor a message; write tool_call blocks or {MESSAGE_OPEN}text{MESSAGE_CLOSE}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.encode(errors="replace").decode().split())
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")
