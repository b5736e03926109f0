"""One background event loop per process, for synchronous code that has to run coroutines.

Invariants: the loop runs in a daemon thread, is created on first use, and is shared by all callers, so that
clients and semaphores bound to it stay valid. Never call `run` from the loop's own thread: it would wait for itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncLoopThread:
    """An event loop that runs for ever in its own daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="slime-async-loop", daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on the loop, wait for it and return its result or raise its error."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("run() was called from the background loop itself; await the coroutine instead")
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            # Ctrl-C interrupts only the waiting thread; without this the work would go on in the background.
            future.cancel()
            raise


_loop_thread: AsyncLoopThread | None = None
_lock = threading.Lock()


def get_async_loop() -> AsyncLoopThread:
    """The process-wide background loop (started on first use)."""
    global _loop_thread
    with _lock:
        if _loop_thread is None:
            _loop_thread = AsyncLoopThread()
        return _loop_thread


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run `coro` on the process-wide background loop and wait for its result."""
    return get_async_loop().run(coro)
