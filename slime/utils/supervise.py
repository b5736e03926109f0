"""Keeps a set of servers running: start, wait, watch, restart with back-off.

Inputs: servers (`Server`), which GPUs they share, and a clock. `Supervisor.tick` does what is due and returns; the caller
decides how often. Invariants: before all servers were ready once, a failure is final (a wrong setting does not mend itself);
afterwards a server that died or no longer answers is restarted after 1, 2, 4 ... seconds, until it failed `max_restarts`
times without `FORGIVE_S` seconds of health in between. Servers that share a GPU start one after the other, because each takes
its part of what is free then; when one of them fails, those that started after it start again as well.
Left out: what a server is, signals, several attempts of the first start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

FIRST_DELAY_S, MOST_DELAY_S = 1.0, 60.0
FORGIVE_S = 300.0
MISSES = 3
WAIT_LINE_S = 10.0


class Server(Protocol):
    """What is supervised."""

    url: str

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def is_alive(self) -> bool: ...

    def is_ready(self) -> bool: ...

    def answers(self) -> bool: ...

    def log_tail(self) -> str: ...


class ServerFailed(RuntimeError):
    """A server failed for good. The message has its name, the reason and the end of its log."""


@dataclass
class _State:
    phase: str = "queued"  # queued -> starting -> ready; on failure back to queued, not before `since`
    since: float = 0.0
    failures: int = 0
    misses: int = 0
    checked: float = 0.0
    said: float = 0.0


class Supervisor:
    """Args:
    servers: by name, in the order in which those that share a device start.
    devices: what each server occupies; two servers with a common element share it.
    timeout_s: seconds for a server to become ready. health_interval_s: between two looks at a server that is ready.
    say: takes a line for people.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        devices: Mapping[str, Set[Hashable]],
        timeout_s: float,
        say: Callable[[str], None],
        max_restarts: int = 5,
        health_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers, self.timeout_s, self.say, self.clock = servers, timeout_s, say, clock
        self.max_restarts, self.health_interval_s = max_restarts, health_interval_s
        names = list(servers)
        self._before = {
            name: [other for other in names[:index] if devices.get(name, set()) & devices.get(other, set())]
            for index, name in enumerate(names)
        }
        self._states = {name: _State() for name in names}
        self._was_ready = False

    @property
    def all_ready(self) -> bool:
        return all(state.phase == "ready" for state in self._states.values())

    def tick(self) -> None:
        """Do what is due. Raises ServerFailed, and what `Server.start` raises."""
        steps = {"queued": self._start_if_due, "starting": self._look_at_start, "ready": self._look_at_health}
        for name, state in self._states.items():
            steps[state.phase](name, state)
        if self.all_ready and not self._was_ready:
            self._was_ready = True
            self.say("ALL READY")

    def _start_if_due(self, name: str, state: _State) -> None:
        ready = all(self._states[other].phase == "ready" for other in self._before[name])
        if not ready or self.clock() < state.since:
            return
        self.servers[name].start()
        state.phase, state.since = "starting", self.clock()
        state.said = state.since

    def _look_at_start(self, name: str, state: _State) -> None:
        server, now = self.servers[name], self.clock()
        if not server.is_alive():
            self._fail(name, state, "ended before it was ready")
        elif server.is_ready():
            state.phase, state.since, state.checked, state.misses = "ready", now, now, 0
            self.say(f"READY {name} {server.url}")
        elif now - state.since > self.timeout_s:
            self._fail(name, state, f"was not ready after {self.timeout_s:g} s")
        elif now - state.said >= WAIT_LINE_S:
            state.said = now
            self.say(f"WAIT {name} {now - state.since:.0f} s")

    def _look_at_health(self, name: str, state: _State) -> None:
        server, now = self.servers[name], self.clock()
        if not server.is_alive():
            self._fail(name, state, "died")
            return
        if now - state.since > FORGIVE_S:
            state.failures = 0
        if now - state.checked < self.health_interval_s:
            return
        state.checked = now
        state.misses = 0 if server.answers() else state.misses + 1
        if state.misses >= MISSES:
            self._fail(name, state, f"did not answer {MISSES} times")

    def _fail(self, name: str, state: _State, reason: str) -> None:
        tail = self.servers[name].log_tail()
        self.servers[name].stop()
        state.failures += 1
        if not self._was_ready or state.failures > self.max_restarts:
            raise ServerFailed(f"server {name} {reason}; the last lines of its log:\n{tail}")
        delay = min(FIRST_DELAY_S * 2 ** (state.failures - 1), MOST_DELAY_S)
        self.say(f"DIED {name} {reason}; restart {state.failures} of {self.max_restarts} in {delay:g} s")
        state.phase, state.since = "queued", self.clock() + delay
        for other, before in self._before.items():
            if name in before:
                self.say(f"STOP {other}, which shares a GPU with {name}")
                self.servers[other].stop()
                self._states[other].phase = "queued"
