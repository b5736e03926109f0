"""tools/serve_roles.py: what it refuses before a server starts, and that nothing is left when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers_sglang import free_port, generate, save_tiny_model

from slime.backends.sglang_utils.owned_process import session_members

TOOL = Path(__file__).parents[2] / "tools" / "serve_roles.py"


def run(roles: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--roles", str(roles), "--log-dir", str(roles.parent / "logs")]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def refused(roles: Path) -> str:
    done = run(roles)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and not (roles.parent / "logs").exists()
    (line,) = done.stderr.splitlines()
    return line


def write(tmp_path: Path, port: int, model: Path) -> Path:
    roles = tmp_path / "roles.yaml"
    roles.write_text(f"servers:\n  frozen: {{model: {model}, port: {port}}}\n")
    return roles


def test_port_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = refused(write(tmp_path, port, tmp_path))
    assert "servers.frozen" in line and f"port {port}" in line


def test_model_folder_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in refused(write(tmp_path, 31234, tmp_path))


@pytest.mark.parametrize(
    ("text", "word"),
    [("servers: {}\n", "no `servers:`"), ("servers: {a: {modle: x}}\n", "modle"), ("- 1\n", "mapping")],
)
def test_bad_role_file(tmp_path: Path, text: str, word: str) -> None:
    roles = tmp_path / "roles.yaml"
    roles.write_text(text)
    assert word in refused(roles)


def test_missing_role_file(tmp_path: Path) -> None:
    assert "missing.yaml" in refused(tmp_path / "missing.yaml")


def start(roles: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), "--roles", str(roles), "--log-dir", str(roles.parent / "logs")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def sessions_of(tool: subprocess.Popen[str]) -> list[int]:
    """Session ids of the servers: the tool's children are their guards."""
    return [int(pid) for pid in Path(f"/proc/{tool.pid}/task/{tool.pid}/children").read_text().split()]


def left(sessions: list[int]) -> list[int]:
    deadline = time.monotonic() + 60
    while any(map(session_members, sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for session in sessions for pid in session_members(session)]


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_servers_start(tmp_path: Path, number: int) -> None:
    save_tiny_model(tmp_path)
    tool = start(write(tmp_path, free_port(), tmp_path))
    assert tool.stdout is not None and tool.stdout.readline().startswith("START frozen")
    time.sleep(1)
    sessions = sessions_of(tool)
    assert len(sessions) == 1 and session_members(sessions[0])
    tool.send_signal(number)
    output, _ = tool.communicate(timeout=120)
    assert tool.returncode == 0 and output.splitlines() == ["STOPPING"]
    assert left(sessions) == []


@pytest.mark.engine
def test_serves_and_ends_with_sigkill(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    port = free_port()
    tool = start(write(tmp_path, port, tmp_path))
    assert tool.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != "ALL READY":
        lines.append(tool.stdout.readline().rstrip("\n"))
        assert lines[-1], f"the tool ended: {lines}"
    url = f"http://127.0.0.1:{port}"
    assert lines[-2] == f"READY frozen {url}"
    assert len(generate(url, [1, 2, 3], 4)["output_ids"]) == 4
    sessions = sessions_of(tool)
    assert len(session_members(sessions[0])) >= 4
    tool.kill()
    tool.communicate()
    assert left(sessions) == []


def until(tool: subprocess.Popen[str], word: str) -> str:
    """The next line that begins with `word`."""
    assert tool.stdout is not None
    seen = []
    for line in tool.stdout:
        seen.append(line)
        if line.startswith(word):
            return line.rstrip("\n")
    raise AssertionError(f"the tool ended before it said {word}: {seen}")


def main_process(session: int) -> int:
    """The server behind a guard: the guard's child."""
    return int(Path(f"/proc/{session}/task/{session}/children").read_text().split()[0])


@pytest.mark.engine
@pytest.mark.slow
def test_three_models_and_retrieval_survive_a_death(tmp_path: Path) -> None:
    """Three servers of the tiny model and the retrieval service: one model is killed and comes back, the end leaves nothing."""
    save_tiny_model(tmp_path / "model")
    passages = [{"id": str(number), "contents": f"fact number {number}"} for number in range(8)]
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    ports = {name: free_port() for name in ("one", "two", "three", "search")}
    entries = [f"  {name}: {{model: {tmp_path / 'model'}, port: {ports[name]}}}" for name in ("one", "two", "three")]
    entries.append(
        f"  search: {{kind: retrieval, port: {ports['search']}, options: {{corpus: {tmp_path / 'passages.jsonl'}}}}}"
    )
    roles = tmp_path / "roles.yaml"
    roles.write_text("servers:\n" + "\n".join(entries) + "\n")
    tool = start(roles)
    try:
        until(tool, "ALL READY")
        sessions = sessions_of(tool)
        assert len(sessions) == 4
        os.kill(main_process(sessions[1]), signal.SIGKILL)
        assert until(tool, "DIED") == "DIED two died; restart 1 of 5 in 1 s"
        assert until(tool, "READY") == f"READY two http://127.0.0.1:{ports['two']}"
        for name in ("one", "two", "three"):
            assert len(generate(f"http://127.0.0.1:{ports[name]}", [1, 2, 3], 2)["output_ids"]) == 2
        query = {"queries": ["fact number 3"], "topk": 1}
        hits = httpx.post(f"http://127.0.0.1:{ports['search']}/retrieve", json=query, timeout=60).json()
        assert "fact number 3" in json.dumps(hits)
        sessions = sorted({*sessions, *sessions_of(tool)})
        tool.send_signal(signal.SIGTERM)
        output, _ = tool.communicate(timeout=120)
        assert tool.returncode == 0 and "STOPPING" in output and left(sessions) == []
    finally:
        tool.kill()
        tool.communicate()
