"""Runs one command and sees to it that nothing of it outlives its owner. Started as a script, never imported.

Usage: python -I -S child_guard.py OWNER_PID GRACE_SECONDS COMMAND [ARGUMENT ...]

The guard forks COMMAND into a process group of its own and then only waits. It ends the command and every process that
came of it when
  * the owner is gone, also by SIGKILL: the guard polls its parent id (all are killed at once);
  * the guard gets SIGTERM or SIGINT: the command gets SIGTERM and GRACE_SECONDS to leave, then what is left is killed;
  * the command ends by itself: what it left behind is killed.
It exits with the command's status (128 + n after signal n), after every descendant has been reaped.

Why a parent id and not PR_SET_PDEATHSIG in the owner's child: that signal comes when the *thread* that forked ends, and
owners start servers from short-lived threads. Here it guards the other side only: the guard has one thread, so the
command is killed if the guard itself is killed. PR_SET_CHILD_SUBREAPER makes orphaned descendants the guard's children,
wherever they moved (own group or session), so that "all of them" is exact and no zombie is left to somebody else.

Leaves out: logs (the owner redirects them), restarts, and every system but Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1

_stop_asked = False


def _ask_stop(_number: int, _frame: FrameType | None) -> None:
    global _stop_asked
    _stop_asked = True


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _spawn(command: list[str]) -> int:
    """Forks the command into its own group, to be killed if this guard is. Returns its pid."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _reap(main: int, status: int | None) -> tuple[bool, int | None]:
    """Collects ended children without blocking. Returns (children left?, wait status of the main one if it ended)."""
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, status
        if pid == 0:
            return True, status
        status = ended if pid == main else status


def _signal_all(main: int) -> None:
    """SIGKILL to the command's group and to every direct child (orphans elsewhere become children of this process)."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as listing:
            children = [int(pid) for pid in listing.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN: the group is all we can name
        children = []
    for send, target in [(os.killpg, main), *((os.kill, pid) for pid in children)]:
        try:
            send(target, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end_all(main: int, status: int | None) -> int | None:
    """Kills and reaps until no descendant is left; each round brings the next generation of orphans."""
    left, status = _reap(main, status)
    while left:
        _signal_all(main)
        time.sleep(0.02)
        left, status = _reap(main, status)
    return status


def _watch(main: int, owner: int, grace_s: float) -> int | None:
    """Waits for the first reason to end. Returns the command's wait status if it has ended by itself."""
    deadline = None
    while True:
        _, status = _reap(main, None)
        if status is not None or os.getppid() != owner:
            return status
        if _stop_asked and deadline is None:
            deadline = time.monotonic() + grace_s
            os.kill(main, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)


def main(argv: list[str]) -> int:
    owner, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = _spawn(command)
    # After the fork: the command starts with default handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ask_stop)
    status = _end_all(child, _watch(child, owner, grace_s))
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
