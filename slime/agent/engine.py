"""The engine behind an adapter: generation with token ids, and abort.

Inputs: the address of an SGLang server or router. Invariants: a call has a deadline, bounded retries, and ends the
engine's work when it is given up; ids and log-probs are the engine's, of one length, and a prompt it counts differently
is an error. One HTTP session per event loop. Leaves out: what is asked, and what the answer means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_FIRST_DELAY_S = 0.1
_ABORT_TIMEOUT_S = 5.0
_RETRYABLE = (408, 429, 500, 502, 503, 504)


class EngineError(Exception):
    """The engine did not give a usable answer."""


def agent_env(name: str, default: str = "") -> str:
    """Environment variable `SLIME_AGENT_<name>`, else its older spelling `SWE_<name>`, else `default`."""
    return os.environ.get(f"SLIME_AGENT_{name}") or os.environ.get(f"SWE_{name}") or default


def agent_env_number(name: str, default: float) -> float:
    """`agent_env` as a number above 0. Raises ValueError naming the variable."""
    text = agent_env(name, str(default))
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ValueError(f"SLIME_AGENT_{name}={text!r}: give a number above 0")
    return number


class Engine:
    """One address; see the module's docstring."""

    def __init__(self, url: str) -> None:
        self.url = str(url).rstrip("/").removesuffix("/generate")
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]
        self._sessions = weakref.WeakKeyDictionary()

    async def generate(self, payload: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """The answer to `/generate`. Raises EngineError, TimeoutError after `SLIME_AGENT_GENERATE_TIMEOUT_SEC` (3600).

        When it does not return, the request is aborted by its `rid`.
        """
        deadline = agent_env_number("GENERATE_TIMEOUT_SEC", 3600)
        payload = dict(payload)
        try:
            return await asyncio.wait_for(self._post_with_retries(payload, headers), deadline)
        except (asyncio.CancelledError, asyncio.TimeoutError):
            await self.abort(payload["rid"])
            raise

    async def abort(self, rid: str) -> None:
        """Tell the engine, or every engine behind the router, to give up a request; failures are logged."""
        try:
            await asyncio.wait_for(self._abort(rid), _ABORT_TIMEOUT_S)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("request %s could not be aborted at %s: %r", rid, self.url, error)

    async def close(self) -> None:
        """Close the running loop's HTTP session."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions or self._sessions[loop].closed:
            connector = aiohttp.TCPConnector(limit=0)
            # The deadline is the caller's; trust_env stays off so that no proxy stands before a local engine.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            self._sessions[loop] = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._sessions[loop]

    async def _post_with_retries(self, payload: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._session().post(f"{self.url}/generate", json=payload, headers=headers) as response:
                    if response.status == 200:
                        return _as_object(await response.json(content_type=None))
                    problem = f"answered {response.status}: {(await response.text())[:500]}"
                    if response.status not in _RETRYABLE:
                        break
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < _ATTEMPTS:
                await asyncio.sleep(_FIRST_DELAY_S * 2**attempt)
            # The engine may not have noticed yet that the last attempt's connection is gone.
            payload["rid"] = f"{payload['rid'].partition('-')[0]}-{attempt}"
        raise EngineError(f"{self.url}/generate {problem}")

    async def _abort(self, rid: str) -> None:
        if await self._abort_at(self.url, rid) != 404:
            return
        # A router does not pass aborts on.
        async with self._session().get(f"{self.url}/workers") as response:
            workers = (await response.json(content_type=None))["workers"]
        await asyncio.gather(*(self._abort_at(worker["url"], rid) for worker in workers))

    async def _abort_at(self, url: str, rid: str) -> int:
        async with self._session().post(f"{url}/abort_request", json={"rid": rid}) as response:
            return response.status


def _as_object(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise ValueError(f"no JSON object: {str(answer)[:200]}")
    return answer


def read_output(answer: dict[str, Any], prompt_tokens: int) -> tuple[list[int], list[float], str, str | None]:
    """(output ids, log-probs, finish reason, weight version) of an answer. Raises EngineError when it does not fit."""
    meta = answer.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs") or []
    finish = meta.get("finish_reason") or {}
    try:
        log_probs, ids = [float(pair[0]) for pair in pairs], [int(pair[1]) for pair in pairs]
        reason = str(finish["type"]) if isinstance(finish, dict) else str(finish)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise EngineError(f"unreadable answer: {str(meta)[:300]}") from error
    if meta.get("prompt_tokens") not in (None, prompt_tokens):
        raise EngineError(f"the engine saw {meta['prompt_tokens']} prompt ids, {prompt_tokens} were sent")
    if answer.get("output_ids") not in (None, ids):
        raise EngineError(f"{len(answer['output_ids'])} output_ids, but log-probs of {len(ids)} others")
    version = meta.get("weight_version")
    return ids, log_probs, reason, None if version is None else str(version)
