"""Runs an aiohttp application in a thread with an event loop of its own, beside the rollout's loop.

Invariants: `run_app_in_thread` returns when the port is bound, and raises what binding raised; `stop` is idempotent and
waits for the thread. Binds to this machine only, unless told otherwise: a remote sandbox needs `host="0.0.0.0"`.
Leaves out: TLS and authentication; put the port behind something that has them before others can reach it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import BaseRequest
from aiohttp.web_log import AccessLogger

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0
_SHUTDOWN_TIMEOUT_S = 2.0  # how long requests in flight may take to end
_QUIET_PATHS = ("/healthz", "/v1/models")


class FilteredAccessLogger(AccessLogger):
    """Access log without health checks, which would drown the rest."""

    def log(self, request: BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log one request; `time` in seconds."""
        if request.path in _QUIET_PATHS and response.status < 400:
            return
        super().log(request, response, time)


@dataclass
class AppHandle:
    """A running application."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def stop(self) -> None:
        """End the application and its thread; does nothing the second time."""
        if not self.thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOP_TIMEOUT_S)
        if self.thread.is_alive():
            logger.warning("%s still runs after %.0f s", self.thread.name, _STOP_TIMEOUT_S)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: dict[str, Any] | None = None,
) -> AppHandle:
    """Serve `app`; port 0 takes a free one. `runner_kwargs` go to `web.AppRunner`.

    Raises OSError when the port cannot be bound, TimeoutError when it takes longer than `start_timeout_sec`.
    """
    loop = asyncio.new_event_loop()
    defaults = {"access_log_class": FilteredAccessLogger, "shutdown_timeout": _SHUTDOWN_TIMEOUT_S}
    runner = web.AppRunner(app, **{**defaults, **(runner_kwargs or {})})
    bound: Future[tuple[str, int]] = Future()
    thread = threading.Thread(target=_serve, args=(loop, runner, host, port, bound), name=thread_name, daemon=True)
    thread.start()
    try:
        address, actual = bound.result(start_timeout_sec)
    except FutureTimeoutError:
        loop.call_soon_threadsafe(loop.stop)
        raise TimeoutError(f"{thread_name} did not start within {start_timeout_sec} s") from None
    return AppHandle(address, actual, thread, loop, runner)


def _serve(
    loop: asyncio.AbstractEventLoop, runner: web.AppRunner, host: str, port: int, bound: Future[tuple[str, int]]
) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_bind(runner, host, port, bound))
        if bound.exception() is None:
            loop.run_forever()
    finally:
        loop.run_until_complete(runner.cleanup())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _bind(runner: web.AppRunner, host: str, port: int, bound: Future[tuple[str, int]]) -> None:
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        bound.set_result((host, runner.addresses[0][1]))
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        bound.set_exception(error)
