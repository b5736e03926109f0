"""The sandbox with real processes: limits, isolation, and that nothing survives."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path

import pytest

from agentic.common import sandbox
from agentic.common.errors import ConfigError
from agentic.common.sandbox import SandboxLimits, namespaces_available, run_python

BOTH_MODES = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "plain"])


@pytest.fixture
def mode(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    if namespaces and not namespaces_available():
        pytest.skip("this kernel refuses namespaces")
    monkeypatch.setattr(sandbox, "namespaces_available", lambda: namespaces)
    return namespaces


def survivors(tag: str) -> list[str]:
    """Command lines of running processes that contain `tag`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue
        if tag in line:
            found.append(line)
    return found


async def none_survive(tag: str) -> bool:
    for _ in range(20):
        if not survivors(tag):
            return True
        await asyncio.sleep(0.05)
    return False


@BOTH_MODES
async def test_exit_code_and_both_streams_come_back(mode: bool) -> None:
    result = await run_python("import sys; print(7); print('é', file=sys.stderr); sys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_code) == ("7\n", "é\n", 3)
    assert (result.timed_out, result.truncated, result.isolated) == (False, False, mode)


async def test_exit_zero_keeps_what_was_printed() -> None:
    result = await run_python("import sys; print(7); sys.exit(0)")
    assert (result.stdout, result.stderr, result.exit_code) == ("7\n", "", 0)


async def test_traceback_shows_the_script_only() -> None:
    result = await run_python("print(1)\n1/0")
    assert result.exit_code == 1 and result.stdout == "1\n"
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "script.py", line 2, in <module>')
    assert "ZeroDivisionError" in result.stderr and "runner" not in result.stderr
    assert "SyntaxError" in (await run_python("def f(:")).stderr


@BOTH_MODES
async def test_endless_loop_times_out_and_no_descendant_survives(mode: bool) -> None:
    tag = secrets.token_hex(8)
    code = f"""
import subprocess, sys
for own_session in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "{tag}"], start_new_session=own_session)
print("started", flush=True)
while True:
    pass
"""
    start = time.perf_counter()
    result = await run_python(code, SandboxLimits(timeout_s=1))
    assert result.timed_out and result.exit_code == 137 and time.perf_counter() - start < 2
    assert result.stdout == "started\n"
    assert await none_survive(tag)


@BOTH_MODES
async def test_grandchildren_end_with_a_normal_exit(mode: bool) -> None:
    tag = secrets.token_hex(8)
    command = f'[sys.executable, "-c", "import time; time.sleep(60)", "{tag}"]'
    start = time.perf_counter()
    result = await run_python(f"import subprocess, sys; subprocess.Popen({command}, start_new_session=True); print(1)")
    assert (result.stdout, result.exit_code, result.timed_out) == ("1\n", 0, False)
    assert time.perf_counter() - start < 2 and await none_survive(tag)


@BOTH_MODES
async def test_cancellation_kills_and_cleans_up(mode: bool) -> None:
    tag, before = secrets.token_hex(8), set(Path(tempfile.gettempdir()).glob("sandbox-*"))
    command = f'[sys.executable, "-c", "import time; time.sleep(60)", "{tag}"]'
    task = asyncio.create_task(run_python(f"import subprocess, sys; subprocess.run({command})"))
    for _ in range(100):
        await asyncio.sleep(0.05)
        if survivors(tag):
            break
    assert survivors(tag)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await none_survive(tag)
    assert set(Path(tempfile.gettempdir()).glob("sandbox-*")) <= before


async def test_ten_megabytes_of_output_are_cut_and_the_call_ends() -> None:
    code = "import sys\nfor _ in range(1000): sys.stdout.write('x' * 10_000)\nwhile True: pass"
    result = await run_python(code, SandboxLimits(output_bytes=4096))
    assert result.truncated and not result.timed_out and result.stdout == "x" * 4096 and result.seconds < 5


async def test_environment_and_working_folder_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    code = "import os; print(sorted(os.environ)); print(os.getcwd()); print(os.listdir())"
    names, folder, files = (await run_python(code)).stdout.splitlines()
    assert "SECRET" not in names and "PATH" in names
    assert files == "['script.py']" and folder != os.getcwd() and not Path(folder).exists()


async def test_the_callers_environment_cannot_be_read_through_proc() -> None:
    if not namespaces_available():
        pytest.skip("this kernel refuses namespaces")
    result = await run_python(f"print(open('/proc/{os.getpid()}/environ').read())")
    assert "PermissionError" in result.stderr and result.stdout == ""


async def test_no_network_unless_allowed() -> None:
    if not namespaces_available():
        pytest.skip("this kernel refuses namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); print('in')"
        for network in (None, False):
            assert "unreachable" in (await run_python(code, SandboxLimits(network=network))).stderr
        assert (await run_python(code, SandboxLimits(network=True))).stdout == "in\n"


async def test_a_promise_the_kernel_cannot_keep_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "namespaces_available", lambda: False)
    with pytest.raises(ConfigError, match="network=False"):
        await run_python("print(1)", SandboxLimits(network=False))


@pytest.mark.parametrize(
    "code, limits, sign",
    [
        ("bytearray(1 << 30)", {"memory_mb": 256}, "MemoryError"),
        ("open('f', 'wb').write(b'x' * (3 << 20))", {"file_mb": 1}, "File too large"),
    ],
)
async def test_memory_and_file_limits(code: str, limits: dict[str, int], sign: str) -> None:
    result = await run_python(code, SandboxLimits(**limits))
    assert result.exit_code == 1 and sign in result.stderr


async def test_processor_limit_and_signals_are_reported_in_the_exit_code() -> None:
    result = await run_python("while True: pass", SandboxLimits(cpu_s=1, timeout_s=8))
    assert result.exit_code in (137, 152) and not result.timed_out and result.seconds < 6
    assert (await run_python("import os; os.kill(os.getpid(), 11)")).exit_code == 139
    assert (await run_python("import os; os.kill(0, 9)")).exit_code == 137


async def test_long_code_odd_code_and_installed_packages() -> None:
    long = f"x = '{'a' * 300_000}'\nprint(len(x))"
    assert (await run_python(long)).stdout == "300000\n"
    assert (await run_python("print('\ud800')")).exit_code == 0
    assert (await run_python("x = 1\x00")).exit_code == 1
    assert (await run_python("import numpy; print(numpy.arange(3).sum())")).stdout == "3\n"


async def test_concurrency_is_bounded_and_calls_do_not_mix() -> None:
    limits = SandboxLimits(max_concurrency=2)
    code = "import time; t = time.time(); time.sleep(0.1); print(t, time.time(), {n})"
    results = await asyncio.gather(*(run_python(code.replace("{n}", str(n)), limits) for n in range(6)))
    rows = [result.stdout.split() for result in results]
    assert [row[2] for row in rows] == [str(n) for n in range(6)]
    spans = [(float(row[0]), float(row[1])) for row in rows]
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= 2


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        SandboxLimits(timeout_s=0)
