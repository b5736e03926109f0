"""Anthropic's endpoints: `POST /v1/messages` (JSON or server-sent events) and `POST /v1/messages/count_tokens`.

Session id: bearer token, else `X-Api-Key`, else "default".
Invariants of the history: results of tools become `tool` messages before the text of the same user turn; a `system`
message inside the list is folded into the user turn beside it; thinking is kept as `reasoning_content`, and history
without it is still the same history. Used of a request: system, messages, tools, `tool_choice: none`, max_tokens,
stop_sequences, temperature, top_p, top_k, stream. Leaves out: tools the provider would run, images, cache control.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import (
    DEFAULT_SID,
    AdapterError,
    BaseAdapter,
    Reply,
    flatten_content,
    invalid,
    manager_finish_reason,
    read_body,
    sid_from_bearer,
    tool_call_dict,
)
from slime.agent.parsing import ParsedModelOutput, decode_arguments
from slime.agent.trajectory import TurnRecord

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


class Messages:
    """`/v1/messages`."""

    def translate(self, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Chat messages and tools; AdapterError 400 for what is no such request."""
        given = body.get("messages")
        if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
            raise invalid("messages must be a list of objects, at least one")
        conversation = _Conversation()
        for message in given:
            conversation.add(message)
        messages = conversation.finish()
        system = flatten_content(body.get("system"))
        return ([{"role": "system", "content": system}] if system else []) + messages, _tools(body)

    def reply(self, body: dict[str, Any], parsed: ParsedModelOutput, turn: TurnRecord) -> Reply:
        """A `message` object."""
        finish = manager_finish_reason(parsed.tool_uses, turn.finish_reason)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_uses:
            message["tool_calls"] = [tool_call_dict(use["name"], use["input"]) for use in parsed.tool_uses]
        wire = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model") or "slime-actor"),
            "content": list(_blocks(parsed)),
            "stop_reason": _STOP_REASONS.get(finish, "end_turn"),
            "stop_sequence": None,
            "usage": {"input_tokens": len(turn.prompt_ids), "output_tokens": len(turn.output_ids)},
        }
        return Reply(message, finish, wire)

    def events(self, body: dict[str, Any], wire: dict[str, Any]) -> Iterable[str]:
        """The typed events of a streamed message."""
        usage = {**wire["usage"], "output_tokens": 0}
        begun = {**wire, "content": [], "stop_reason": None, "usage": usage}
        yield _event({"type": "message_start", "message": begun})
        for index, block in enumerate(wire["content"]):
            for event in _block_events(block):
                yield _event({**event, "index": index})
        delta = {"stop_reason": wire["stop_reason"], "stop_sequence": None}
        yield _event({"type": "message_delta", "delta": delta, "usage": wire["usage"]})
        yield _event({"type": "message_stop"})

    def error(self, error: AdapterError) -> dict[str, Any]:
        """Anthropic's error object."""
        return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


class AnthropicAdapter(BaseAdapter):
    """Serves agents that speak Anthropic's protocol."""

    log_prefix = "anthropic"
    max_token_keys = ("max_tokens",)
    stop_keys = ("stop_sequences",)
    dialects = {"/v1/messages": Messages()}

    def session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        """Bearer token, `X-Api-Key`, "default"."""
        return sid_from_bearer(request) or request.headers.get("X-Api-Key") or DEFAULT_SID

    def _make_app(self) -> web.Application:
        app = super()._make_app()
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        return app

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """How many ids the prompt would have; nothing is generated or recorded."""
        dialect = self.dialects["/v1/messages"]
        try:
            body = await read_body(request)
            prompt_ids, _ = self.render(self.session_id(request, body), *dialect.translate(body))
        except AdapterError as error:
            return web.json_response(dialect.error(error), status=error.status)
        return web.json_response({"input_tokens": len(prompt_ids)})


class _Conversation:
    """Anthropic's messages, one after the other, as chat messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._system: list[str] = []

    def add(self, message: dict[str, Any]) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            self._fold(flatten_content(content))
        elif role == "user":
            self._add_user(content)
        elif role == "assistant":
            self.finish()
            self.messages.append(_assistant(content))
        else:
            raise invalid(f"role is {role!r}, give user or assistant")

    def finish(self) -> list[dict[str, Any]]:
        """All messages so far; system text that found no user turn becomes one."""
        if self._system:
            self.messages.append({"role": "user", "content": "\n".join(self._system)})
            self._system = []
        return self.messages

    def _fold(self, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += "\n" + text
        else:
            self._system.append(text)

    def _add_user(self, content: Any) -> None:
        blocks = content if isinstance(content, list) else [content]
        results = [block for block in blocks if _is_result(block)]
        others = [block for block in blocks if not _is_result(block)]
        self.messages += [{"role": "tool", "content": flatten_content(block.get("content"))} for block in results]
        if others or not results:
            text = "\n".join([*self._system, flatten_content(others)])
            self._system = []
            self.messages.append({"role": "user", "content": text})


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _assistant(content: Any) -> dict[str, Any]:
    blocks = content if isinstance(content, list) else [{"type": "text", "text": flatten_content(content)}]
    kinds: dict[str, list[dict[str, Any]]] = {"text": [], "thinking": [], "tool_use": []}
    for block in blocks:
        if isinstance(block, dict):
            kinds.get(str(block.get("type")), []).append(block)
    message: dict[str, Any] = {"role": "assistant", "content": flatten_content(kinds["text"]).strip()}
    thoughts = "\n".join(str(block.get("thinking") or "") for block in kinds["thinking"]).strip()
    if thoughts:
        message["reasoning_content"] = thoughts
    if kinds["tool_use"]:
        uses = [(str(block.get("name")), decode_arguments(block.get("input"))) for block in kinds["tool_use"]]
        message["tool_calls"] = [tool_call_dict(*use) for use in uses]
    return message


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The agent's own tools; those of the provider have no schema."""
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("tools must be a list of objects")
    if isinstance(choice, dict) and choice.get("type") == "none":
        return []
    return [{"type": "function", "function": _function(tool)} for tool in tools if "input_schema" in tool]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    described = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {**described, "parameters": tool["input_schema"]}


def _blocks(parsed: ParsedModelOutput) -> Iterator[dict[str, Any]]:
    if parsed.reasoning:
        yield {"type": "thinking", "thinking": parsed.reasoning, "signature": ""}
    if parsed.text or not parsed.tool_uses:
        yield {"type": "text", "text": parsed.text}
    for use in parsed.tool_uses:
        yield {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": use["name"], "input": use["input"]}


def _block_events(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start, one delta with everything, stop."""
    if block["type"] == "tool_use":
        begun, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    else:
        kind = block["type"]
        begun, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
    yield {"type": "content_block_start", "content_block": begun}
    yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def _event(data: dict[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
