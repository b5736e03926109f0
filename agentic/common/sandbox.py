"""Runs Python code written by a model in a child process that cannot harm or outlive the caller.

Input: source text (untrusted, any length) and `SandboxLimits`.
Invariants: fresh temporary folder as working directory, gone afterwards; environment without anything of the
parent's; both output streams read while it runs, with a hard cap; on time-out, cancellation, reached cap and normal
end alike everything the call started is killed and reaped before the call returns. What befalls a call before its
program begins, or the helper, is an InfrastructureError and never a result; a helper that hangs is replaced.
A helper process, started with the first call, forks one child per call, so that no interpreter has to start (about
5 ms in place of 15 to 40). Where the kernel allows it the child has user, pid, network, ipc and mount namespaces: it sees
system libraries and the interpreter's own directories, read-only, and an empty `/tmp`; it is `nobody`, without
capabilities. Elsewhere one warning is logged: a process group, limits and, started by root, user `nobody` remain.
Left out: rewriting of the code (an `exit()` in a child is harmless), limits of memory over all processes of a call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from agentic.common._sandbox_helper import Helper, Refused, get_helper, running_helper
from agentic.common._sandbox_kernel import NOBODY, memory_file
from agentic.common._sandbox_runner import ISOLATED_FOLDER
from agentic.common.errors import ConfigError, InfrastructureError

logger = logging.getLogger(__name__)

CHUNK = 65536
DRAIN_S = 1.0
# How long a working helper may need on a crowded machine; afterwards it counts as hung.
BEGIN_S = 30.0
KILL_S = 30.0
BUSY_S = 0.005
STARTS = 3
MIB = 1024 * 1024


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one call. The process limit does not bind root where the helper can neither isolate nor change user."""

    timeout_s: float = 10.0
    """Wall clock, from the moment the program begins."""
    cpu_s: int = 10
    """Processor seconds of one process."""
    memory_mb: int = 1024
    """Address space of one process, MiB."""
    file_mb: int = 16
    """Size of one written file, MiB."""
    folder_mb: int = 64
    """All files of the call together, MiB (held in memory; only with namespaces)."""
    processes: int = 64
    """Processes and threads of the call together."""
    output_bytes: int = 65536
    """Kept of each stream; a stream that exceeds it ends the call."""
    max_concurrency: int = os.cpu_count() or 1
    """Calls at the same time in one event loop; waiting is not part of `timeout_s`."""
    network: bool | None = None
    """None: no network where the kernel allows; False: no network, or ConfigError; True: the host's network."""
    preload: tuple[str, ...] = ()
    """Modules that the helper imports once for all calls, e.g. `numpy`, `sympy`."""

    def __post_init__(self) -> None:
        positive = "timeout_s cpu_s memory_mb file_mb folder_mb processes output_bytes max_concurrency"
        for name in positive.split():
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

    pipe: int
    cap: int
    full: asyncio.Event
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    data: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        os.set_blocking(self.pipe, False)
        asyncio.get_running_loop().add_reader(self.pipe, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self.pipe, CHUNK)
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
        asyncio.get_running_loop().remove_reader(self.pipe)
        self.closed.set()

    def close(self) -> str:
        if not self.closed.is_set():
            self._stop()
        os.close(self.pipe)
        return self.data.decode("utf-8", errors="replace")


@dataclass
class _Status:
    """Our end of a call's status socket: what the helper says of it, and the means to end the call."""

    end: socket.socket
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    message: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end.setblocking(False)
        asyncio.get_running_loop().add_reader(self.end, self._read)

    def _read(self) -> None:
        try:
            packet = self.end.recv(CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:  # the helper died with the call's packet unread
            packet = b""
        if packet:
            self.message = {**json.loads(packet), **self.message}  # an error of the set-up comes before the code
            if "started" in self.message:
                self.begun.set()
        else:
            asyncio.get_running_loop().remove_reader(self.end)
            self.closed.set()

    async def ended(self, full: asyncio.Event, timeout_s: float) -> bool:
        """Wait for the end of the call or of the output's room; False on time-out or full output."""
        await _any_of(BEGIN_S, self.begun, self.closed)
        if self.begun.is_set():
            await _any_of(timeout_s, self.closed, full)
        return self.closed.is_set()

    async def kill(self) -> bool:
        """End the call and wait until the helper has reaped it; False when it does not."""
        if not self.closed.is_set():
            self.end.shutdown(socket.SHUT_WR)
            await _wait(self.closed, KILL_S, "the helper does not end a call")
        return self.closed.is_set()

    def close(self) -> None:
        if not self.closed.is_set():
            asyncio.get_running_loop().remove_reader(self.end)
        self.end.close()


_SEMAPHORES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


async def run_python(code: str, limits: SandboxLimits | None = None) -> SandboxResult:
    """Run `code` as a script in the sandbox; time-outs, crashes and endless output are results, not exceptions.

    Raises ConfigError when `network=False` cannot be kept or a module cannot be preloaded, InfrastructureError when
    no child could be set up or the helper was killed.
    """
    limits = limits or SandboxLimits()
    per_loop = _SEMAPHORES.setdefault(asyncio.get_running_loop(), {})
    async with per_loop.setdefault(limits.max_concurrency, asyncio.Semaphore(limits.max_concurrency)):
        isolated = await asyncio.to_thread(namespaces_available) if not _KNOWN else namespaces_available()
        if limits.network is False and not isolated:
            raise ConfigError("sandbox network=False: this kernel refuses namespaces; allow them or set it to null")
        try:
            return await _run_in_folder(code.encode("utf-8", errors="replace"), limits, isolated)
        except OSError as error:  # ours: no descriptors, no room for the folder
            raise InfrastructureError("sandbox_failed", str(error)) from error


async def _run_in_folder(source: bytes, limits: SandboxLimits, isolated: bool) -> SandboxResult:
    if isolated:
        return await _run(source, limits, True, ISOLATED_FOLDER)
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        return await _run(source, limits, False, folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


_KNOWN: list[bool] = []


def namespaces_available() -> bool:
    """Whether this kernel lets us isolate; tried once per process (40 ms), warned about once."""
    if not _KNOWN:
        try:
            get_helper(isolated=True)
        except Refused as refusal:
            logger.warning(
                "sandbox without namespaces (%s): code of the model has network access and sees the host's files",
                refusal,
            )
            _KNOWN.append(False)
        else:
            _KNOWN.append(True)
    return _KNOWN[0]


async def _run(source: bytes, limits: SandboxLimits, isolated: bool, folder: str) -> SandboxResult:
    for _ in range(STARTS):
        helper = running_helper(isolated, limits.preload)
        if helper is None:
            helper = await asyncio.to_thread(get_helper, isolated, limits.preload)
        if helper.nobody:
            os.chown(folder, NOBODY, NOBODY)
        try:
            return await _call(helper, source, limits, isolated, folder)
        except ConnectionError:  # it died before it took the call; its end is awaited, so that it counts as dead
            await asyncio.to_thread(helper.stop)
    raise InfrastructureError("sandbox_failed", "the helper process keeps dying")


async def _call(helper: Helper, source: bytes, limits: SandboxLimits, isolated: bool, folder: str) -> SandboxResult:
    """One call. Raises ConnectionError when the helper could not be given the call."""
    start = time.perf_counter()
    full = asyncio.Event()
    with ExitStack() as ours:
        pipes, status_end = await _hand_over(helper, source, _settings(limits, folder), ours)
        streams = [_Stream(pipe, limits.output_bytes, full) for pipe in pipes]
        status = _Status(status_end)
        ours.pop_all()  # from here on closed by the objects that watch them
        ended = False
        try:
            ended = await status.ended(full, limits.timeout_s)
        finally:
            try:
                if not await status.kill():
                    await asyncio.to_thread(helper.stop, 0)  # the next call starts another
                # The pipes close when the last process is gone; a bounded wait, in case one cannot be killed.
                for stream in streams:
                    await _wait(stream.closed, DRAIN_S, "a process still holds an output pipe")
            finally:
                status.close()
                stdout, stderr = (stream.close() for stream in streams)
    if not {"started", "code"} <= set(status.message) or "error" in status.message:
        problem = "the helper was killed" if status.begun.is_set() else "the program was not started"
        raise InfrastructureError("sandbox_failed", status.message.get("error", problem))
    timed_out = not ended and not full.is_set()
    seconds = time.perf_counter() - start
    return SandboxResult(stdout, stderr, status.message["code"], timed_out, full.is_set(), seconds, isolated)


async def _hand_over(
    helper: Helper, source: bytes, call: dict[str, Any], ours: ExitStack
) -> tuple[list[int], socket.socket]:
    """Send one call to the helper: the read ends of its output and our end of its status socket."""
    with ExitStack() as theirs:
        pipes = []
        writers = []
        for _ in range(2):
            reader, writer = os.pipe()
            ours.callback(os.close, reader)
            theirs.callback(os.close, writer)
            pipes.append(reader)
            writers.append(writer)
        program = memory_file()
        theirs.callback(os.close, program)
        _write_all(program, source)
        mine, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(mine)
        theirs.enter_context(remote)
        deadline = time.monotonic() + BEGIN_S
        while True:
            try:
                helper.send(call, [*writers, program, remote.fileno()])
                return pipes, mine
            except BlockingIOError:
                if time.monotonic() > deadline:
                    await asyncio.to_thread(helper.stop, 0)  # the next call starts another
                    raise
                await asyncio.sleep(BUSY_S)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _settings(limits: SandboxLimits, folder: str) -> dict[str, Any]:
    return {
        "folder": folder,
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_bytes": limits.memory_mb * MIB,
        "file_bytes": limits.file_mb * MIB,
        "folder_mb": limits.folder_mb,
        "processes": limits.processes,
        "network": bool(limits.network),
    }


async def _any_of(timeout_s: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set, or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _wait(event: asyncio.Event, timeout_s: float, complaint: str) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        logger.warning("sandbox: %s after %g s", complaint, timeout_s)
