"""Runs a program that must not outlive its parent: `python -I _tether.py PROGRAM ARG ...` (Linux).

The kernel sends the program SIGTERM when the process that started it ends, however it ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent ended before the program was started")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
