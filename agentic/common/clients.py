"""Calls to the policy and to the frozen roles.

Inputs: a `Role`, chat messages, for the policy also the sampling parameters of the rollout hook.
Invariants:
* the policy is asked with `input_ids` and answers with ids and log-probs; the number of prompt tokens it reports must
  equal the number sent, so what is trained is what the engine saw;
* every attempt has a deadline (`timeout_s`) and all attempts of a call share one of `timeout_s * (retries + 1)`;
* only time-outs, transport errors, HTTP 5xx and 429 are repeated; any other HTTP error is final at once;
* the role's semaphore is held around the call only (waiting for it does not use up the deadline);
* at most `MAX_ANSWER_BYTES` of an answer are read, a longer one is an error;
* a failure is a typed error, never an empty text.
Left out: streaming, images; caching; which tool calls of an answer are usable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import aiohttp
import orjson

from agentic.common.errors import InfrastructureError, PromptTooLong, RoleBadResponse, RoleTimeout, RoleUnavailable
from agentic.common.roles import Role
from agentic.common.turns import FINISH_REASONS, TurnRecord

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
T = TypeVar("T")

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 4.0
# Servers close idle connections after about 5 s (uvicorn); letting ours go first avoids most dropped calls.
KEEPALIVE_S = 4.0
# An answer of 128k tokens with its log-probs has about 5 MB.
MAX_ANSWER_BYTES = 8 * 2**20
DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError)


@dataclass(frozen=True)
class Completion:
    """Answer of a frozen role. Token counts are those reported by the server; `seconds` includes retries."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    tool_calls: tuple[Any, ...] = ()
    """As a `chat` server sent them, unchecked (OpenAI form, arguments as JSON text)."""


# --------------------------------------------------------------------------------------------------------------------
# Transport: one HTTP client and one set of semaphores per event loop.


@dataclass
class _LoopState:
    client: aiohttp.ClientSession
    closer: AsyncGenerator[None, None]
    semaphores: dict[tuple[str, str, int], asyncio.Semaphore] = field(default_factory=dict)


_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()


def _loop_state() -> _LoopState:
    loop = asyncio.get_running_loop()
    if loop not in _LOOPS:
        # No pool limit here: concurrency is bounded by the roles' semaphores, time by our own deadlines.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None)
        client = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        _LOOPS[loop] = _LoopState(client, _open_until_the_loop_ends(client))
    return _LOOPS[loop]


def _open_until_the_loop_ends(client: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    """A started generator: the loop finishes all of these when it shuts down, which closes the connections."""

    async def hold() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await client.close()

    closer = hold()
    with suppress(StopIteration):
        closer.asend(None).send(None)
    return closer


def _semaphore(role: Role) -> asyncio.Semaphore:
    key = (role.name, role.url, role.max_concurrency)
    return _loop_state().semaphores.setdefault(key, asyncio.Semaphore(role.max_concurrency))


async def _call(role: Role, path: str, payload: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """POST `payload` as JSON and return the decoded answer; raises the typed errors of `InfrastructureError`."""
    headers = {"Content-Type": "application/json", **(headers or {})}
    body = orjson.dumps(payload)
    async with _semaphore(role):
        return await _with_retries(role, lambda: _attempt(role, role.url + path, body, headers))


async def post_json(role: Role, path: str, payload: dict[str, Any]) -> Any:
    """POST to a service that is no language model (retrieval), with the role's key, deadline and retries.

    Raises RoleTimeout, RoleUnavailable, RoleBadResponse; what the decoded answer must look like is the caller's matter.
    """
    return await _call(role, path, payload, _auth(role))


async def _with_retries(role: Role, attempt: Callable[[], Awaitable[T]]) -> T:
    clock = asyncio.get_running_loop().time
    deadline = clock() + role.timeout_s * (role.retries + 1)
    last: RoleTimeout | RoleUnavailable = RoleTimeout(role.name, "no attempt was made")
    for number in range(role.retries + 1):
        try:
            return await asyncio.wait_for(attempt(), min(role.timeout_s, max(deadline - clock(), 0.0)))
        except asyncio.TimeoutError:
            last = RoleTimeout(role.name, f"no answer from {role.url} within {role.timeout_s:g} s")
        except RoleUnavailable as error:
            last = error
        pause = min(BACKOFF_FIRST_S * 2**number, BACKOFF_MAX_S) * random.uniform(0.5, 1.0)
        if number == role.retries or clock() + pause >= deadline:
            break
        logger.warning("%s; attempt %d of %d, again in %.1f s", last, number + 1, role.retries + 1, pause)
        await asyncio.sleep(pause)
    raise last


async def _attempt(role: Role, url: str, body: bytes, headers: dict[str, str]) -> Any:
    try:
        status, answer = await _post(url, body, headers)
    except (aiohttp.ClientError, OSError) as error:  # the latter where aiohttp lets one of the socket's through
        raise RoleUnavailable(role.name, f"{url}: {type(error).__name__} {error}".rstrip()) from error
    if status >= 500 or status == 429:
        raise RoleUnavailable(role.name, f"{url}: HTTP {status} {_shown(answer, 200)}")
    if status != 200:
        raise RoleBadResponse(role.name, f"{url}: HTTP {status} {_shown(answer, 500)}")
    if len(answer) > MAX_ANSWER_BYTES:
        raise RoleBadResponse(role.name, f"{url}: answer has more than {MAX_ANSWER_BYTES} bytes")
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise RoleBadResponse(role.name, f"{url}: answer is not JSON: {_shown(answer, 200)!r}") from error


def _shown(answer: bytes, limit: int) -> str:
    return answer[:limit].decode(errors="replace")


async def _post(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Status and body of the answer."""
    try:
        return await _post_once(url, body, headers)
    except DROPPED:
        # A kept-alive connection that the server closed while we wrote: says nothing about its health, so once at once.
        return await _post_once(url, body, headers)


async def _post_once(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    async with _loop_state().client.post(url, data=body, headers=headers) as response:
        answer = bytearray()
        while len(answer) <= MAX_ANSWER_BYTES and (piece := await response.content.readany()):
            answer += piece
        return response.status, bytes(answer)


async def check_reachable(role: Role, timeout_s: float = 10.0) -> None:
    """Health check at start. Raises RoleUnavailable with the URL and what to do."""
    url = role.url + (_chat_path(role, "/models") if role.api == "chat" else "/health")
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with _loop_state().client.get(url, headers=_auth(role), timeout=timeout) as response:
            status = response.status
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        detail = f"{url} does not answer ({type(error).__name__}); start its server or correct `url`"
        raise RoleUnavailable(role.name, detail) from error
    if status != 200:
        raise RoleUnavailable(role.name, f"{url}: HTTP {status}; is this the right server?")


# --------------------------------------------------------------------------------------------------------------------
# Prompts.


def render_ids(tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
    """Token ids of the chat prompt, ready for the assistant's answer."""
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options
    )
    return [int(token) for token in ids]


def room_for(role: str, prompt_tokens: int, max_new_tokens: int, max_context_len: int | None) -> int:
    """New tokens that fit: `max_new_tokens`, less when the context (in tokens) is short.

    Raises PromptTooLong when not even one fits.
    """
    if max_context_len is None:
        return max_new_tokens
    room = min(max_new_tokens, max_context_len - prompt_tokens)
    if room < 1:
        raise PromptTooLong(f"role '{role}': prompt of {prompt_tokens} tokens in a context of {max_context_len}")
    return room


@lru_cache(maxsize=16)
def _load_tokenizer(path: str) -> Any:
    # Imported here because transformers takes seconds and chat roles need no tokenizer.
    from slime.utils.processing_utils import load_tokenizer

    return load_tokenizer(path, trust_remote_code=True)


def _finish(role: str, meta: dict[str, Any]) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in FINISH_REASONS:
        raise RoleBadResponse(role, f"finish_reason {reason!r} is none of {', '.join(FINISH_REASONS)}")
    return kind


def _generate_meta(role: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict) or not isinstance(data.get("meta_info"), dict) or "text" not in data:
        raise RoleBadResponse(role, f"/generate answered without text and meta_info: {str(data)[:200]}")
    return data["meta_info"]


# --------------------------------------------------------------------------------------------------------------------
# Policy.


class PolicyClient:
    """Token-in-token-out calls to the policy behind the router."""

    def __init__(self, role: Role, tokenizer: Any, max_context_len: int | None = None) -> None:
        self.role = role
        self.tokenizer = tokenizer
        self.max_context_len = max_context_len

    async def generate(
        self,
        messages: Messages,
        sampling_params: dict[str, Any],
        role_name: str | None = None,
        trained: bool = True,
        session_id: str | None = None,
    ) -> TurnRecord:
        """One call with a chat prompt; see `generate_ids`."""
        prompt_ids = render_ids(self.tokenizer, messages)
        return await self.generate_ids(prompt_ids, sampling_params, role_name, trained, session_id)

    async def generate_ids(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        role_name: str | None = None,
        trained: bool = True,
        session_id: str | None = None,
    ) -> TurnRecord:
        """One call with exactly these ids; `role_name` labels the record (a policy may have several roles),
        `session_id` pins it to one worker.

        Raises PromptTooLong, or an InfrastructureError: RoleBadResponse also when the engine's prompt length differs
        from ours, `engine_aborted` when it did so before the first token.
        """
        name = role_name or self.role.name
        payload = {
            "input_ids": prompt_ids,
            "sampling_params": self._sampling(name, len(prompt_ids), sampling_params),
            "return_logprob": True,
        }
        headers = {"X-SMG-Routing-Key": session_id} if session_id else None
        data = await _call(self.role, "/generate", payload, headers)
        return _turn_record(name, prompt_ids, data, trained)

    def _sampling(self, name: str, prompt_tokens: int, hook_params: dict[str, Any]) -> dict[str, Any]:
        """The hook's parameters; the role overrides what its YAML entry sets and only lowers max_new_tokens."""
        params = dict(hook_params)
        if self.role.temperature is not None:
            params["temperature"] = self.role.temperature
        if self.role.top_p is not None:
            params["top_p"] = self.role.top_p
        if self.role.stop:
            params["stop"] = list(self.role.stop)
        limits = [limit for limit in (params.get("max_new_tokens"), self.role.max_new_tokens) if limit is not None]
        if not limits:
            raise ValueError(f"role '{self.role.name}': no max_new_tokens in the sampling parameters nor in the role")
        params["max_new_tokens"] = room_for(name, prompt_tokens, min(limits), self.max_context_len)
        return params


def _turn_record(role: str, prompt_ids: list[int], data: Any, trained: bool) -> TurnRecord:
    meta = _generate_meta(role, data)
    finish = _finish(role, meta)
    if meta.get("prompt_tokens") != len(prompt_ids):
        raise RoleBadResponse(role, f"engine saw {meta.get('prompt_tokens')} prompt tokens, sent {len(prompt_ids)}")
    pairs = meta.get("output_token_logprobs")
    if not pairs and finish == "abort":
        raise InfrastructureError("engine_aborted", f"'{role}', before the first token")
    if not pairs:
        raise RoleBadResponse(role, "no output_token_logprobs although return_logprob was set")
    try:
        # JSON has no NaN: an engine whose numbers went wrong sends null.
        log_probs, response_ids = [float(pair[0]) for pair in pairs], [int(pair[1]) for pair in pairs]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise RoleBadResponse(role, f"output_token_logprobs are no pairs of numbers: {str(pairs)[:200]}") from error
    if data.get("output_ids") not in (None, response_ids):
        raise RoleBadResponse(role, "output_ids differ from the ids of output_token_logprobs")
    version = meta.get("weight_version")
    try:
        return TurnRecord.from_engine(
            prompt_ids,
            response_ids,
            log_probs,
            trained=trained,
            role=role,
            finish_reason=finish,
            text=data["text"],
            weight_version=None if version is None else str(version),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except ValueError as error:
        raise RoleBadResponse(role, str(error)) from error


# --------------------------------------------------------------------------------------------------------------------
# Frozen roles.


class FrozenClient:
    """Calls to a role that is not trained: SGLang `/generate` with its own tokenizer, or OpenAI chat."""

    def __init__(self, role: Role, tokenizer: Any | None = None, max_context_len: int | None = None) -> None:
        self.role = role
        self.max_context_len = max_context_len
        self._tokenizer = tokenizer

    async def complete(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> Completion:
        """One call with the role's own sampling settings; `sampling` (the role's field names) overrides them.

        `tools` are OpenAI function schemas: a `chat` server gets them, for `generate` the chat template does.
        Raises PromptTooLong (only `generate`), or an InfrastructureError; an aborted call is RoleUnavailable.
        """
        start = time.perf_counter()
        params = self._sampling() | dict(sampling or {})
        ask = self._chat if self.role.api == "chat" else self._generate
        text, finish, prompt, completion, calls = await ask(messages, params, tools)
        if finish == "abort":
            raise RoleUnavailable(self.role.name, "the engine aborted the request")
        return Completion(text, finish, prompt, completion, time.perf_counter() - start, calls)

    async def _generate(
        self, messages: Messages, params: dict[str, Any], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, str, int, int, tuple[Any, ...]]:
        role = self.role
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, str(role.tokenizer))
        input_ids = render_ids(self._tokenizer, messages, tools)
        params["max_new_tokens"] = room_for(role.name, len(input_ids), params["max_new_tokens"], self.max_context_len)
        data = await _call(role, "/generate", {"input_ids": input_ids, "sampling_params": params})
        meta = _generate_meta(role.name, data)
        counts = meta.get("prompt_tokens", len(input_ids)), meta.get("completion_tokens", 0)
        return data["text"], _finish(role.name, meta), *counts, ()

    async def _chat(
        self, messages: Messages, params: dict[str, Any], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, str, int, int, tuple[Any, ...]]:
        role = self.role
        params["max_tokens"] = params.pop("max_new_tokens")
        payload = {"model": role.model, "messages": messages, **params} | ({"tools": list(tools)} if tools else {})
        data = await _call(role, _chat_path(role, "/chat/completions"), payload, _auth(role))
        try:
            return _chat_answer(data)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RoleBadResponse(role.name, f"not a chat completion: {str(data)[:200]}") from error

    def _sampling(self) -> dict[str, Any]:
        role = self.role
        params: dict[str, Any] = {"temperature": role.temperature, "top_p": role.top_p, "stop": list(role.stop)}
        return {"max_new_tokens": role.max_new_tokens} | {k: v for k, v in params.items() if v not in (None, [])}


def _chat_answer(data: Any) -> tuple[str, str, int, int, tuple[Any, ...]]:
    choice, usage = data["choices"][0], data.get("usage") or {}
    message, finish = choice["message"], choice["finish_reason"]
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise TypeError(f"content is a {type(text).__name__}")
    counts = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    finish = finish if finish in FINISH_REASONS else "stop"
    return text, finish, *counts, tuple(message.get("tool_calls") or ())


def _chat_path(role: Role, path: str) -> str:
    return path if role.url.endswith("/v1") else "/v1" + path


def _auth(role: Role) -> dict[str, str]:
    if role.api_key_env is None:
        return {}
    token = os.environ.get(role.api_key_env)
    if not token:
        raise RoleBadResponse(role.name, f"environment variable {role.api_key_env} (api_key_env) is not set")
    return {"Authorization": f"Bearer {token}"}
