"""Keeping servers running, on a clock of its own: order of starts, deadlines, back-off, who restarts with whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.utils.supervise import FORGIVE_S, MISSES, ServerFailed, Supervisor


class Fake:
    """A server that is ready `delay` ticks of `is_ready` after its start."""

    def __init__(self, name: str, delay: int = 0) -> None:
        self.url, self.delay = f"http://{name}", delay
        self.starts = self.stops = self.asked = 0
        self.alive = self.works = True

    def start(self) -> None:
        self.starts, self.asked, self.alive = self.starts + 1, 0, True

    def stop(self) -> None:
        self.stops, self.alive = self.stops + 1, False

    def is_alive(self) -> bool:
        return self.alive

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked > self.delay

    def answers(self) -> bool:
        return self.works

    def log_tail(self) -> str:
        return "its last words"


class Stage:
    """Servers `a`, `b`, ... under a supervisor whose clock moves by `run`."""

    def __init__(self, devices: dict[str, set[int]] | None = None, max_restarts: int = 3, **delays: int) -> None:
        self.now, self.lines = 0.0, list[str]()
        self.servers = {name: Fake(name, delay) for name, delay in delays.items()}
        self.supervisor = Supervisor(
            self.servers, devices or {}, 60.0, self.lines.append, max_restarts, 10.0, lambda: self.now
        )

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + seconds
        while self.now < end and not until():
            self.supervisor.tick()
            self.now += 1.0


def test_all_start_at_once_and_all_are_announced() -> None:
    stage = Stage(a=1, b=3)
    stage.run(1)
    assert [server.starts for server in stage.servers.values()] == [1, 1] and not stage.supervisor.all_ready
    stage.run(10)
    assert stage.lines == ["READY a http://a", "READY b http://b", "ALL READY"]


def test_servers_on_one_gpu_start_one_after_the_other() -> None:
    stage = Stage({"a": {0, 1}, "b": {1}, "c": {2}}, a=3, b=0, c=0)
    stage.run(2)
    assert [server.starts for server in stage.servers.values()] == [1, 0, 1]
    stage.run(10)
    assert stage.lines == ["READY c http://c", "READY a http://a", "READY b http://b", "ALL READY"]


def test_a_slow_start_is_told_every_ten_seconds_and_fails_at_the_deadline() -> None:
    stage = Stage(a=1000)
    with pytest.raises(ServerFailed, match="server a was not ready after 60 s; .*\n.*its last words"):
        stage.run(100)
    assert stage.lines[:2] == ["WAIT a 10 s", "WAIT a 20 s"] and stage.servers["a"].stops == 1


def test_a_failure_before_all_were_ready_is_final() -> None:
    stage = Stage(a=0, b=5)
    stage.run(2)
    stage.servers["b"].alive = False
    with pytest.raises(ServerFailed, match="server b ended before it was ready"):
        stage.run(5)


def test_restarts_wait_longer_each_time_and_end_at_the_limit() -> None:
    stage = Stage(a=0)
    stage.run(3)
    server, moments = stage.servers["a"], list[float]()
    with pytest.raises(ServerFailed, match="server a died"):
        for _ in range(4):
            server.alive, died = False, stage.now
            starts = server.starts
            stage.run(100, until=lambda before=starts: server.starts > before)  # type: ignore[misc]
            moments.append(stage.now - died)
            stage.run(3)
    assert moments == [2.0, 3.0, 5.0]  # 1, 2, 4 s, and the tick that notices
    assert [line for line in stage.lines if line.startswith("DIED")][1] == "DIED a died; restart 2 of 3 in 2 s"


def test_failures_are_forgiven_after_minutes_of_health() -> None:
    stage = Stage(a=0)
    for _ in range(5):
        stage.run(FORGIVE_S + 5)
        stage.servers["a"].alive = False
        stage.run(5)
    assert all("restart 1 of 3" in line for line in stage.lines if line.startswith("DIED"))


def test_a_server_that_hangs_is_restarted_after_some_misses() -> None:
    stage = Stage(a=0)
    stage.run(3)
    stage.servers["a"].works = False
    stage.run(10.0 * (MISSES - 1))
    assert stage.servers["a"].starts == 1
    stage.run(15)
    assert stage.servers["a"].starts == 2 and f"did not answer {MISSES} times" in stage.lines[-2]


def test_one_miss_is_no_reason() -> None:
    stage = Stage(a=0)
    stage.run(3)
    for works in (False, True) * 5:
        stage.servers["a"].works = works
        stage.run(10)
    assert stage.servers["a"].starts == 1


def test_those_that_took_what_it_left_start_again_with_it() -> None:
    stage = Stage({"a": {0}, "b": {0}, "c": {1}}, a=0, b=0, c=0)
    stage.run(5)
    stage.servers["a"].alive = False
    stage.run(10)
    assert [server.starts for server in stage.servers.values()] == [2, 2, 1] and stage.supervisor.all_ready
    assert "STOP b, which shares a GPU with a" in stage.lines
    stage.servers["b"].alive = False
    stage.run(10)
    assert [server.starts for server in stage.servers.values()] == [2, 3, 1]
