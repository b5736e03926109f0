"""Micro-batching: concurrent requests share one call of a blocking function, in a thread of its own.

Inputs: items, submitted from the event loop; a function from a list of items to the list of their results.
Invariants: one call at a time, of at most `max_batch` items, in order of arrival; at most `max_queue` items wait, further
ones are refused at once; an item whose caller gave up is not processed; an error of the function reaches every caller
of that batch and ends nothing else.
A lone caller never waits for company. After a call, everybody who was in it or came meanwhile is expected to come again:
the next call begins when that many wait, when none has come for `window_s` (or a tenth of the time of the last call, where
that is longer: half a batch costs more than such a pause), or after four times that.
Leaves out: priorities and what the items are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

WINDOWS = 4
SHARE_OF_CALL = 0.1


class Overloaded(Exception):
    """The queue is full; `retry_after_s` (whole seconds) is when a place should be free."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} queries are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass
class Counters:
    """What happened so far."""

    items: int = 0
    batches: int = 0
    largest_batch: int = 0
    refused: int = 0
    given_up: int = 0
    """Items whose caller was gone when their turn came."""
    busy_s: float = 0.0
    """Seconds inside the function."""


class MicroBatcher(Generic[T, R]):
    """`start` it on the event loop, `await submit([item])`, `await close()`."""

    def __init__(
        self, process: Callable[[list[T]], Sequence[R]], max_batch: int, window_s: float, max_queue: int
    ) -> None:
        self.max_batch, self.window_s, self.max_queue = max_batch, window_s, max_queue
        self.counters = Counters()
        self._process = process
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._batch: list[tuple[T, asyncio.Future[R]]] = []
        self._arrived = asyncio.Event()
        self._expected = 1
        self._last_call_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; whoever still waits is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for _, future in [*self._batch, *self._waiting]:
            future.cancel()
        self._thread.shutdown(wait=True)

    async def submit(self, items: Sequence[T], timeout_s: float | None = None) -> list[R]:
        """Results of the items, in order.

        Raises Overloaded (none was taken), asyncio.TimeoutError (those not begun are dropped), or what the function raised.
        """
        if len(self._waiting) + len(items) > self.max_queue:
            self.counters.refused += len(items)
            raise Overloaded(len(self._waiting), self._retry_after())
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        self._arrived.set()
        try:
            return await _results(futures, timeout_s)
        finally:
            for future in futures:
                future.cancel()  # no effect on those that are done

    def status(self) -> dict[str, Any]:
        """The counters and the length of the queue."""
        return {"waiting": len(self._waiting), **asdict(self.counters)}

    def _retry_after(self) -> int:
        counters = self.counters
        per_batch = counters.busy_s / counters.batches if counters.batches else 0.0
        return max(1, math.ceil(per_batch * self.max_queue / self.max_batch))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._gather()
            self._batch = self._take()
            if not self._batch:
                continue
            start = time.perf_counter()
            call = loop.run_in_executor(self._thread, self._process, [item for item, _ in self._batch])
            await asyncio.wait({call})
            self._last_call_s = time.perf_counter() - start
            self._count(len(self._batch), self._last_call_s)
            self._expected = min(self.max_batch, len(self._batch) + len(self._waiting))
            _settle(self._batch, call)

    async def _gather(self) -> None:
        """Return when there is work, and for a moment wait for as much as is expected."""
        while not self._waiting:
            await self._next_arrival(None)
        loop = asyncio.get_running_loop()
        window_s = max(self.window_s, SHARE_OF_CALL * self._last_call_s)
        end = loop.time() + WINDOWS * window_s
        while len(self._waiting) < self._expected and loop.time() < end:
            if not await self._next_arrival(window_s):
                break

    async def _next_arrival(self, timeout_s: float | None) -> bool:
        """Whether something arrived in time."""
        self._arrived.clear()
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _take(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        while self._waiting and len(batch) < self.max_batch:
            item, future = self._waiting.popleft()
            if future.done():
                self.counters.given_up += 1
            else:
                batch.append((item, future))
        return batch

    def _count(self, items: int, seconds: float) -> None:
        counters = self.counters
        counters.items += items
        counters.batches += 1
        counters.largest_batch = max(counters.largest_batch, items)
        counters.busy_s += seconds


async def _results(futures: list[asyncio.Future[R]], timeout_s: float | None) -> list[R]:
    pending = (await asyncio.wait(futures, timeout=timeout_s))[1] if futures else ()
    if pending:
        raise asyncio.TimeoutError
    for future in futures:
        future.exception()  # looked at, or asyncio complains about the second one of a request
    return [future.result() for future in futures]


def _settle(batch: list[tuple[T, asyncio.Future[R]]], call: asyncio.Future[Sequence[R]]) -> None:
    error = call.exception()
    results: Sequence[Any] = [None] * len(batch) if error else call.result()
    for (_, future), result in zip(batch, results, strict=True):
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
