"""Micro-batching: shared calls, order, a bounded queue, callers that give up, errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentic.toolorchestra.retrieval.batching import MicroBatcher, Overloaded


class Doubler:
    """The function behind the batcher; `gate` holds its calls back, negative numbers break it."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        assert self.gate.wait(10)
        if min(items) < 0:
            raise ValueError("negative")
        return [2 * item for item in items]


@asynccontextmanager
async def batcher(
    function: Doubler, max_batch: int = 8, window_s: float = 0.0, max_queue: int = 100
) -> AsyncIterator[MicroBatcher[int, int]]:
    made: MicroBatcher[int, int] = MicroBatcher(function, max_batch, window_s, max_queue)
    made.start()
    try:
        yield made
    finally:
        function.gate.set()
        await made.close()


async def until(condition: object) -> None:
    async def poll() -> None:
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), 10)


async def test_what_arrives_during_a_call_shares_the_next_one() -> None:
    function = Doubler()
    function.gate.clear()
    async with batcher(function) as made:
        first = asyncio.ensure_future(made.submit([1]))
        await until(lambda: function.calls)
        others = [asyncio.ensure_future(made.submit([n, n + 100])) for n in range(2, 12)]
        await until(lambda: len(made._waiting) == 20)
        function.gate.set()
        assert await first == [2]
        assert await asyncio.gather(*others) == [[2 * n, 2 * n + 200] for n in range(2, 12)]
    assert [len(call) for call in function.calls] == [1, 8, 8, 4]
    assert made.counters.items == 21 and made.counters.largest_batch == 8


async def test_a_crowd_is_waited_for_and_a_lone_caller_is_not() -> None:
    function = Doubler()
    async with batcher(function, window_s=0.05) as made:
        await asyncio.gather(*(made.submit([n]) for n in range(4)))
        await asyncio.gather(*(made.submit([n]) for n in range(2)), later(made, 7), later(made, 8))
        assert sorted(map(len, function.calls))[-1] == 4 and len(function.calls) == 2
        await made.submit([1])  # still expects the crowd, gives up after the window
        loop = asyncio.get_running_loop()
        start = loop.time()
        await made.submit([1])
        assert loop.time() - start < 0.05


async def later(made: MicroBatcher[int, int], item: int) -> list[int]:
    await asyncio.sleep(0.005)
    return await made.submit([item])


async def test_a_full_queue_refuses_at_once_and_takes_nothing() -> None:
    function = Doubler()
    function.gate.clear()
    async with batcher(function, max_queue=3) as made:
        first = asyncio.ensure_future(made.submit([1]))
        await until(lambda: function.calls)
        waiting = asyncio.ensure_future(made.submit([2, 3]))
        await until(lambda: len(made._waiting) == 2)
        with pytest.raises(Overloaded) as refused:
            await made.submit([4, 5])
        assert refused.value.retry_after_s >= 1
        fits = asyncio.ensure_future(made.submit([6]))
        await until(lambda: len(made._waiting) == 3)
        function.gate.set()
        assert await asyncio.gather(first, waiting, fits) == [[2], [4, 6], [12]]
    assert made.counters.refused == 2


async def test_who_gave_up_is_not_processed() -> None:
    function = Doubler()
    function.gate.clear()
    async with batcher(function) as made:
        first = asyncio.ensure_future(made.submit([1]))
        await until(lambda: function.calls)
        with pytest.raises(asyncio.TimeoutError):
            await made.submit([2], timeout_s=0.01)
        stays = asyncio.ensure_future(made.submit([3]))
        function.gate.set()
        assert await asyncio.gather(first, stays) == [[2], [6]]
    assert function.calls == [[1], [3]] and made.counters.given_up == 1


async def test_an_error_reaches_its_batch_only() -> None:
    function = Doubler()
    async with batcher(function) as made:
        with pytest.raises(ValueError, match="negative"):
            await made.submit([-1, 5])
        assert await made.submit([5]) == [10]
        assert await made.submit([]) == []


async def test_close_cancels_who_waits() -> None:
    function = Doubler()
    function.gate.clear()
    made: MicroBatcher[int, int] = MicroBatcher(function, 1, 0.0, 10)
    made.start()
    callers = [asyncio.ensure_future(made.submit([n])) for n in range(3)]
    await until(lambda: function.calls)
    function.gate.set()
    await made.close()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[-1], asyncio.CancelledError)
