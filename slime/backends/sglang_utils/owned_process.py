"""One child process with a log: started under `child_guard`, watched, and ended with all its descendants.

Invariants: whatever way the owner ends, SIGKILL included, nothing of the child is left (child_guard.py says how);
`stop()` may be called any number of times, from any thread, and leaves no zombie. `start()` may be called from a
short-lived thread. Only this process's own children are signalled, by id.

Leaves out: what the child is and when it is ready (server.py, router.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.errors import ServerStartError

logger = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("child_guard.py")
LOG_TAIL_LINES = 30
# An engine holds nothing that must be saved, and SGLang looks at SIGTERM only every few seconds.
STOP_GRACE_S = 3.0


def base_url(host: str, port: int) -> str:
    """`http://host:port`, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host.strip("[]") else f"http://{host}:{port}"


def check_port_free(host: str, port: int) -> None:
    """Raises ValueError naming the port when something already listens on it."""
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port that is only in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ValueError(
                f"port {port} on {host} cannot be used ({error.strerror}): choose another port or end what uses it"
            ) from error


def option_flags(options: Mapping[str, Any], forced: Sequence[str] = ()) -> list[str]:
    """Command-line flags of an option mapping: `{"max-total-tokens": 4, "sleep_on_idle": True}` to four words or so.

    Names may be written with dashes or underscores. True is a bare switch; None and False are left out; a list gives
    one flag with several words. Raises ValueError for a name in `forced` (set by the caller) or given twice.
    """
    flags: list[str] = []
    seen: set[str] = set()
    for key, value in options.items():
        name = key.lstrip("-").replace("_", "-")
        if name in forced:
            raise ValueError(f"option {key!r} is set by the launcher itself: remove it")
        if name in seen:
            raise ValueError(f"option {key!r} is given twice (dashes and underscores mean the same)")
        seen.add(name)
        if value is None or value is False:
            continue
        words = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        flags += [f"--{name}", *map(str, words)]
    return flags


def session_members(session: int) -> list[int]:
    """Pids of the living (not zombie) processes of a session; empty when it has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


class OwnedProcess:
    """A command that runs in its own session, behind a guard, until `stop()` or the end of this process.

    Args:
        name: for messages.
        command: argument vector.
        log_path: stdout and stderr are appended here; folders are made.
        env: the complete environment of the child; None inherits ours.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.command, self.log_path, self.env = name, list(command), Path(log_path), env
        self._guard: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, grace_s: float = STOP_GRACE_S) -> None:
        """Starts the command. `grace_s`: seconds between SIGTERM and SIGKILL at the end."""
        if self._guard is not None:
            raise RuntimeError(f"{self.name} is already started")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(grace_s)]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                [*guard, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit status, or None while it runs (or before it was started)."""
        return None if self._guard is None else self._guard.poll()

    @property
    def session(self) -> int | None:
        """Session id shared by the guard and all processes of the command; None when not running."""
        return None if self._guard is None else self._guard.pid

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines written since the last start."""
        with self.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, log.tell() - 64 * 1024))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float, interval_s: float = 0.25) -> None:
        """Polls `is_ready` until it is true.

        Raises ServerStartError with the log's tail when the process ends or the deadline passes; the process is
        stopped in both cases.
        """
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            status = self.poll()
            if status is not None:
                self._fail(f"ended with status {status} before it was ready")
            if time.monotonic() > deadline:
                self._fail(f"was not ready after {timeout_s:g} s")
            time.sleep(interval_s)

    def _fail(self, reason: str) -> None:
        tail = self.log_tail()
        self.stop()
        raise ServerStartError(self.name, reason, self.log_path, tail)

    def stop(self, timeout_s: float = STOP_GRACE_S + 10) -> None:
        """Ends the command and all its descendants and reaps them; does nothing when there is nothing to end."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        guard.terminate()
        try:
            guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end within %g s: killing it", self.name, timeout_s)
            guard.kill()
            guard.wait()
        for pid in session_members(guard.pid):  # only when the guard itself was killed
            with contextlib.suppress(ProcessLookupError):  # it ended while we looked
                os.kill(pid, signal.SIGKILL)
