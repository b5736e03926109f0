"""Watches the engines of a group and drops the dead ones (`--use-fault-tolerance`).

Input: a group with `all_engines` (Ray actor handles, None for an empty slot), `nodes_per_engine`, and the flags
`--rollout-health-check-*`. An engine is dead when `health_generate` fails, answers False, or takes too long.
Invariants: checks run on a thread of their own and only while enabled; a dead engine's actors are killed and all their
slots set to None, and nobody else's; the thread ends with `stop`. Left out: restarting (the group's `recover`).
"""

from __future__ import annotations

import logging
import threading
from argparse import Namespace
from typing import Any

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


class RolloutHealthMonitor:
    """`start` once, then `pause` while the engines cannot answer (offloaded, updating) and `resume`."""

    def __init__(self, server_group: Any, args: Namespace) -> None:
        self._group = server_group
        self._interval_s = args.rollout_health_check_interval
        self._timeout_s = args.rollout_health_check_timeout
        self._first_wait_s = args.rollout_health_check_first_wait
        self._enabled = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._waited = False

    def start(self) -> bool:
        """Starts the thread, paused; False when it runs already or the group has no engine."""
        if self._thread is not None or not self._group.all_engines:
            return False
        self._stopped.clear()
        self._thread = threading.Thread(target=self._watch, name="engine-health", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._enabled.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S + self._timeout_s)
        self._enabled.clear()

    def pause(self) -> None:
        """No check begins from now on."""
        self._enabled.clear()

    def resume(self) -> None:
        """Checks again; engines get their grace period once more."""
        self._waited = False
        self._enabled.set()

    def is_checking_enabled(self) -> bool:
        """Whether checks may run."""
        return self._thread is not None and self._enabled.is_set() and not self._stopped.is_set()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._enabled.wait()
            wait_s = self._interval_s if self._waited else self._first_wait_s
            self._waited = True
            if self._stopped.wait(wait_s):
                return
            if self.is_checking_enabled():
                self._check_all()

    def _check_all(self) -> None:
        # Only the first node part of an engine answers.
        step = max(1, self._group.nodes_per_engine)
        for first in range(0, len(self._group.all_engines), step):
            engine = self._group.all_engines[first]
            if engine is not None and self.is_checking_enabled() and not self._is_healthy(engine):
                self._drop(first, step)

    def _is_healthy(self, engine: Any) -> bool:
        import ray

        try:
            return bool(ray.get(engine.health_generate.remote(timeout=self._timeout_s), timeout=2 * self._timeout_s))
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("health check failed: %r", error)
            return False

    def _drop(self, first: int, count: int) -> None:
        import ray

        logger.error("engine %d is dead, its %d actors are ended", first // count, count)
        for slot in range(first, first + count):
            engine, self._group.all_engines[slot] = self._group.all_engines[slot], None
            if engine is not None:
                ray.kill(engine)
