"""The sandbox with real processes: limits, isolation, and that nothing survives."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from agentic.common import sandbox
from agentic.common._sandbox_helper import Helper, Refused, _first_answer, get_helper
from agentic.common._sandbox_kernel import interpreter_paths
from agentic.common.errors import ConfigError, InfrastructureError
from agentic.common.sandbox import SandboxLimits, namespaces_available, run_python
from benchmarks.sandbox import run_hostile

BOTH_MODES = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "plain"])

NAMESPACES = pytest.mark.skipif(not namespaces_available(), reason="this kernel refuses namespaces")


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


async def appears(tag: str) -> bool:
    for _ in range(600):
        if survivors(tag):
            return True
        await asyncio.sleep(0.05)
    return False


async def none_survive(tag: str) -> bool:
    for _ in range(200):
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
    assert result.timed_out and result.exit_code == 137 and time.perf_counter() - start < 20
    assert result.stdout == "started\n"
    assert await none_survive(tag)


@BOTH_MODES
async def test_grandchildren_end_with_a_normal_exit(mode: bool) -> None:
    tag = secrets.token_hex(8)
    command = f'[sys.executable, "-c", "import time; time.sleep(60)", "{tag}"]'
    start = time.perf_counter()
    result = await run_python(f"import subprocess, sys; subprocess.Popen({command}, start_new_session=True); print(1)")
    assert (result.stdout, result.exit_code, result.timed_out) == ("1\n", 0, False)
    assert time.perf_counter() - start < 20 and await none_survive(tag)


@BOTH_MODES
async def test_cancellation_kills_and_cleans_up(mode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag = secrets.token_hex(8)
    command = f'[sys.executable, "-c", "import time; time.sleep(60)", "{tag}"]'
    task = asyncio.create_task(run_python(f"import subprocess, sys; subprocess.run({command})"))
    assert await appears(tag)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await none_survive(tag)
    assert list(tmp_path.iterdir()) == []


async def test_ten_megabytes_of_output_are_cut_and_the_call_ends() -> None:
    code = "import sys\nfor _ in range(1000): sys.stdout.write('x' * 10_000)\nwhile True: pass"
    result = await run_python(code, SandboxLimits(output_bytes=4096, timeout_s=60, cpu_s=60))
    assert result.truncated and not result.timed_out and result.stdout == "x" * 4096 and result.seconds < 30


async def test_environment_and_working_folder_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    code = "import os; print(sorted(os.environ)); print(os.getcwd()); print(os.listdir())"
    names, folder, files = (await run_python(code)).stdout.splitlines()
    assert "SECRET" not in names and "PATH" in names
    assert files == "['script.py']" and folder != os.getcwd() and not Path(folder).exists()


@NAMESPACES
async def test_the_callers_environment_cannot_be_read_through_proc() -> None:
    result = await run_python(f"print(open('/proc/{os.getpid()}/environ').read())")
    assert "Error" in result.stderr and result.stdout == ""


@NAMESPACES
async def test_files_of_the_host_can_neither_be_seen_nor_written() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        Path(folder, "file").write_text("kept")
        for path in (f"{folder}/file", sandbox.__file__, "/etc/shadow", "/var", f"/proc/{os.getpid()}"):
            result = await run_python(f"import os; print(os.stat({path!r}))")
            assert "FileNotFoundError" in result.stderr, result
        write = f"open({folder!r} + '/new', 'w')"
        assert "Error" in (await run_python(write)).stderr
        assert "Read-only" in (await run_python("open('/usr/new', 'w')")).stderr
        assert os.listdir(folder) == ["file"]


@NAMESPACES
async def test_of_the_home_only_the_way_to_the_interpreter_is_there() -> None:
    home = Path.home()
    inside = [Path(path).relative_to(home) for path in interpreter_paths() if Path(path).is_relative_to(home)]
    listing = f"import json, os; print(json.dumps(os.listdir({str(home)!r}) if os.path.exists({str(home)!r}) else []))"
    assert set(json.loads((await run_python(listing)).stdout)) <= {path.parts[0] for path in inside}


@NAMESPACES
async def test_the_program_is_nobody_without_any_capability() -> None:
    show = "import os\nlines = open('/proc/self/status').read().splitlines()\n"
    show += "print(os.getuid(), [l.split()[1] for l in lines if l[:6] in ('CapEff', 'CapPrm', 'NoNewP')])"
    assert (await run_python(show)).stdout == "65534 ['0000000000000000', '0000000000000000', '1']\n"
    attempt = "import ctypes\nprint(ctypes.CDLL(None).unshare({flags}))"
    for flags in (0x10000000, 0x10020000, 0x20000):
        assert (await run_python(attempt.replace("{flags}", str(flags)))).stdout == "-1\n"


@NAMESPACES
async def test_process_and_folder_limits_bind_even_for_root() -> None:
    bomb = "import os, time\nmade = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60)\n        made += 1"
    bomb += "\nexcept OSError: print(made)"
    assert 0 < int((await run_python(bomb, SandboxLimits(processes=10))).stdout) < 10
    fill = "for n in range(20): open(str(n), 'wb').write(b'x' * (1 << 20))"
    assert "No space left" in (await run_python(fill, SandboxLimits(folder_mb=4))).stderr


async def test_a_program_cannot_pass_for_a_failure_of_ours() -> None:
    result = await run_python("import sys; sys.stderr.write('the kernel refused a namespace'); sys.exit(125)")
    assert result.exit_code == 125


async def test_preloaded_modules_are_there_and_unknown_ones_are_an_error() -> None:
    limits = SandboxLimits(preload=("numpy",))
    code = (
        "import sys; print('numpy' in sys.modules, 'sympy' in sys.modules); import numpy; print(numpy.random.rand())"
    )
    first, second = [(await run_python(code, limits)).stdout.splitlines() for _ in range(2)]
    assert first[0] == "True False" and first[1] != second[1]
    with pytest.raises(ConfigError, match="no_such_module"):
        await run_python("print(1)", SandboxLimits(preload=("no_such_module",)))


async def test_calls_are_independent_of_each_other() -> None:
    code = "import random, math, os; print(random.random(), math.pi, os.path.exists('left')); math.pi = 3; open('left', 'w')"
    first, second = [(await run_python(code)).stdout.split() for _ in range(2)]
    assert first[0] != second[0] and first[1:] == second[1:] == ["3.141592653589793", "False"]


async def test_exit_functions_threads_and_buffers_are_completed() -> None:
    code = """import atexit, sys, threading, time
atexit.register(print, "last", end="")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main")"""
    assert (await run_python(code)).stdout == "main\nthread\nlast"
    assert (await run_python("import sys; sys.exit('why')")).stderr == "why\n"


async def test_a_dead_helper_is_replaced_and_its_calls_fail_typed() -> None:
    await run_python("pass")
    helper = get_helper(namespaces_available())
    tag = secrets.token_hex(8)
    command = f'[sys.executable, "-c", "import time; time.sleep(60)", "{tag}"]'
    limits = SandboxLimits(timeout_s=60)
    task = asyncio.create_task(run_python(f"import subprocess, sys; subprocess.run({command})", limits))
    assert await appears(tag)
    os.kill(helper.process.pid, 9)
    with pytest.raises(InfrastructureError, match="sandbox_failed"):
        await task
    assert (await run_python("print(1)")).stdout == "1\n"
    assert get_helper(namespaces_available()) is not helper


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)", "os.kill(os.getpid(), 9)"])
async def test_the_helper_and_its_calls_end_with_the_owner(end: str, tmp_path: Path) -> None:
    tag = secrets.token_hex(8)
    owner = tmp_path / "owner.py"
    code = f"""import asyncio, os, sys
sys.path.insert(0, {str(Path(sandbox.__file__).parents[2])!r})
from agentic.common.sandbox import run_python
async def main():
    command = [sys.executable, "-c", "import time; time.sleep(60)", "{tag}"]
    task = asyncio.create_task(run_python(f"import subprocess; subprocess.run({{command}})"))
    await asyncio.to_thread(sys.stdin.readline)
    {end}
asyncio.run(main())"""
    owner.write_text(code)
    process = await asyncio.create_subprocess_exec(sys.executable, str(owner), stdin=subprocess.PIPE)
    assert await appears(tag)
    await process.communicate(b"end\n")
    assert await none_survive(tag)


@NAMESPACES
@pytest.mark.slow
async def test_a_mix_of_hostile_programs_leaves_nothing_behind() -> None:
    outcome = await run_hostile(100)
    assert sum(outcome["escaped"].values()) == 0, outcome
    assert outcome["processes_left"] == outcome["zombies_left"] == outcome["temp_files_left"] == 0, outcome
    assert not outcome["host_file_touched"]


@NAMESPACES
async def test_no_network_unless_allowed() -> None:
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
async def test_memory_and_file_limits(code: str, limits: dict[str, Any], sign: str) -> None:
    result = await run_python(code, SandboxLimits(**limits))
    assert result.exit_code == 1 and sign in result.stderr


async def test_processor_limit_and_signals_are_reported_in_the_exit_code() -> None:
    result = await run_python("while True: pass", SandboxLimits(cpu_s=1, timeout_s=60))
    assert result.exit_code in (137, 152) and not result.timed_out and result.seconds < 50
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


@BOTH_MODES
async def test_a_hung_helper_is_no_time_out_of_the_program_and_is_replaced(
    mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_python("pass")
    helper = get_helper(mode)
    os.kill(helper.process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "BEGIN_S", 0.2)
        patch.setattr(sandbox, "KILL_S", 0.2)
        with pytest.raises(InfrastructureError, match="the program was not started"):
            await run_python("print(1)", SandboxLimits(timeout_s=0.2))
    assert (await run_python("print(1)")).stdout == "1\n"
    assert not helper.alive


@BOTH_MODES
async def test_time_before_the_program_begins_is_not_counted(mode: bool) -> None:
    await run_python("pass")
    helper = get_helper(mode)
    os.kill(helper.process.pid, signal.SIGSTOP)
    task = asyncio.create_task(run_python("print(1)", SandboxLimits(timeout_s=2)))
    await asyncio.sleep(2.2)
    os.kill(helper.process.pid, signal.SIGCONT)
    result = await task
    assert (result.stdout, result.timed_out) == ("1\n", False)


async def test_want_of_descriptors_is_a_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(sandbox, "memory_file", none_left)
    with pytest.raises(InfrastructureError, match="sandbox_failed: .*Too many open files"):
        await run_python("print(1)")


async def test_a_helper_that_another_call_has_stopped_counts_as_dead() -> None:
    await run_python("pass")
    helper = get_helper(namespaces_available())
    helper.stop()
    with pytest.raises(ConnectionError):
        helper.send({}, [])
    assert (await run_python("print(1)")).stdout == "1\n"


@pytest.mark.parametrize(
    ("number", "isolated", "kind"),
    [
        (errno.EPERM, True, Refused),
        (errno.ENOSPC, True, Refused),  # no user namespaces allowed
        (errno.EAGAIN, True, InfrastructureError),
        (errno.ENOMEM, True, InfrastructureError),
        (errno.EPERM, False, InfrastructureError),
        (None, True, InfrastructureError),  # it ended without a word
    ],
)
def test_only_the_kernels_refusal_switches_isolation_off(
    number: int | None, isolated: bool, kind: type[Exception]
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    helper = Helper(subprocess.Popen([sys.executable, "-c", "import os; os.abort()"]), ours, False)
    if number is not None:
        theirs.send(json.dumps({"refused": os.strerror(number), "kind": "OSError", "errno": number}).encode())
    theirs.close()
    try:
        with pytest.raises(kind, match=os.strerror(number) if number else "ended at once"):
            _first_answer(helper, isolated)
    finally:
        helper.stop()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_root_that_may_not_become_nobody_is_noticed() -> None:
    """As in a container whose user namespace holds root alone."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import _sandbox_kernel as k; print(k.may_become_nobody())"
    folder = str(Path(sandbox.__file__).parent)
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-I", "-c", code, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr and not done.stdout:
        pytest.skip("this kernel refuses user namespaces")
    assert done.stdout == "False\n", done.stderr


@NAMESPACES
def test_an_interpreter_below_tmp_is_isolated_as_well() -> None:
    """The private root covers /tmp; a checkout with its environment there must not lose isolation, nor late imports."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        code = "import zipfile, os; print(zipfile.__name__, sorted(os.listdir('/tmp')))"
        script = (
            f"import asyncio; from agentic.common.sandbox import run_python; print(asyncio.run(run_python({code!r})))"
        )
        answer = subprocess.run(
            [f"{folder}/venv/bin/python", "-c", script],
            cwd=Path(sandbox.__file__).parents[2],
            capture_output=True,
            text=True,
        )
    assert "isolated=True" in answer.stdout and "exit_code=0" in answer.stdout, answer
    assert "zipfile" in answer.stdout
