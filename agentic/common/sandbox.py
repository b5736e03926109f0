"""Runs Python code written by a model in a child process that cannot harm or outlive the caller.

Input: source text (untrusted, any length: it travels as a file) and `SandboxLimits`.
Invariants: fresh temporary folder as working directory, removed afterwards; environment without anything of the
parent's; both output streams read while it runs, with a hard cap; on time-out, cancellation, reached cap and normal
end alike the whole process group is killed and the child reaped before the call returns. Where the kernel allows it,
user, pid and network namespaces are used as well (see `_sandbox_runner`); elsewhere one warning is logged and
processes that left the group are found by a marker in their environment.
Left out: rewriting of the code (an `exit()` in a child is harmless), a file-system namespace, the choice of packages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary

from agentic.common._sandbox_runner import SCRIPT, SETTINGS, SETUP_FAILED, SETUP_MESSAGE
from agentic.common.errors import ConfigError, InfrastructureError

logger = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("_sandbox_runner.py")
MARKER = "SANDBOX_CALL"
CHUNK = 65536
DRAIN_S = 1.0
MIB = 1024 * 1024


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one call. The process limit does not bind root (Linux exempts it)."""

    timeout_s: float = 10.0
    """Wall clock, from process start."""
    cpu_s: int = 10
    """Processor seconds of one process."""
    memory_mb: int = 1024
    """Address space of one process, MiB."""
    file_mb: int = 16
    """Size of one written file, MiB."""
    processes: int = 64
    """Processes and threads of the call together."""
    output_bytes: int = 65536
    """Kept of each stream; a stream that exceeds it ends the call."""
    max_concurrency: int = os.cpu_count() or 1
    """Calls at the same time in one event loop; waiting is not part of `timeout_s`."""
    network: bool | None = None
    """None: no network where the kernel allows; False: no network, or ConfigError; True: the host's network."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "cpu_s", "memory_mb", "file_mb", "processes", "output_bytes", "max_concurrency"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"sandbox limit {name} is {getattr(self, name)!r}, must be above 0")


@dataclass(frozen=True)
class SandboxResult:
    """What the code did. `exit_code` is 128 + signal when a signal ended it (137: killed)."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    truncated: bool
    """A stream reached `output_bytes` and the call was ended."""
    seconds: float
    isolated: bool
    """Ran in namespaces of its own."""


@dataclass
class _Stream:
    """Collects one pipe up to a cap; `closed` is set at its end, `full` when the cap is exceeded."""

    pipe: IO[bytes]
    cap: int
    closed: asyncio.Event
    full: asyncio.Event

    def __post_init__(self) -> None:
        self.data = bytearray()
        os.set_blocking(self.pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self.pipe.fileno(), CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._stop()
            return
        room = self.cap - len(self.data)
        self.data += chunk[:room]
        if len(chunk) > room:
            self.full.set()

    def _stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        self.closed.set()

    def close(self) -> str:
        if not self.closed.is_set():
            self._stop()
        self.pipe.close()
        return self.data.decode("utf-8", errors="replace")


_SEMAPHORES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


async def run_python(code: str, limits: SandboxLimits | None = None) -> SandboxResult:
    """Run `code` as a script in the sandbox; time-outs, crashes and endless output are results, not exceptions.

    Raises ConfigError when `network=False` cannot be kept, InfrastructureError when no child could be set up.
    """
    limits = limits or SandboxLimits()
    isolated = namespaces_available()
    if limits.network is False and not isolated:
        raise ConfigError("sandbox network=False: this kernel refuses namespaces; allow them or set network to null")
    per_loop = _SEMAPHORES.setdefault(asyncio.get_running_loop(), {})
    async with per_loop.setdefault(limits.max_concurrency, asyncio.Semaphore(limits.max_concurrency)):
        folder = tempfile.mkdtemp(prefix="sandbox-")
        try:
            Path(folder, SCRIPT).write_bytes(code.encode("utf-8", errors="replace"))
            return await _run(folder, limits, isolated)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@lru_cache(maxsize=1)
def namespaces_available() -> bool:
    """Whether this kernel lets us have user, pid and network namespaces; tried once, warned about once."""
    command = _command(namespaces=1, probe=1)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    if done.returncode != 0:
        logger.warning("sandbox without namespaces (the kernel refuses them): code of the model has network access")
    return done.returncode == 0


async def _run(folder: str, limits: SandboxLimits, isolated: bool) -> SandboxResult:
    start = time.perf_counter()
    marker = secrets.token_hex(8)
    process = _spawn(folder, limits, isolated, marker)
    assert process.stdout is not None and process.stderr is not None
    full = asyncio.Event()
    streams = [_Stream(pipe, limits.output_bytes, asyncio.Event(), full) for pipe in (process.stdout, process.stderr)]
    ended = False
    try:
        ended = await _ended(process.pid, full, limits.timeout_s)
    finally:
        try:
            await _end(process, streams, None if isolated else marker)
        finally:
            stdout, stderr = (stream.close() for stream in streams)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if code == SETUP_FAILED and SETUP_MESSAGE in stderr:
        raise InfrastructureError("sandbox_failed", stderr.strip())
    timed_out = not ended and not full.is_set()
    return SandboxResult(stdout, stderr, code, timed_out, full.is_set(), time.perf_counter() - start, isolated)


def _command(**settings: int) -> list[str]:
    return [sys.executable, "-I", str(RUNNER), *(str(settings.get(name, 0)) for name in SETTINGS)]


def _spawn(folder: str, limits: SandboxLimits, isolated: bool, marker: str) -> subprocess.Popen[bytes]:
    command = _command(
        cpu_s=math.ceil(limits.cpu_s),
        memory_bytes=limits.memory_mb * MIB,
        file_bytes=limits.file_mb * MIB,
        processes=limits.processes,
        namespaces=int(isolated),
        network=int(bool(limits.network)),
    )
    try:
        # No preexec_fn: it would make subprocess fork this large process instead of vfork.
        return subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(folder, marker),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise InfrastructureError("sandbox_failed", str(error)) from error


def _environment(folder: str, marker: str) -> dict[str, str]:
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    places = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder}
    return {**places, **one_thread, "LANG": "C.UTF-8", "MPLBACKEND": "Agg", MARKER: marker}


async def _ended(pid: int, full: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the end of `pid` (without reaping it) or of the output's room; False on time-out or full output."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, exited.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (exited, full)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return exited.is_set()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        for wait in waits:
            wait.cancel()


async def _end(process: subprocess.Popen[bytes], streams: list[_Stream], marker: str | None) -> None:
    """Kill the group, read what is left in the pipes, reap. The child is not reaped before, so its id is still ours."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if marker is not None:
        _kill_marked(marker)
    # The pipes close when the last process of the call is gone; a bounded wait, in case one cannot be killed.
    closed = asyncio.gather(*(stream.closed.wait() for stream in streams))
    try:
        await asyncio.wait_for(closed, DRAIN_S)
    except asyncio.TimeoutError:
        logger.warning("sandbox: a process still holds an output pipe of call %d", process.pid)


def _kill_marked(marker: str) -> None:
    """Kill processes that carry this call's marker, whatever group they moved to."""
    needle = f"{MARKER}={marker}".encode()
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and needle in Path("/proc", entry.name, "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # ended meanwhile, or not ours
