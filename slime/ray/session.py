"""One run on Ray: start (or join) a cluster, run the loop, and leave nothing behind.

Invariants:
* A signal (SIGINT, SIGTERM) stops the loop at once; cleaning up is bounded by twice `CLEANUP_S` seconds and not interruptible.
* Every process that descends from this one is gone when `run_with_ray` returns, whatever happened.
* Exit codes: 0 done, 1 failure of a part, 2 bad input, 128 + signal number when stopped.

A driver that is killed outright cannot run this code; then the kernel ends Ray's daemons with it, these end the actors,
and every server is tied to its actor in the same way.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray

from slime.ray.errors import BadInput
from slime.ray.placement_group import get_num_bundles
from slime.ray.utils import add_default_ray_env_vars

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLEANUP_S = 10.0
CPU_OBJECT_STORE_BYTES = 10**9
# The rollout manager, the lock, and one spare for what a rollout function may start.
CPUS_BESIDE_BUNDLES = 3


def run_with_ray(main: Callable[[Namespace], Any], args: Namespace) -> int:
    """Run `main(args)` with Ray up; returns the exit code of the process. See the module docstring."""
    received: list[int] = []
    _raise_on_stop_signals(received)
    try:
        with noting_stop_signals(received):
            init_ray(args)
        _raise_on_stop_signals(received)  # ray.init puts its own SIGTERM handler
        if received:
            raise KeyboardInterrupt
        main(args)
        return 0
    except (KeyboardInterrupt, SystemExit) as stop:
        # Inside ray.init its own handler is active, which turns SIGTERM into SystemExit(15).
        signum = received[0] if received else getattr(stop, "code", signal.SIGINT)
        logger.warning("stopped by %s, cleaning up", signal.Signals(signum).name)
        return 128 + signum
    except BadInput as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except ray.exceptions.RayError as error:
        logger.error("a part of the run failed, stopping everything:\n%s", error)
        return 1
    finally:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        close_ray()


@contextmanager
def noting_stop_signals(received: list[int]) -> Iterator[None]:
    """Note the stop signals of the block, also those whose exception is lost.

    Python drops an exception raised in a callback around a fork, and ray.init forks a lot.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        with suppress(BlockingIOError):
            received += [number for number in reader.recv(4096) if number in STOP_SIGNALS]
        reader.close()
        writer.close()


def _raise_on_stop_signals(received: list[int]) -> None:
    """Note the signal and raise KeyboardInterrupt: the one exception (of ours) that Ray's blocking calls let through."""

    def stop(signum: int, frame: object) -> None:
        received.append(signum)
        raise KeyboardInterrupt

    for signum in STOP_SIGNALS:
        signal.signal(signum, stop)


def init_ray(args: Namespace) -> None:
    """Join the cluster named by RAY_ADDRESS, or start one in this process that is large enough for `args`.

    Logical CPUs do not limit threads: a small machine gets as many as the run has bundles, else nothing would schedule.
    """
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": add_default_ray_env_vars()},
        "logging_level": logging.WARNING,
        "log_to_driver": True,
    }
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**common)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at niceness 15, and the engines inherit it: anything else on the machine would starve them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # It would warn that the local cluster is protected by a token, which is what we want.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Workers that Ray starts ahead of need cost a second of CPU each and cannot serve actors with their own environment.
    common["_system_config"] = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
    if not args.use_gpu:
        common["object_store_memory"] = CPU_OBJECT_STORE_BYTES
    num_cpus = max(os.cpu_count() or 1, get_num_bundles(args) + CPUS_BESIDE_BUNDLES)
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **common)


def close_ray(timeout_s: float = CLEANUP_S) -> None:
    """Disconnect, end the local cluster if this process started one, and wait until all descendants are gone."""
    descendants = psutil.Process().children(recursive=True)
    deadline = time.monotonic() + timeout_s
    ray.shutdown()  # also ends the daemons of an interrupted ray.init
    _, alive = psutil.wait_procs(descendants, timeout=max(1.0, deadline - time.monotonic()))
    for process in alive:
        logger.warning("killing left-over process %d (%s)", process.pid, _name_of(process))
        _kill(process)
    psutil.wait_procs(alive, timeout=5.0)


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
