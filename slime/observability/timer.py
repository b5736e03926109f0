"""Named wall-clock timers of one process; their sums become the `perf/*_time` metrics.

Invariants: one `Timer` per process; a name is either running or not (starting twice is an error); seconds.
Left out: device synchronisation - time a GPU phase around a call that waits for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from slime.utils.misc import SingletonMeta

F = TypeVar("F", bound=Callable[..., Any])


class Timer(metaclass=SingletonMeta):
    """Sums of elapsed seconds by name."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self.start_time: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Raises ValueError when `name` is running already."""
        if name in self.start_time:
            raise ValueError(f"timer {name!r} is running already")
        self.start_time[name] = time.perf_counter()

    def end(self, name: str) -> None:
        """Adds the time since `start`; raises ValueError when `name` is not running."""
        if name not in self.start_time:
            raise ValueError(f"timer {name!r} was not started")
        self.add(name, time.perf_counter() - self.start_time.pop(name))

    def reset(self, name: str | None = None) -> None:
        """Forgets the sum of `name`, or all sums."""
        if name is None:
            self.timers = {}
        else:
            self.timers.pop(name, None)

    def add(self, name: str, elapsed_time: float) -> None:
        """Adds seconds to a sum."""
        self.timers[name] = self.timers.get(name, 0.0) + elapsed_time

    def log_dict(self) -> dict[str, float]:
        """A copy of all sums."""
        return dict(self.timers)

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Times the block, also when it raises."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


def timer(name_or_func: str | Callable[..., Any]) -> Any:
    """`with timer("name"):`, or a decorator (`@timer`, `@timer("name")`; by default the function's name)."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)

    @functools.wraps(name_or_func)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(name_or_func.__name__):
            return name_or_func(*args, **kwargs)

    return timed


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stops the running timer `name` during the block."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred_func: Callable[[], Any]) -> Callable[[F], F]:
    """Decorator that calls `deferred_func()` after every call of the function, also when it raises."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred_func()

        return wrapped  # type: ignore[return-value]

    return decorate
