"""OpenAI's endpoints: `POST /v1/chat/completions` and `POST /v1/responses`, as JSON or as server-sent events.

Session id: bearer token, else `metadata.session_id`, else `user`, else "default".
Invariants of the history: of an assistant turn only the first tool call is kept, its content is "" when it has one, and
reasoning is not part of it, because clients send parallel calls, texts beside calls and reasoning back as they like.
Used of a request: messages, tools, `tool_choice: "none"`, output limit, stop, temperature, top_p, top_k, stream.
Leaves out: several choices (`n` > 1 is refused), images, log-probs for the agent, forced tool choice, JSON modes: they
would change what the policy is asked to sample.
"""

from __future__ import annotations

import json
import time
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
    sid_from_bearer,
    sid_from_body,
)
from slime.agent.adapters.openai_responses import Responses
from slime.agent.adapters.openai_shared import assistant_message, error_body, function_tools, list_of_objects
from slime.agent.parsing import ParsedModelOutput, decode_arguments
from slime.agent.trajectory import TurnRecord

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


class ChatCompletions:
    """`/v1/chat/completions`."""

    def translate(self, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Chat messages and tools; AdapterError 400 for what is no such request."""
        if body.get("n") not in (None, 1):
            raise invalid(f"n is {body['n']!r}: one choice a request")
        messages = [_message(message) for message in list_of_objects(body, "messages")]
        if not messages:
            raise invalid("messages is empty")
        return messages, function_tools(body)

    def reply(self, body: dict[str, Any], parsed: ParsedModelOutput, turn: TurnRecord) -> Reply:
        """A `chat.completion` object."""
        finish = manager_finish_reason(parsed.tool_uses, turn.finish_reason)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_uses:
            message["content"] = parsed.text or None
            message["tool_calls"] = [_wire_call(use) for use in parsed.tool_uses]
        prompt, completion = len(turn.prompt_ids), len(turn.output_ids)
        wire = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(body.get("model") or "slime-actor"),
            "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
        return Reply(assistant_message(parsed.text, parsed.tool_uses), finish, wire)

    def events(self, body: dict[str, Any], wire: dict[str, Any]) -> Iterable[str]:
        """`chat.completion.chunk` events, ended by `[DONE]`."""
        choice = wire["choices"][0]
        for delta in _deltas(choice["message"]):
            yield _event(_chunk(wire, [{"index": 0, "delta": delta, "finish_reason": None}]))
        yield _event(_chunk(wire, [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield _event({**_chunk(wire, []), "usage": wire["usage"]})
        yield "data: [DONE]\n\n"

    def error(self, error: AdapterError) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(error)


class OpenAIAdapter(BaseAdapter):
    """Serves agents that speak OpenAI's protocols."""

    log_prefix = "openai"
    max_token_keys = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stop_keys = ("stop",)
    dialects = {"/v1/chat/completions": ChatCompletions(), "/v1/responses": Responses()}

    def session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        """Bearer token, `metadata.session_id`, `user`, "default"."""
        return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the trajectory keeps it: no ids, arguments as dicts, content as text."""
    role = _ROLES.get(str(message.get("role")), message.get("role"))
    if role not in _KNOWN_ROLES:
        raise invalid(f"role is {message.get('role')!r}, give one of {', '.join(_KNOWN_ROLES)}")
    text = flatten_content(message.get("content"))
    if role != "assistant":
        return {"role": role, "content": text}
    calls = [call["function"] for call in message.get("tool_calls") or [] if isinstance(call.get("function"), dict)]
    uses = [{"name": str(call.get("name")), "input": decode_arguments(call.get("arguments"))} for call in calls]
    return assistant_message(text.strip(), uses)


def _wire_call(use: dict[str, Any]) -> dict[str, Any]:
    function = {"name": use["name"], "arguments": json.dumps(use["input"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    for index, call in enumerate(message.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **call}]}


def _chunk(wire: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    shared = {name: wire[name] for name in ("id", "created", "model")}
    return {**shared, "object": "chat.completion.chunk", "choices": choices}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
