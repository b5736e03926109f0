"""What all adapters share: sessions, and the way of one turn from an agent's request to the trajectory.

One turn: closed session 503, too many turns 429; translate; render (only the new messages, see `rendering`); ask the
engine with ids; parse; answer; and only when the answer is flushed, record. So a turn the agent never saw is not trained.
Invariants: an answer in the trajectory is one the agent received; messages are compared by equality, so every dialect
normalises what it sends and what it reads back alike: tool arguments are dicts, ids of the wire are dropped, images are
`[image omitted]`. Sessions may be opened and finished from another event loop than the one that serves.
Leaves out: how a dialect spells things (`openai`, `openai_responses`, `anthropic`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from slime.agent.engine import Engine, EngineError, read_output
from slime.agent.parsing import ParsedModelOutput, load_json, mend, parse_model_output
from slime.agent.rendering import RENDER_ERRORS, PromptRenderer
from slime.agent.trajectory import TrajectoryManager, TurnRecord

DEFAULT_SID = "default"
DEFAULT_MAX_NEW_TOKENS = 4096
MAX_REQUEST_BYTES = 256 * 1024**2
IMAGE_OMITTED = "[image omitted]"
CLIENT_CLOSED_REQUEST = 499

_ROUTING_KEY = "X-SMG-Routing-Key"
_DISCONNECT_POLL_S = 0.25
_IDLE_POLL_S = 0.02
_CANCEL_GRACE_S = 2.0
_MOST_CLOSED = 100_000
# Control tokens that end a turn besides the tokenizer's own; models may have several.
_END_OF_TURN = frozenset(
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <|return|> <|user|> <|observation|> "
    "<end_of_turn> </s> <｜end▁of▁sentence｜>".split()
)


class AdapterError(Exception):
    """A request that gets an error answer: HTTP status, error type of the protocols, message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass
class Session:
    """What `open_session` fixes."""

    sampling_defaults: dict = field(default_factory=dict)
    """Sampling parameters in the engine's names; temperature, top_p and top_k of a request override them."""
    max_context_tokens: int = 0
    """Prompt + output ids, 0: no limit."""


@dataclass
class Reply:
    """One answer, as the trajectory and as the agent see it."""

    manager_message: dict
    finish_reason: str
    wire: Any
    """The complete JSON object; streams are cut from it."""


class Dialect(Protocol):
    """How one endpoint spells requests, answers and errors."""

    def translate(self, body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(chat messages, tools in OpenAI's schema) of a request; AdapterError 400 when it cannot be served."""

    def reply(self, body: dict[str, Any], parsed: ParsedModelOutput, turn: TurnRecord) -> Reply:
        """The answer to a request."""

    def events(self, body: dict[str, Any], wire: dict[str, Any]) -> Iterable[str]:
        """The server-sent events of an answer."""

    def error(self, error: AdapterError) -> dict[str, Any]:
        """The body of an error answer."""


def flatten_content(c: Any) -> str:
    """Text of a message's content: a string, None, or a list of parts. Images become a remark."""
    if c is None:
        return ""
    if isinstance(c, str):
        return c
    if isinstance(c, list):
        return "\n".join(text for text in map(_part_text, c) if text is not None)
    return _part_text(c) or ""


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None if part is None else str(part)
    kind = str(part.get("type", "text"))
    if "image" in kind:
        return IMAGE_OMITTED
    if "text" in part:
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    return flatten_content(part["content"]) if "content" in part else None


def tool_call_dict(name: str, arguments: dict | None) -> dict:
    """A tool call in the form chat templates take: arguments a dict, no id."""
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}


def manager_finish_reason(tool_uses: list[dict], raw_finish: str) -> str:
    """`tool_calls` when there are any, else the engine's reason."""
    return "tool_calls" if tool_uses else raw_finish


def sid_from_bearer(request: web.Request) -> str | None:
    """Session id in `Authorization: Bearer <sid>`."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def sid_from_body(body: dict | None) -> str | None:
    """Session id in `metadata.session_id`, else in `user`."""
    metadata = (body or {}).get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, dict) else None
    sid = named or (body or {}).get("user")
    return str(sid) if sid else None


def invalid(message: str) -> AdapterError:
    """A request that can never be served as it is."""
    return AdapterError(400, "invalid_request_error", message)


async def call_sglang_generate(
    prompt_ids: list[int], session: Any, body: dict, *, adapter: BaseAdapter, session_id: str | None = None
) -> TurnRecord:
    """One engine call for these ids. Without room in the context: a turn without output, finish reason `length`.

    Raises EngineError, or asyncio.TimeoutError at its deadline; given up or cancelled, the engine's request is aborted.
    """
    params = _sampling_params(session, body, adapter, len(prompt_ids))
    if params["max_new_tokens"] <= 0:
        return TurnRecord(list(prompt_ids), [], "length")
    payload = {"rid": uuid.uuid4().hex, "input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
    headers = {_ROUTING_KEY: session_id} if session_id and session_id != DEFAULT_SID else {}
    answer = await adapter.engine.generate(payload, headers)
    ids, log_probs, finish, version = read_output(answer, len(prompt_ids))
    if finish == "abort":
        # The agent must not act on half an answer.
        raise EngineError("the engine aborted the request")
    return TurnRecord(list(prompt_ids), ids, finish, log_probs, weight_version=version)


def _sampling_params(session: Any, body: dict, adapter: BaseAdapter, prompt_tokens: int) -> dict[str, Any]:
    params = dict(session.sampling_defaults)
    params |= {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
    if stops := _stop_strings(adapter, session, body):
        params["stop"] = stops
    limits = [int(params.get("max_new_tokens") or DEFAULT_MAX_NEW_TOKENS)]
    limits += [_positive(body, key) for key in adapter.max_token_keys if body.get(key) is not None][:1]
    if session.max_context_tokens:
        limits.append(session.max_context_tokens - prompt_tokens)
    return {**params, "max_new_tokens": min(limits)}


def _stop_strings(adapter: BaseAdapter, session: Any, body: dict) -> list[str]:
    """The request's stop strings, else the session's."""
    found: Any = next((body[key] for key in adapter.stop_keys if body.get(key)), None)
    found = found or session.sampling_defaults.get("stop") or []
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid(f"{'/'.join(adapter.stop_keys)} is {found!r}, give a string or a list of strings")
    return stops


def _positive(body: dict, key: str) -> int:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid(f"{key} is {value!r}, give a whole number above 0")
    return value


@dataclass
class _Live:
    """Turns of a session that are not yet recorded."""

    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    flushing: asyncio.Lock = field(default_factory=asyncio.Lock)


class BaseAdapter:
    """An aiohttp application (`app`) that serves one policy to agents, and the sessions they fill."""

    logger: logging.Logger = logging.getLogger(__name__)
    log_prefix: str = "adapter"
    max_token_keys: tuple[str, ...] = ()
    """Names of the request's output limit, the first one present counts."""
    stop_keys: tuple[str, ...] = ()
    dialects: dict[str, Dialect] = {}
    """Path of each endpoint that generates."""
    manager: Any

    def __init__(
        self,
        *,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[..., None] | None = None,
    ) -> None:
        """`tool_parser` and `reasoning_parser` are the engine's names; `max_turns_per_sid` None: no limit.

        `debug_callback(sid=, prompt_messages=, turn=, reply=)` is called after each recorded turn.
        """
        self.tokenizer, self.sglang_url = tokenizer, sglang_url
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.max_turns_per_sid, self.debug_callback = max_turns_per_sid, debug_callback
        self.manager = TrajectoryManager(fork_threshold_tokens=fork_threshold_tokens)
        self.renderer = PromptRenderer(tokenizer)
        self.engine = Engine(sglang_url)
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, None] = {}
        self._live: dict[str, _Live] = {}
        self._lock = threading.Lock()
        self.app = self._make_app()

    # ----------------------------------------------------------------------------------------------------------------
    # Sessions

    def open_session(self, sid: str, *, sampling_defaults: dict | None = None, max_context_tokens: int = 0) -> None:
        """Prepare a session. Raises ValueError when this id is or was in use: late requests must not mix."""
        with self._lock:
            if sid in self._sessions or sid in self._closed:
                raise ValueError(f"session {sid!r} was opened before; give every rollout an id of its own")
            self._sessions[sid] = Session(dict(sampling_defaults or {}), max_context_tokens)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse new turns (503) and wait for those in flight; after `wait_timeout` seconds they are cancelled."""
        with self._lock:
            self._closed[sid] = None
            while len(self._closed) > _MOST_CLOSED:
                self._closed.pop(next(iter(self._closed)))
        if not await self._idle(sid, wait_timeout):
            tasks = list(self._live[sid].tasks) if sid in self._live else []
            self.logger.warning("%s: session %s: %d turns cancelled", self.log_prefix, sid, len(tasks))
            for task in tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)
            await self._idle(sid, _CANCEL_GRACE_S)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Any,
        reward: float = 0.0,
        extra_metadata: dict | None = None,
        wait_timeout: float = 5.0,
    ) -> list:
        """Close the session and return its samples with their response text; [] the second time."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        session = self._sessions.pop(sid, None) or Session()
        samples: list = self.manager.get_trajectory(
            sid,
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=session.max_context_tokens,
        )
        for sample in samples:
            sample.response = self.tokenizer.decode(sample.tokens[-sample.response_length :])
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Close and forget the session; may be called at any time, any number of times."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        self._sessions.pop(sid, None)
        self.manager.drop_session(sid)

    def _session(self, sid: str) -> Session:
        """What was fixed for the session; one that was not opened has the defaults."""
        return self._sessions.get(sid) or Session()

    async def _idle(self, sid: str, timeout: float) -> bool:
        """Whether the session has no turn in flight, at the latest after `timeout` seconds."""
        # Polled, because the turns may belong to another event loop.
        deadline = time.monotonic() + timeout
        while sid in self._live:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_IDLE_POLL_S)
        return True

    @contextlib.contextmanager
    def _admitted(self, sid: str) -> Iterator[_Live]:
        """The running task counts as a turn of the session. Raises AdapterError 503 or 429."""
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if sid in self._closed:
                raise AdapterError(503, "session_closed", f"session {sid!r} is closed")
            live = self._live.get(sid) or _Live()
            turns = self.manager.turn_count(sid) + len(live.tasks)
            if self.max_turns_per_sid is not None and turns >= self.max_turns_per_sid:
                raise AdapterError(429, "rate_limit_error", f"session {sid!r} has had its {turns} turns")
            self._live[sid] = live
            live.tasks.add(task)
        try:
            yield live
        finally:
            with self._lock:
                live.tasks.discard(task)
                if not live.tasks:
                    self._live.pop(sid, None)

    # ----------------------------------------------------------------------------------------------------------------
    # The application

    def _make_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/healthz", _ok)
        app.router.add_get("/v1/models", _ok)
        for path, dialect in self.dialects.items():
            app.router.add_post(path, self._handler(dialect))
        app.on_cleanup.append(self._close_engine)
        return app

    async def _close_engine(self, app: web.Application) -> None:
        await self.engine.close()

    def session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        """Which session a request belongs to."""
        return sid_from_bearer(request) or DEFAULT_SID

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                body = await read_body(request)
                sid = self.session_id(request, body)
                with self._admitted(sid) as live:
                    return await self._turn(request, dialect, body, sid, live)
            except AdapterError as error:
                self.logger.info("%s: %d %s: %s", self.log_prefix, error.status, error.kind, error)
                return web.json_response(dialect.error(error), status=error.status)

        return handle

    async def _turn(
        self, request: web.Request, dialect: Dialect, body: dict[str, Any], sid: str, live: _Live
    ) -> web.StreamResponse:
        """One turn; see the module's docstring."""
        async with live.flushing:
            pass  # an answer the agent has just read is recorded before its history is looked up
        messages, tools = dialect.translate(body)
        prompt_ids, tools_digest = self.render(sid, messages, tools)
        turn = await self._generate(request, prompt_ids, sid, body)
        parsed = self._parse(turn, tools, _stop_strings(self, self._session(sid), body))
        turn = dataclasses.replace(turn, ill_formed=parsed.ill_formed)
        reply = dialect.reply(body, parsed, turn)
        async with live.flushing:
            response = await self._flush(request, dialect, body, reply)
            metadata = {"finish_reason": reply.finish_reason, "tools": tools_digest}
            self.manager.record_turn(
                sid, turn=turn, prompt_messages=messages, response_message=reply.manager_message, metadata=metadata
            )
        if self.debug_callback is not None:
            self.debug_callback(sid=sid, prompt_messages=messages, turn=turn, reply=reply)
        return response

    def render(self, sid: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[list[int], str]:
        """(prompt ids, digest of the tools). Raises AdapterError 400 when the chat template refuses the messages."""
        held, covered = self.manager.find_held(sid, messages)
        digest = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()
        held_ids = [*held.turn.prompt_ids, *held.turn.output_ids] if held is not None else []
        changed = held is not None and held.metadata.get("tools") != digest
        try:
            return self.renderer.render(messages, tools, held_ids, covered, changed), digest
        except RENDER_ERRORS as error:
            raise invalid(f"the chat template cannot render these messages: {error}") from error

    async def _generate(self, request: web.Request, prompt_ids: list[int], sid: str, body: dict) -> TurnRecord:
        """The engine's answer; the agent's disconnect ends the wait (499, nothing is recorded)."""
        session = self._session(sid)
        call = asyncio.ensure_future(call_sglang_generate(prompt_ids, session, body, adapter=self, session_id=sid))
        try:
            while not (await asyncio.wait({call}, timeout=_DISCONNECT_POLL_S))[0]:
                _check_connected(request)
            _check_connected(request)
            return call.result()
        except EngineError as error:
            raise AdapterError(502, "api_error", str(error)) from error
        except asyncio.TimeoutError as error:
            raise AdapterError(504, "timeout_error", "the engine did not answer in time") from error
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call})  # until the engine's request is aborted

    def _parse(self, turn: TurnRecord, tools: list[dict[str, Any]], stops: list[str]) -> ParsedModelOutput:
        """What the agent is shown: without the end token, and without the stop string that ended the turn."""
        text = mend(self.tokenizer.decode(self._without_end(turn.output_ids), skip_special_tokens=False))
        if turn.finish_reason == "stop":
            text = text[: min((place for place in map(text.find, stops) if place >= 0), default=len(text))]
        return parse_model_output(
            text,
            tools_schema=tools or None,
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
        )

    def _without_end(self, output_ids: list[int]) -> list[int]:
        """The output without the token that ends a turn, which is no text."""
        if not output_ids:
            return []
        last = output_ids[-1]
        ends = last == getattr(self.tokenizer, "eos_token_id", None)
        return output_ids[:-1] if ends or self._spelling(last) in _END_OF_TURN else output_ids

    def _spelling(self, token: int) -> str:
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        return str(added.get(token, ""))

    async def _flush(
        self, request: web.Request, dialect: Dialect, body: dict[str, Any], reply: Reply
    ) -> web.StreamResponse:
        """Send the answer to its last byte. Raises AdapterError 499 when the agent is gone."""
        try:
            if not body.get("stream"):
                return await _send_json(request, reply.wire)
            return await _send_events(request, dialect.events(body, reply.wire))
        except ConnectionError as error:
            raise AdapterError(CLIENT_CLOSED_REQUEST, "client_closed_request", str(error)) from error


async def _ok(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def read_body(request: web.Request) -> dict[str, Any]:
    """The request's JSON object. Raises AdapterError 400."""
    try:
        body = load_json(await request.read())
    except ValueError as error:
        raise invalid(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid(f"the request is a JSON {type(body).__name__}, give an object")
    return body


def _check_connected(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise AdapterError(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client has gone")


async def _send_json(request: web.Request, wire: Any) -> web.StreamResponse:
    response = web.json_response(wire)
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_events(request: web.Request, events: Iterable[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response
