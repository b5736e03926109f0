"""Child side of `sandbox`: isolates and limits itself, then runs `script.py` of the current folder.

Started as `python -I _sandbox_runner.py N ...` with the whole numbers of `SETTINGS`, in that order. Standard library
only, and no module that is slow to import (json, signal): every import is paid on each call.
Exit codes: the script's own, 128 + signal when a signal ended it, SETUP_FAILED when isolation could not be set up.

With namespaces there are three processes: this one, which the parent watches; process 1 of a new pid namespace, whose
end makes the kernel kill everything the script started, even what left the process group; and the script itself
(process 1 ignores most signals, so the script must not be it). A new user namespace also keeps the script from
reading /proc/<pid>/environ of the user's other processes.
Left out: a file-system namespace; what the user may read, the script may read.
"""

import ctypes
import os
import resource
import runpy
import sys
from types import TracebackType

SETTINGS = ("cpu_s", "memory_bytes", "file_bytes", "processes", "namespaces", "network", "probe")
SETUP_FAILED = 125
SETUP_MESSAGE = "the kernel refused a namespace"
SCRIPT = "script.py"
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 38, 9
LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(network: bool) -> bool:
    """Enter new user and pid namespaces, and a network namespace without interfaces unless `network`."""
    return LIBC.unshare(CLONE_NEWUSER | CLONE_NEWPID | (0 if network else CLONE_NEWNET)) == 0


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def become_child() -> None:
    """Fork; only the child returns. The parent reaps whatever ends and leaves with the child's exit code."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def threads_of_user() -> int:
    """The process limit counts all threads of the user outside a user namespace."""
    count, me = 0, os.getuid()
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == me:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue  # it ended meanwhile
    return count


def limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (ceiling, ceiling))


def apply_limits(settings: dict[str, int]) -> None:
    others = 0 if settings["namespaces"] else threads_of_user()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, settings["cpu_s"])
    limit(resource.RLIMIT_AS, settings["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, settings["file_bytes"])
    limit(resource.RLIMIT_NPROC, others + settings["processes"])
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def show_error(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """Traceback from the script's own frames on, as if it had been started directly."""
    while trace is not None and trace.tb_frame.f_code.co_filename != SCRIPT:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.__excepthook__(kind, error, trace)


def main() -> None:
    settings = dict(zip(SETTINGS, map(int, sys.argv[1:]), strict=True))
    die_with_parent()
    if settings["namespaces"]:
        if not unshare(bool(settings["network"])):
            sys.stderr.write(SETUP_MESSAGE + "\n")
            sys.stderr.flush()
            os._exit(SETUP_FAILED)
        become_child()
        become_child()
    if settings["probe"]:
        return
    apply_limits(settings)
    sys.excepthook = show_error
    sys.argv = [SCRIPT]
    runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    main()
