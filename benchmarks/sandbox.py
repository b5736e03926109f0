"""Latency of one warm sandbox call, and a mix of hostile programs: `python benchmarks/sandbox.py [--calls N] [--mix N]`.

Prints one JSON line: `ours` is the median of a call that prints one word (ms), `anchor` a cold `python -I -c pass`,
`limit` a bare fork of this process, all measured in turns in the same run, so that load hits them alike; `spread` is
the 5th and 95th percentile of ours. With `--mix N` the line has `mix`: how many of N hostile calls of each kind were
contained, the delay of kills beyond the time limit, and what was left behind (processes, zombies, temporary files).
Left out: programs with imports of their own (the `preload` limit moves those into the helper).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentic.common._sandbox_helper import stop_helpers
from agentic.common.sandbox import SandboxLimits, SandboxResult, run_python

HOSTILE_LIMITS = SandboxLimits(timeout_s=0.4, cpu_s=5, processes=32, output_bytes=65536)


@dataclass(frozen=True)
class Hostile:
    """A program that must be contained, and what its result must look like. `{canary}` is a folder of the host."""

    kind: str
    code: str
    contained: Callable[[SandboxResult], bool]


# The deletion first makes sure that it is alone: without isolation it must not start.
_DELETION = """import os, shutil, sys
if os.path.exists({canary!r}): sys.exit(print("ESCAPED"))
os.remove("/usr/bin/env")
"""
_ALL = """import os, shutil, sys
if os.path.exists({canary!r}): sys.exit(print("ESCAPED"))
shutil.rmtree("/", ignore_errors=True)
"""
_FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
_ESCAPES = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid()\ntime.sleep(60)"
_NETWORK = "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('ESCAPED')"


def refused(sign: str) -> Callable[[SandboxResult], bool]:
    """The attempt failed with this error (or, on a loaded machine, was not even made in time)."""
    return lambda r: "ESCAPED" not in r.stdout and (sign in r.stderr or r.timed_out)


HOSTILE = (
    Hostile("endless loop", "while True: pass", lambda r: r.timed_out and r.exit_code == 137),
    Hostile("fork bomb", _FORK_BOMB, lambda r: r.timed_out),
    Hostile("own sessions", _ESCAPES, lambda r: r.timed_out),
    Hostile("10 GB allocation", "bytearray(10 << 30); print('ESCAPED')", refused("MemoryError")),
    Hostile("100 MB output", "for _ in range(1600): print('x' * (1 << 16))", lambda r: r.truncated or r.timed_out),
    Hostile("deletion of a system file", _DELETION, refused("Read-only file system")),
    Hostile("deletion of everything", _ALL, refused("")),
    Hostile("network", _NETWORK, refused("unreachable")),
    Hostile("environment", "print('ESCAPED', open('/proc/{owner}/environ').read())", refused("Error")),
    Hostile("project files", "print('ESCAPED', open({project!r}).read())", refused("FileNotFoundError")),
)


async def run_hostile(calls: int) -> dict[str, Any]:
    """Run the kinds in turn, `calls` in all, and look at what is left."""
    escaped: Counter[str] = Counter()
    late_ms: list[float] = []
    with ExitStack() as stack:
        canary = stack.enter_context(tempfile.TemporaryDirectory(prefix="canary-"))
        left = stack.enter_context(temporary_files_in(Path(canary, "tmp")))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        file = Path(canary, "file")
        file.write_text("untouched")
        os.chmod(canary, 0o777)
        places: dict[str, Any] = {"canary": canary, "owner": os.getpid(), "project": str(ROOT / "pyproject.toml")}
        places["port"] = server.getsockname()[1]

        async def one(hostile: Hostile) -> None:
            code = hostile.code.format(**places) if "{" in hostile.code else hostile.code
            result = await run_python(code, HOSTILE_LIMITS)
            escaped[hostile.kind] += not hostile.contained(result)
            if hostile.kind == "endless loop":
                late_ms.append((result.seconds - HOSTILE_LIMITS.timeout_s) * 1e3)

        start = time.perf_counter()
        await asyncio.gather(*(one(HOSTILE[n % len(HOSTILE)]) for n in range(calls)))
        seconds = time.perf_counter() - start
        touched = file.read_text() != "untouched"
        files = left()
    zombies = descendants().count("Z")
    stop_helpers()
    processes = descendants()
    return {
        "calls": calls,
        "seconds": round(seconds, 1),
        "escaped": dict(escaped),
        "kill_late_ms_p50": round(quantile(late_ms, 0.5), 1) if late_ms else None,
        "processes_left": len(processes),
        "zombies_left": zombies,
        "temp_files_left": len(files),
        "host_file_touched": touched,
    }


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[Callable[[], list[str]]]:
    """Temporary files of this process go to `folder`; gives a function that lists them."""
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield lambda: os.listdir(folder)
    finally:
        tempfile.tempdir = before


def descendants() -> list[str]:
    """States of all processes below this one."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit():
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                parents[int(entry.name)] = (int(fields[1]), fields[0].decode())
        except OSError:
            continue  # it ended meanwhile
    below = {os.getpid()}
    for _ in range(len(parents)):
        more = {pid for pid, (parent, _) in parents.items() if parent in below} - below
        if not more:
            break
        below |= more
    return [parents[pid][1] for pid in below - {os.getpid()}]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def latency(calls: int) -> dict[str, Any]:
    """Milliseconds of our call, a cold interpreter and a bare fork, measured in turns."""
    ours, cold, fork = [], [], []
    await run_python("pass")
    for n in range(calls):
        start = time.perf_counter()
        assert (await run_python("print('done')")).stdout == "done\n"
        ours.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        fork.append((time.perf_counter() - start) * 1e3)
        if n % 5 == 0:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
            cold.append((time.perf_counter() - start) * 1e3)
    figures = {"ours": quantile(ours, 0.5), "anchor": quantile(cold, 0.5), "limit": quantile(fork, 0.5)}
    figures |= {"ratio": figures["anchor"] / figures["ours"]}
    spread = [round(quantile(ours, share), 2) for share in (0.05, 0.95)]
    return {name: round(value, 2) for name, value in figures.items()} | {"n": calls, "spread": spread}


async def measure(calls: int, mix: int) -> dict[str, Any]:
    line = {"metric": "sandbox_call_ms", **await latency(calls)}
    return line | ({"mix": await run_hostile(mix)} if mix else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="calls of the latency measurement")
    parser.add_argument("--mix", type=int, default=0, help="hostile calls (acceptance: 1000)")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.calls, args.mix))))


if __name__ == "__main__":
    main()
