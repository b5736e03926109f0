"""Timers: sums, context, decorator, pause, misuse."""

from __future__ import annotations

import time

import pytest

from slime.observability.timer import Timer, inverse_timer, timer, with_defer
from slime.utils.misc import SingletonMeta


@pytest.fixture(autouse=True)
def fresh():
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()


def test_sums_and_reset():
    with timer("a"):
        time.sleep(0.02)
    Timer().add("a", 1.0)
    Timer().add("b", 2.0)
    sums = Timer().log_dict()
    assert 1.02 <= sums["a"] < 6 and sums["b"] == 2.0
    Timer().reset("a")
    assert Timer().log_dict() == {"b": 2.0}
    Timer().reset()
    assert Timer().log_dict() == {} and sums["b"] == 2.0


def test_decorators():
    @timer
    def work(x):
        """Doc."""
        return x + 1

    @timer("other")
    def more():
        return 5

    assert work(1) == 2 and more() == 5 and work.__doc__ == "Doc."
    assert sorted(Timer().log_dict()) == ["other", "work"]


def test_time_counts_when_the_block_raises():
    with pytest.raises(KeyError), timer("a"):
        raise KeyError
    assert "a" in Timer().log_dict() and Timer().start_time == {}


def test_inverse_timer_pauses():
    with timer("outer"):
        with inverse_timer("outer"):
            time.sleep(1.0)
    assert Timer().log_dict()["outer"] < 0.9


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match="not started"):
        Timer().end("x")
    Timer().start("x")
    with pytest.raises(ValueError, match="running already"):
        Timer().start("x")


def test_defer_runs_also_after_an_error():
    calls: list[int] = []

    @with_defer(lambda: calls.append(1))
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert calls == [1]
