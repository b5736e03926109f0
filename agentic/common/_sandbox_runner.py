"""Helper process of `sandbox`: imports what programs commonly need once, then forks one child per call, one ahead.

Started as `python -I _sandbox_runner.py JSON` with `Start` as a JSON object; its socket carries one packet per call:
the `Call` as JSON and four descriptors (standard output, standard error, the program's text, the call's status
socket). On the status socket it answers `{"started": true}` when the program begins and `{"code": n}` at the end, or
`{"error": text}` when the call could not be set up; without `started` the code is not the program's. The caller ends a
call by shutting its side down. Standard library only.

Invariants: single-threaded; it never runs a program itself; it ends with its owner, and with it all calls; children
are reaped before their end is reported, and nothing that a call started is left by then.

With namespaces there are two processes per call: process 1 of a new pid namespace, whose end makes the kernel kill
everything the program started; and the program itself (process 1 ignores most signals, so the program must not be it),
stripped of all privileges. Without namespaces the program is the helper's child, and what it leaves behind becomes the
helper's child too (subreaper) and is killed.
"""

import atexit
import contextlib
import dataclasses
import errno
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

if __name__ == "__main__":  # -I keeps this folder off the path; appended, so that it cannot shadow anything
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import _sandbox_kernel as kernel

    sys.path.pop()
else:
    from agentic.common import _sandbox_kernel as kernel

SCRIPT = "script.py"
ISOLATED_FOLDER = "/tmp/sandbox-call"
COMMON_MODULES = """bisect collections copy dataclasses datetime decimal fractions functools heapq itertools json math
operator pkgutil random re statistics string textwrap threading time typing""".split()
Start = dict[str, Any]
"""`socket` (descriptor), `owner` (process id), `isolated`, `preload` (module names), `try_out` (a `Call`)."""
Call = dict[str, Any]
"""`folder`, `cpu_s`, `memory_bytes`, `file_bytes`, `folder_mb`, `processes`, `network`."""
PACKET, DESCRIPTORS = 65536, 4
SETUP_FAILED = 125
FORK_BOMB_ROUNDS = 1000


def main() -> None:
    start: Start = json.loads(sys.argv[1])
    control = socket.socket(fileno=int(start["socket"]))
    os.set_inheritable(control.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        helper = Helper(start)
    except (OSError, ImportError) as error:
        refusal = {"refused": str(error), "kind": type(error).__name__, "errno": getattr(error, "errno", None)}
        control.send(json.dumps(refusal).encode())
        return
    control.send(json.dumps({"nobody": helper.drop_root}).encode())
    try:
        helper.serve(control)
    finally:
        helper.end_all()


@dataclasses.dataclass
class Child:
    """A child that is set up and waits for its call on `channel`."""

    pid: int
    process: int
    """Descriptor of the process (pidfd), readable when it ended."""
    channel: socket.socket
    kind: tuple[bool, int]
    """Network and folder_mb: what must be known before the call."""


class Helper:
    """The calls in progress, by the descriptors that are polled for them, and one child in reserve."""

    def __init__(self, start: Start) -> None:
        self.isolated = bool(start["isolated"])
        self.owner = kernel.pidfd_open(start["owner"])
        self.me = kernel.pidfd_open(os.getpid())
        self.poller = select.poll()
        self.by_process: dict[int, tuple[int, socket.socket]] = {}
        self.by_status: dict[int, int] = {}
        self.reserve: Child | None = None
        self.last_kind = (False, 1)
        for name in COMMON_MODULES:
            importlib.import_module(name)
        as_root = os.getuid() == 0 and not self.isolated
        readable = as_root and kernel.readable_by_anyone(kernel.interpreter_paths())
        self.drop_root = readable and kernel.may_become_nobody()
        if self.isolated:
            kernel.confine(hidden_folders())
        else:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        for name in start["preload"]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # collections in children would copy the pages of everything imported so far
        if self.isolated:
            self._try_out(start["try_out"])

    def _try_out(self, call: Call) -> None:
        """One empty call, so that a kernel which refuses any step is known before the first real one."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = [os.open("/dev/null", os.O_RDWR) for _ in range(2)]
        self._launch(json.dumps(call).encode(), [*null, kernel.memory_file(), theirs.detach()])
        for process in list(self.by_process):
            select.select([process], [], [])
            self._finish(process)
        message: dict[str, Any] = {}
        while packet := mine.recv(PACKET):
            message = {**json.loads(packet), **message}  # an error of the set-up comes before the code
        mine.close()
        if message.get("code") != 0 or "error" in message:
            refusal = OSError(message.get("error", f"an empty program ended with {message.get('code')}"))
            killed = message.get("code") == 128 + signal.SIGKILL
            refusal.errno = message.get("errno", errno.ENOMEM if killed else None)
            raise refusal

    def serve(self, control: socket.socket) -> None:
        """Until the owner closes the socket or ends."""
        # Polled in this order: a descriptor closed by one event is never handed out again before the next poll.
        self.poller.register(control, select.POLLIN)
        self.poller.register(self.owner, select.POLLIN)
        while True:
            for descriptor, _ in self.poller.poll():
                if descriptor == self.owner:
                    return
                if descriptor == control.fileno():
                    packet, descriptors, _, _ = socket.recv_fds(control, PACKET, DESCRIPTORS)
                    if not packet:
                        return
                    self._launch(packet, descriptors)
                elif descriptor in self.by_process:
                    self._finish(descriptor)
                elif descriptor in self.by_status:
                    self._kill(descriptor)

    def _launch(self, packet: bytes, descriptors: list[int]) -> None:
        call: Call = json.loads(packet)
        status = socket.socket(fileno=os.dup(descriptors[-1]))
        child = None
        try:
            child = self._take((call["network"], call["folder_mb"]))
            socket.send_fds(child.channel, [packet], descriptors)
            child.channel.close()
        except OSError as error:
            if child is not None:
                discard(child)
            answer(status, error=str(error), errno=error.errno)
            status.close()
        else:
            self.by_process[child.process] = (child.pid, status)
            self.by_status[status.fileno()] = child.pid
            self.poller.register(child.process, select.POLLIN)
            self.poller.register(status, select.POLLIN)
        for descriptor in descriptors:
            os.close(descriptor)

    def _take(self, kind: tuple[bool, int]) -> Child:
        """The child in reserve if it is alive and of this kind, else a new one."""
        self.last_kind = kind
        child, self.reserve = self.reserve, None
        if child is not None:
            if child.kind == kind and not select.select([child.process], [], [], 0)[0]:
                return child
            discard(child)
        return self._fork(kind)

    def _fork(self, kind: tuple[bool, int]) -> Child:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine, theirs:
            pid = kernel.clone(call_namespaces(kind[0])) if self.isolated else os.fork()
            if pid == 0:
                try:
                    self._child(theirs.fileno(), kind)
                finally:
                    os._exit(SETUP_FAILED)
            return Child(pid, kernel.pidfd_open(pid), socket.socket(fileno=mine.detach()), kind)

    def _child(self, channel: int, kind: tuple[bool, int]) -> None:
        """All that happens in the child: set-up, waiting for the call, the program. Never returns."""
        failure: OSError | None = None
        try:
            channel = self._enter(channel, kind)
        except OSError as error:
            failure = error
        packet, descriptors, _, _ = socket.recv_fds(socket.socket(fileno=channel), PACKET, DESCRIPTORS)
        if not packet:
            os._exit(SETUP_FAILED)  # not needed any more
        *streams, program, status = descriptors
        try:
            if failure:
                raise failure
            self._prepare(json.loads(packet), streams, program)
        except OSError as error:
            answer(socket.socket(fileno=status), error=str(error), errno=error.errno)
            os._exit(SETUP_FAILED)
        answer(socket.socket(fileno=status), started=True)
        kernel.close_from(3)
        leave(execute())

    def _enter(self, channel: int, kind: tuple[bool, int]) -> int:
        """Isolation of this process: afterwards it has no privilege, and nothing open but `channel`, renumbered."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([self.me], [], [], 0)[0]:
            os._exit(SETUP_FAILED)  # the helper died before we could ask to die with it
        os.dup2(channel, 3)
        kernel.close_from(4)
        if self.isolated:
            kernel.enter_call_root(kind[1])
            os.mkdir(ISOLATED_FOLDER, 0o700)
            become_child()
            os.setsid()
            kernel.give_up_everything()
        else:
            os.setsid()
            if self.drop_root:
                kernel.become_nobody()
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user cleared it
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        with contextlib.suppress(OSError):
            kernel.write("/proc/self/oom_score_adj", "1000")
        return 3

    def _prepare(self, call: Call, streams: list[int], program: int) -> None:
        source = read_all(program)
        for target, descriptor in enumerate((os.open("/dev/null", os.O_RDONLY), *streams)):
            os.dup2(descriptor, target)
        prepare_folder(call["folder"], source)
        apply_limits(call, 0 if self.isolated else threads_of_user())

    def _kill(self, status: int) -> None:
        """The caller has no more interest; the end of the process is noticed as always."""
        self.poller.unregister(status)
        os.kill(self.by_status[status], signal.SIGKILL)

    def _finish(self, process: int) -> None:
        pid, status = self.by_process.pop(process)
        self.poller.unregister(process)
        os.close(process)
        if not self.isolated:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # not reaped yet, so the number is still this call's
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not self.isolated:
            self._kill_orphans()
        with contextlib.suppress(KeyError):  # not polled any more when the caller ended the call
            self.poller.unregister(status)
        del self.by_status[status.fileno()]
        answer(status, code=code if code >= 0 else 128 - code)
        status.close()
        if self.isolated and self.reserve is None:
            with contextlib.suppress(OSError):  # the next call will meet and report it
                self.reserve = self._fork(self.last_kind)

    def _kill_orphans(self) -> None:
        """End what left its group: it is our child by now, or will be when its own parent is killed."""
        for _ in range(FORK_BOMB_ROUNDS):
            running = {pid for pid, _ in self.by_process.values()}
            orphans = [pid for pid in children_of(os.getpid()) if pid not in running]
            if not orphans:
                return
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                os.waitpid(pid, 0)

    def end_all(self) -> None:
        for process, (pid, _) in list(self.by_process.items()):
            os.kill(pid, signal.SIGKILL)
            self._finish(process)


def discard(child: Child) -> None:
    """End and reap a child that gets no call."""
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.process)
    child.channel.close()


def hidden_folders() -> list[str]:
    """The user's home and the project, should they lie inside a directory that programs may see."""
    project = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    installed = os.path.basename(project) in ("site-packages", "dist-packages")
    return [os.path.expanduser("~")] + ([] if installed else [project])


def call_namespaces(network: bool) -> int:
    own = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
    return own if network else own | kernel.CLONE_NEWNET


def answer(status: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the caller may be gone
        status.send(json.dumps(message).encode())


def become_child() -> None:
    """Fork; only the child returns. The parent reaps whatever ends and leaves with the child's exit code."""
    child = os.fork()
    if child == 0:
        return
    kernel.close_from(0)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def children_of(parent: int) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit():
                with open(f"/proc/{entry.name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                        yield int(entry.name)


def threads_of_user() -> int:
    """The process limit counts all threads of the user outside a user namespace."""
    count, me = 0, os.getuid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and entry.stat().st_uid == me:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def prepare_folder(folder: str, source: bytes) -> None:
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    with open(SCRIPT, "wb") as file:
        file.write(source)


def limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (ceiling, ceiling))


def apply_limits(call: Call, others: int) -> None:
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, call["cpu_s"])
    limit(resource.RLIMIT_AS, call["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, call["file_bytes"])
    limit(resource.RLIMIT_NPROC, others + call["processes"])


def execute() -> int:
    """Run the program as the interpreter would; its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # `random` does this by itself after a fork
    sys.argv = [SCRIPT]
    try:
        runpy.run_path(SCRIPT, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
    except BaseException as error:  # the outermost frame of a foreign program: nothing may pass
        show_error(type(error), error, error.__traceback__)
    else:
        return 0
    return 1


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Traceback from the program's own frames on, as if it had been started directly."""
    while trace is not None and trace.tb_frame.f_code.co_filename != SCRIPT:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.excepthook(kind, error, trace)


def leave(code: int) -> None:
    """End as the interpreter would (threads, exit functions, buffers), without tearing all modules down."""
    sys.modules["threading"]._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the program
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
