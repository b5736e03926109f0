"""Processes of the SGLang backend without SGLang: a plain Python child stands in for the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.errors import EngineError, ServerStartError
from slime.backends.sglang_utils.owned_process import OwnedProcess, check_port_free, option_flags, session_members
from slime.backends.sglang_utils.router import Router
from slime.backends.sglang_utils.server import CPU_SHIM, ServerSpec, SGLangServer, default_cpu_options

# A parent with a child in its group and a grandchild in a session of its own; both ignore SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
nap = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
pids = [os.getpid()]
for own_session in (False, True):
    pids.append(subprocess.Popen([sys.executable, "-c", nap], start_new_session=own_session).pid)
print("family", *pids, flush=True)
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def exists(pid: int) -> bool:
    """Whether there is such a process, zombies included."""
    return Path(f"/proc/{pid}").exists()


def family_pids(log: Path) -> list[int]:
    assert wait_for(lambda: "family" in log.read_text() and log.read_text().endswith("\n"))
    return [int(word) for word in log.read_text().split()[1:]]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[OwnedProcess]:
    process = OwnedProcess("family", python(FAMILY), tmp_path / "logs" / "family.log")
    process.start(grace_s=0.2)
    yield process
    process.stop()


def test_stop_ends_all_generations_and_is_idempotent(family: OwnedProcess) -> None:
    assert family.session is not None
    pids = [*family_pids(family.log_path), family.session]
    assert all(exists(pid) for pid in pids)
    family.stop()
    assert not any(exists(pid) for pid in pids), "a process or a zombie is left"
    family.stop()
    assert family.poll() is None and family.session is None


def test_killed_guard_still_takes_the_command_along(family: OwnedProcess) -> None:
    session, (main, child, escaped) = family.session, family_pids(family.log_path)
    assert session is not None and sorted(session_members(session)) == sorted([session, main, child])
    os.kill(session, signal.SIGKILL)
    assert wait_for(lambda: main not in session_members(session))
    family.stop()
    assert wait_for(lambda: session_members(session) == [])
    os.kill(escaped, signal.SIGKILL)  # in a session of its own: only a living guard could have found it


def test_start_from_a_short_lived_thread(tmp_path: Path) -> None:
    process = OwnedProcess("sleeper", python("import time; time.sleep(600)"), tmp_path / "log")
    thread = threading.Thread(target=process.start)
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert process.poll() is None
    process.stop()


def test_owner_killed_takes_everything_along(tmp_path: Path) -> None:
    owner_code = f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from slime.backends.sglang_utils.owned_process import OwnedProcess
        process = OwnedProcess("family", {python(FAMILY)!r}, Path({str(tmp_path / "log")!r}))
        process.start()
        print(process.session, flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(owner_code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout is not None
    session = int(owner.stdout.readline())
    pids = [*family_pids(tmp_path / "log"), session]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    # The guard itself is an orphan now: whether init has reaped it already is not ours to say.
    assert wait_for(lambda: not any(exists(pid) for pid in pids[:-1]) and session_members(session) == [])


def test_status_and_log_tail_of_a_dead_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("line of an earlier run\n")
    process = OwnedProcess("broken", python("import sys; [print('line', i) for i in range(50)]; sys.exit(7)"), log)
    process.start()
    with pytest.raises(ServerStartError) as caught:
        process.wait_until(lambda: False, timeout_s=120)
    text = str(caught.value)
    assert "broken ended with status 7" in text and str(log) in text
    assert text.splitlines()[1:] == [f"line {i}" for i in range(20, 50)]


def test_missed_deadline_stops_the_process(tmp_path: Path) -> None:
    process = OwnedProcess("slow", python("import time; time.sleep(600)"), tmp_path / "log")
    process.start()
    session = process.session
    assert session is not None
    with pytest.raises(ServerStartError, match="slow was not ready after 0.3 s"):
        process.wait_until(lambda: False, timeout_s=0.3)
    assert not exists(session)


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    process = OwnedProcess("nothing", [str(tmp_path / "no-such-program")], tmp_path / "log")
    process.start()
    with pytest.raises(ServerStartError, match="status 127(.|\n)*no-such-program"):
        process.wait_until(lambda: False, timeout_s=120)


def test_signal_status_is_passed_on(tmp_path: Path) -> None:
    process = OwnedProcess("suicide", python("import os; os.kill(os.getpid(), 9)"), tmp_path / "log")
    process.start()
    assert wait_for(lambda: process.poll() is not None)
    assert process.poll() == 128 + 9
    process.stop()


def test_starting_twice_is_refused(family: OwnedProcess) -> None:
    with pytest.raises(RuntimeError, match="already started"):
        family.start()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_taken_port_is_named_before_anything_starts(tmp_path: Path, taken_port: int) -> None:
    with pytest.raises(ValueError, match=f"port {taken_port} on 127.0.0.1"):
        check_port_free("127.0.0.1", taken_port)
    spec = ServerSpec(str(model_folder(tmp_path)), "127.0.0.1", taken_port, {}, tmp_path / "log")
    with pytest.raises(ValueError, match=str(taken_port)):
        SGLangServer(spec).start()
    with pytest.raises(ValueError, match=str(taken_port)):
        Router("127.0.0.1", taken_port, tmp_path / "log").start()
    assert not (tmp_path / "log").exists()


def test_model_folder_without_config(tmp_path: Path) -> None:
    spec = ServerSpec(str(tmp_path), "127.0.0.1", 1, {}, tmp_path / "log")
    with pytest.raises(FileNotFoundError, match="config.json"):
        spec.check()
    spec = ServerSpec(str(tmp_path / "missing"), "127.0.0.1", 1, {}, tmp_path / "log")
    with pytest.raises(FileNotFoundError, match="missing"):
        spec.check()


def test_option_flags() -> None:
    options = {"max_total_tokens": 5, "--sleep-on-idle": True, "log-requests": False, "x": None, "many": [1, "b"]}
    assert option_flags(options) == ["--max-total-tokens", "5", "--sleep-on-idle", "--many", "1", "b"]
    with pytest.raises(ValueError, match="'model_path' is set by the launcher"):
        option_flags({"model_path": "x"}, forced=["model-path"])
    with pytest.raises(ValueError, match="twice"):
        option_flags({"a-b": 1, "a_b": 2})


def test_cpu_server_command_and_environment(tmp_path: Path) -> None:
    options = default_cpu_options() | {"max-total-tokens": 1024}
    spec = ServerSpec("M", "127.0.0.1", 31000, options, tmp_path / "log", seed=3, env={"A": "b"})
    command = " ".join(spec.command()[1:])
    assert command.startswith(
        "-m sglang.launch_server --model-path M --host 127.0.0.1 --port 31000 --random-seed 3 --device cpu "
        "--attention-backend torch_native --dtype float32 --max-total-tokens 1024 "
    )
    env = spec.environment({"PYTHONPATH": "mine", "HOME": "/h", "OMP_NUM_THREADS": "8"})
    assert env["PYTHONPATH"].split(os.pathsep) == [str(CPU_SHIM), os.path.join(sys.prefix, "sglang-only"), "mine"]
    assert (env["OMP_NUM_THREADS"], env["SGLANG_USE_CPU_ENGINE"], env["A"], env["HOME"]) == ("1", "1", "b", "/h")


def test_gpu_server_gets_no_stand_ins(tmp_path: Path) -> None:
    spec = ServerSpec("M", "127.0.0.1", 31000, {"tp-size": 2}, tmp_path / "log")
    kept = spec.environment({"PYTHONPATH": "mine", "PYTORCH_CUDA_ALLOC_CONF": "x"})
    assert kept == {"PYTHONPATH": "mine", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    assert "--device" not in spec.command()


def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(EngineError("http://h:1", "/pause_generation", None, "ConnectError: refused")))
    assert str(error) == "http://h:1/pause_generation: no answer: ConnectError: refused"
    start = pickle.loads(pickle.dumps(ServerStartError("server", "died", Path("/tmp/log"), "the end")))
    assert str(start) == "server died; log: /tmp/log; its last lines:\nthe end"
