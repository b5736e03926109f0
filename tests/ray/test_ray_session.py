import os
import signal

from slime.ray.session import noting_stop_signals


def test_a_stop_signal_whose_exception_is_lost_is_noted() -> None:
    """As in ray.init: the handler in place raises where Python drops the exception."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with noting_stop_signals(received):
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM], "outside the block nothing is noted"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_is_noted_without_a_signal() -> None:
    received: list[int] = []
    with noting_stop_signals(received):
        pass
    assert received == []
