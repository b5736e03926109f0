"""Owner's side of the sandbox's helper process: one per process, isolation mode and set of preloaded modules.

Invariants: started lazily, under a lock (several event loops may share it); never inherited by a fork; replaced when it
died; ended and reaped when this process ends. Its environment holds nothing of ours.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import signal
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
# Not the kernel's word on namespaces but want of something: it must not switch the isolation off for good.
PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
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
        try:
            socket.send_fds(self.control, [json.dumps(call).encode()], descriptors, socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno == errno.EBADF:  # another call has found it dead and closed the connection
                raise ConnectionResetError("the helper was stopped") from error
            raise

    def stop(self, grace_s: float = END_S) -> None:
        """Close the connection, which ends the helper and its calls, and reap it; kill it if it takes longer."""
        self.control.close()
        try:
            self.process.wait(grace_s)
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
    InfrastructureError when no process can be started, or there is not enough of something at present.
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
        answer = _first_answer(helper, isolated)
    except BaseException:
        helper.stop()
        raise
    helper.nobody = bool(answer["nobody"])
    return helper


def _first_answer(helper: Helper, isolated: bool) -> dict[str, Any]:
    helper.control.settimeout(START_S)
    try:
        packet = helper.control.recv(65536)
    except OSError as error:
        raise InfrastructureError("sandbox_failed", f"the helper did not start: {error}") from error
    helper.control.setblocking(False)
    answer: dict[str, Any] = json.loads(packet) if packet else _silent_end(helper)
    if "refused" not in answer:
        return answer
    if answer["kind"] in ("ImportError", "ModuleNotFoundError"):
        raise ConfigError(f"sandbox preload: {answer['refused']}; install the module or take it off the list")
    if not isolated or answer["errno"] in PASSING:
        raise InfrastructureError("sandbox_failed", f"the helper cannot start: {answer['refused']}")
    raise Refused(answer["refused"])


def _silent_end(helper: Helper) -> dict[str, Any]:
    """What to make of a helper that ended without a word: only a filter on system calls is the kernel's refusal."""
    helper.stop()
    code = helper.process.returncode
    number = errno.EPERM if code == -signal.SIGSYS else errno.EAGAIN
    return {"refused": f"the helper ended at once with code {code}", "kind": "", "errno": number}


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
