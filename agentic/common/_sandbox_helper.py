"""Owner's side of the sandbox's helper process: one per process, isolation mode and set of preloaded modules.

Invariants: started lazily, under a lock (several event loops may share it); never inherited by a fork; replaced when it
died; ended and reaped when this process ends. Its environment holds nothing of ours.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic.common._sandbox_runner import ISOLATED_FOLDER
from agentic.common.errors import ConfigError, InfrastructureError

logger = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("_sandbox_runner.py")
START_S = 60.0
END_S = 5.0
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MPLBACKEND": "Agg",
    **{name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")},
}
TRY_OUT = {"folder": ISOLATED_FOLDER, "folder_mb": 64, "network": False, "cpu_s": 10, "processes": 16}
TRY_OUT |= {"memory_bytes": 1 << 30, "file_bytes": 1 << 20}


class Refused(Exception):
    """The kernel refuses a part of the isolation."""


@dataclass
class Helper:
    """A running helper; `nobody` tells that its children run as user `nobody` (without namespaces)."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    nobody: bool

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, call: dict[str, Any], descriptors: list[int]) -> None:
        """Hand over one call. Raises BlockingIOError when the helper is behind, ConnectionError when it is gone."""
        socket.send_fds(self.control, [json.dumps(call).encode()], descriptors, socket.MSG_DONTWAIT)

    def stop(self) -> None:
        """Close the connection, which ends the helper and its calls, and reap it."""
        self.control.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_HELPERS: dict[tuple[bool, tuple[str, ...]], Helper] = {}
_LOCK = threading.Lock()


def running_helper(isolated: bool, preload: tuple[str, ...]) -> Helper | None:
    helper = _HELPERS.get((isolated, preload))
    return helper if helper is not None and helper.alive else None


def get_helper(isolated: bool, preload: tuple[str, ...] = ()) -> Helper:
    """The running helper of this kind; started (40 ms, more with large modules) when there is none.

    Raises Refused when the kernel refuses isolation, ConfigError when a module to preload cannot be imported,
    InfrastructureError when no process can be started.
    """
    with _LOCK:
        helper = _HELPERS.get((isolated, preload))
        if helper is not None:
            if helper.alive:
                return helper
            logger.warning("sandbox helper ended with code %s; starting another", helper.process.returncode)
            helper.stop()
        _HELPERS[isolated, preload] = helper = _start(isolated, preload)
        return helper


def _start(isolated: bool, preload: tuple[str, ...]) -> Helper:
    control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = {"owner": os.getpid(), "socket": remote.fileno(), "isolated": isolated, "preload": preload}
    start["try_out"] = TRY_OUT
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", str(RUNNER), json.dumps(start)],
            cwd="/",
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(remote.fileno(),),
            start_new_session=True,  # an interrupt from the terminal is for the owner
        )
    except OSError as error:
        control.close()
        raise InfrastructureError("sandbox_failed", str(error)) from error
    finally:
        remote.close()
    helper = Helper(process, control, False)
    try:
        answer = _first_answer(helper)
    except BaseException:
        helper.stop()
        raise
    helper.nobody = bool(answer["nobody"])
    return helper


def _first_answer(helper: Helper) -> dict[str, Any]:
    helper.control.settimeout(START_S)
    try:
        packet = helper.control.recv(65536)
    except OSError as error:
        raise InfrastructureError("sandbox_failed", f"the helper did not start: {error}") from error
    helper.control.setblocking(False)
    answer: dict[str, Any] = json.loads(packet or '{"refused": "the helper ended at once", "kind": ""}')
    if "refused" not in answer:
        return answer
    if answer["kind"] in ("ImportError", "ModuleNotFoundError"):
        raise ConfigError(f"sandbox preload: {answer['refused']}; install the module or take it off the list")
    raise Refused(answer["refused"])


@atexit.register
def stop_helpers() -> None:
    """End all helpers of this process."""
    while _HELPERS:
        _HELPERS.popitem()[1].stop()


def _forget() -> None:
    """After a fork: the helpers are the parent's."""
    global _LOCK
    _LOCK = threading.Lock()
    _HELPERS.clear()


os.register_at_fork(after_in_child=_forget)
