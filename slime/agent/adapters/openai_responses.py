"""OpenAI's `POST /v1/responses`: items to chat messages and back.

Invariants: consecutive assistant items (text, calls) are one turn, as they were when they were generated; reasoning items
are shown but not read back. Stateless: the whole conversation comes with every request, as agents with `store: false`
send it; `previous_response_id` and item references are refused. Leaves out: tools the provider would run.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from slime.agent.adapters.common import AdapterError, Reply, flatten_content, invalid, manager_finish_reason
from slime.agent.adapters.openai_shared import assistant_message, error_body, function_tools, list_of_objects
from slime.agent.parsing import ParsedModelOutput, decode_arguments
from slime.agent.trajectory import TurnRecord

_ROLES = {"system": "system", "developer": "system", "user": "user"}


class Responses:
    """`/v1/responses`."""

    def translate(self, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Chat messages and tools; AdapterError 400 for what is no such request."""
        if body.get("previous_response_id"):
            raise invalid("previous_response_id: nothing is stored here, send the whole conversation as input")
        messages: list[dict[str, Any]] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": flatten_content(body["instructions"])})
        if isinstance(body.get("input"), str):
            messages.append({"role": "user", "content": body["input"]})
        else:
            for item in list_of_objects(body, "input"):
                _add_item(messages, item)
        if not messages:
            raise invalid("input is empty")
        return messages, function_tools(body)

    def reply(self, body: dict[str, Any], parsed: ParsedModelOutput, turn: TurnRecord) -> Reply:
        """A `response` object."""
        finish = manager_finish_reason(parsed.tool_uses, turn.finish_reason)
        cut = turn.finish_reason == "length"
        wire = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "model": str(body.get("model") or "slime-actor"),
            "output": list(_output_items(parsed)),
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "usage": _usage(turn),
        }
        return Reply(assistant_message(parsed.text, parsed.tool_uses), finish, wire)

    def events(self, body: dict[str, Any], wire: dict[str, Any]) -> Iterable[str]:
        """The typed events of a streamed response, numbered."""
        begun = {**wire, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        end = {"type": f"response.{wire['status']}", "response": wire}
        events = [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]
        for index, item in enumerate(wire["output"]):
            events += _item_events(index, item)
        for number, event in enumerate([*events, end]):
            data = json.dumps({**event, "sequence_number": number}, ensure_ascii=False)
            yield f"event: {event['type']}\ndata: {data}\n\n"

    def error(self, error: AdapterError) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(error)


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append one input item to the conversation, or to the assistant turn it belongs to."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message" and item.get("role") in _ROLES:
        messages.append({"role": _ROLES[item["role"]], "content": flatten_content(item.get("content"))})
    elif kind == "message" and item.get("role") == "assistant":
        _add_to_turn(messages, flatten_content(item.get("content")).strip(), [])
    elif kind == "function_call":
        use = {"name": str(item.get("name")), "input": decode_arguments(item.get("arguments"))}
        _add_to_turn(messages, "", [use])
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": flatten_content(item.get("output"))})
    elif kind != "reasoning":
        raise invalid(f"input item of type {kind!r} and role {item.get('role')!r} is not known here")


def _add_to_turn(messages: list[dict[str, Any]], text: str, tool_uses: list[dict[str, Any]]) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append(assistant_message(text, tool_uses))
    elif "tool_calls" not in last:
        joined = "\n".join(part for part in (last["content"], text) if part)
        messages[-1] = assistant_message(joined, tool_uses)


def _output_items(parsed: ParsedModelOutput) -> Iterator[dict[str, Any]]:
    if parsed.reasoning:
        summary = [{"type": "summary_text", "text": parsed.reasoning}]
        yield {"id": _new_id("rs"), "type": "reasoning", "summary": summary}
    if parsed.text or not parsed.tool_uses:
        content = [{"type": "output_text", "text": parsed.text, "annotations": []}]
        message = {"id": _new_id("msg"), "type": "message", "status": "completed", "role": "assistant"}
        yield {**message, "content": content}
    for use in parsed.tool_uses:
        call = {"id": _new_id("fc"), "type": "function_call", "status": "completed", "call_id": _new_id("call")}
        yield {**call, "name": use["name"], "arguments": json.dumps(use["input"], ensure_ascii=False)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(turn: TurnRecord) -> dict[str, Any]:
    prompt, completion = len(turn.prompt_ids), len(turn.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**item, "status": "in_progress"}
    if item["type"] == "message":
        inside, begun["content"] = _text_events(index, item), []
    elif item["type"] == "function_call":
        inside, begun["arguments"] = _call_events(index, item), ""
    else:
        inside, begun["summary"] = _summary_events(index, item), []
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield from inside
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _text_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    part, place = item["content"][0], {"item_id": item["id"], "output_index": index, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _call_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
    yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
    yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments}


def _summary_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    part, place = item["summary"][0], {"item_id": item["id"], "output_index": index, "summary_index": 0}
    yield {"type": "response.reasoning_summary_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.reasoning_summary_text.delta", **place, "delta": part["text"]}
    yield {"type": "response.reasoning_summary_text.done", **place, "text": part["text"]}
    yield {"type": "response.reasoning_summary_part.done", **place, "part": part}
