"""tools/serve_roles.py with services that are small scripts: a dead or hanging one comes back, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.owned_process import session_members

ROOT = Path(__file__).resolve().parents[2]
# Stands for the retrieval service; `--index FOLDER` is where it leaves its pid, and a file `hang` there makes it deaf.
SERVICE = """
import http.server, os, pathlib, sys, time
port, folder = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--port", "--index"))
folder = pathlib.Path(folder)
if (folder / "broken").exists():
    sys.exit("the index is broken")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if (folder / "hang").exists() else 200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(port)), Handler)
(folder / "pid").write_text(str(os.getpid()))
server.serve_forever()
"""
DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("serve_roles", {tool!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.RETRIEVAL_MODULE = "scripted_service"
sys.exit(module.main(sys.argv[1:]))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Kept:
    """The program as a process, with services `one` and `two`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripted_service.py").write_text(SERVICE)
        lines = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            lines.append(f"  {name}: {{kind: retrieval, port: {free_port()}, options: {{index: {folder / name}}}}}")
        (folder / "roles.yaml").write_text("servers:\n" + "\n".join(lines) + "\n")
        self.tool: subprocess.Popen[str]

    def start(self, *flags: str) -> Kept:
        code = DRIVER.format(tool=str(ROOT / "tools/serve_roles.py"))
        command = [sys.executable, "-c", code, str(self.folder / "roles.yaml"), "--log-dir", str(self.folder / "logs")]
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        self.tool = subprocess.Popen(
            [*command, *flags],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self

    def until(self, word: str) -> str:
        """The next line that begins with `word`."""
        assert self.tool.stdout is not None
        for line in self.tool.stdout:
            if line.startswith(word):
                return line.rstrip("\n")
        raise AssertionError(f"the program ended before it said {word}")

    def pid(self, name: str) -> int:
        return int((self.folder / name / "pid").read_text())

    def sessions(self) -> list[int]:
        return [os.getsid(self.pid(name)) for name in ("one", "two")]


def gone(sessions: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(map(session_members, sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(session_members, sessions))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.tool.kill()
    kept.tool.wait()
    if kept.tool.stdout is not None:
        kept.tool.stdout.close()


def test_a_dead_service_comes_back_and_the_end_leaves_nothing(kept: Kept) -> None:
    kept.start().until("ALL READY")
    first, other = kept.pid("one"), kept.pid("two")
    os.kill(first, signal.SIGKILL)
    assert kept.until("DIED") == "DIED one died; restart 1 of 5 in 1 s"
    assert kept.until("READY").startswith("READY one http://127.0.0.1:")
    assert kept.pid("one") != first and kept.pid("two") == other
    sessions = kept.sessions()
    kept.tool.send_signal(signal.SIGTERM)
    assert kept.until("STOPPING") and kept.tool.wait(60) == 0 and gone(sessions)


def test_a_hanging_service_is_replaced(kept: Kept) -> None:
    kept.start("--health-interval-s", "0.1").until("ALL READY")
    (kept.folder / "two" / "hang").touch()
    assert "DIED two did not answer 3 times" in kept.until("DIED")
    (kept.folder / "two" / "hang").unlink()
    assert kept.until("READY").startswith("READY two")


def test_too_many_failures_end_the_program_with_the_log(kept: Kept) -> None:
    kept.start("--max-restarts", "1").until("ALL READY")
    sessions = kept.sessions()
    (kept.folder / "one" / "broken").touch()
    os.kill(kept.pid("one"), signal.SIGKILL)
    assert "restart 1 of 1" in kept.until("DIED")
    assert kept.until("error: server one ended before it was ready") and kept.until("the index is broken")
    assert kept.tool.wait(60) == 1 and gone(sessions)


def test_sigkill_leaves_nothing(kept: Kept) -> None:
    kept.start().until("ALL READY")
    sessions = kept.sessions()
    kept.tool.kill()
    kept.tool.wait()
    assert gone(sessions)
