"""MCP servers as tools: over pipes and HTTP, in a rollout, and that they end with the process."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_agentflow import Play, plan, stage

pytest.importorskip("mcp")

from agentic.agentflow.tools import Toolbox, execute
from agentic.agentflow.tools.mcp_tools import Server, ServerSettings, load_mcp_tools, read_servers, stop_servers
from agentic.common.errors import ConfigError, InfrastructureError

SERVER = Path(__file__).parents[1] / "helpers_mcp_server.py"
STDIO = {"command": sys.executable, "args": [str(SERVER)]}
ROOT = Path(__file__).parents[2]


def write(folder: Path, **servers: Any) -> str:
    path = folder / "mcp.yaml"
    path.write_text(yaml.safe_dump({"servers": servers}))
    return str(path)


@pytest.fixture(autouse=True)
def no_server_stays() -> Iterator[None]:
    yield
    stop_servers()


def alive(tag: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and tag in (entry / "cmdline").read_bytes().decode():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def test_the_planner_uses_a_calculator_of_an_mcp_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = '```python\nexecution = tool.execute(left=3, operator="+", right=4)\n```'
    path = write(tmp_path, maths=STDIO | {"tools": ["calculate"]})
    play = Play(next_step=plan("Calculate"), command=command)
    with stage(tmp_path, monkeypatch, play, mcp_config=path) as s:
        sample = await s.run()
    tool = next(entry for entry in sample.metadata["trace"] if entry["role"] == "tool")
    assert (tool["tool_name"], tool["text"], tool["ok"]) == ("calculate", "7", True)
    prompts = [*s.policy.prompts(), *s.frozen.prompts()]
    shown = "calculate: Computes `left operator right` for one of + - * /."
    assert sum(shown in prompt for prompt in prompts) >= 3 and sample.status.value == "completed"
    assert any("- right (number, optional): Right (default 0)" in prompt for prompt in prompts)


async def test_arguments_are_checked_against_the_schema_before_the_call(tmp_path: Path) -> None:
    toolbox = Toolbox(load_mcp_tools(write(tmp_path, maths=STDIO)))
    assert set(toolbox.names) == {"calculate", "total", "wait", "secret", "leave"}
    calculate, total = toolbox.resolve("Calculate"), toolbox.resolve("total")
    assert calculate is not None and total is not None
    for kwargs, problem in (
        ({"left": "x", "operator": "+"}, "left: 'x' is not of type 'number'; it takes left, operator, right"),
        ({"operator": "+"}, "'left' is a required property"),
        ({"left": {1, 2}, "operator": "+"}, "not JSON serializable"),
    ):
        result = await execute(calculate, kwargs)
        assert not result.ok and problem in result.text and result.meta == {"error": "arguments"}
    assert (await execute(total, {"numbers": (1, 2, 3.5)})).text == "6.5"
    assert '{"items": {"type": "number"}, "type": "array"}' in total.spec.describe()
    broken = await execute(calculate, {"left": 1, "operator": "/", "right": 0})
    assert not broken.ok and broken.text.startswith("Error: ")


async def test_deadline_prefix_environment_and_a_server_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN", "hunter2")
    monkeypatch.setenv("TOKEN", "abc")
    entry = STDIO | {"prefix": "my_", "timeout_s": 3, "env": {"GIVEN": "x$TOKEN$$"}}
    tools = {tool.spec.name: tool for tool in load_mcp_tools(write(tmp_path, maths=entry))}
    start = time.monotonic()
    late = await execute(tools["my_wait"], {"seconds": 20})
    assert not late.ok and "within 3 s" in late.text and time.monotonic() - start < 18
    with pytest.raises(InfrastructureError, match="mcp_unavailable:maths"):
        await execute(tools["my_leave"], {})
    assert (await execute(tools["my_secret"], {})).text == "xabc$ None"  # connected again


async def test_calls_run_side_by_side_and_from_any_event_loop(tmp_path: Path) -> None:
    tools = {tool.spec.name: tool for tool in load_mcp_tools(write(tmp_path, maths=STDIO))}
    calls = [execute(tools["calculate"], {"left": n, "operator": "*", "right": 2}) for n in range(20)]
    assert [result.text for result in await asyncio.gather(*calls)] == [str(2 * n) for n in range(20)]
    elsewhere = asyncio.to_thread(lambda: asyncio.run(execute(tools["total"], {"numbers": [1]})))
    assert (await elsewhere).text == "1"


async def test_streamable_http(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(SERVER), "--port", str(port)])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            await asyncio.sleep(0.1)
        path = write(tmp_path, remote={"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Key": "1"}})
        tools = {tool.spec.name: tool for tool in load_mcp_tools(path)}
        assert (await execute(tools["calculate"], {"left": 9, "operator": "/", "right": 2})).text == "4.5"
        stop_servers()
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_servers_end_with_the_process_even_when_it_is_killed(tmp_path: Path) -> None:
    tag = f"mcp-{os.getpid()}-{time.monotonic_ns()}"
    path = write(tmp_path, maths={"command": sys.executable, "args": [str(SERVER), tag]})
    owner = f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
from agentic.agentflow.tools.mcp_tools import load_mcp_tools
print(len(load_mcp_tools({path!r})), flush=True)
if sys.argv[1] == "kill": os.kill(os.getpid(), 9)"""
    for end in ("kill", "exit"):
        done = subprocess.run([sys.executable, "-c", owner, end], capture_output=True, text=True, timeout=60)
        assert done.stdout == "5\n", done.stderr
        for _ in range(300):
            if not alive(tag):
                break
            time.sleep(0.1)
        assert not alive(tag), end


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"command": "no-such-program-here"}, "mcp_unavailable:maths.*check command or url"),
        ({"command": "python", "url": "http://x"}, "either command .* or url"),
        ({"comand": "python"}, "unknown key 'comand'.*did you mean 'command'"),
        ({"command": "python", "timeout_s": "5"}, "timeout_s is '5'"),
        ({"command": "python", "env": {"A": "$NOT_SET_ANYWHERE"}}, "has no NOT_SET_ANYWHERE"),
        (STDIO | {"tools": ["calculator"]}, "has no tool 'calculator'.*did you mean 'calculate'"),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_mcp_tools(write(tmp_path, maths=entry))


def test_names_must_be_unique_and_the_file_must_exist(tmp_path: Path) -> None:
    tools = load_mcp_tools(write(tmp_path, one=STDIO | {"tools": ["total"]}, two=STDIO | {"tools": ["total"]}))
    with pytest.raises(ConfigError, match="share the name 'total'"):
        Toolbox(tools)
    with pytest.raises(FileNotFoundError, match="agentflow_mcp_config"):
        read_servers(str(tmp_path / "none.yaml"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("server: {}")
    with pytest.raises(ConfigError, match="one section `servers`"):
        read_servers(str(wrong))


async def test_an_answer_that_breaks_the_protocol_is_a_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: object) -> None:
        raise RuntimeError("Tool total has an output schema but did not return structured content")

    monkeypatch.setattr(Server, "_call", breaks)
    loop = asyncio.get_running_loop()
    server = Server(ServerSettings("maths"), lambda work: asyncio.run_coroutine_threadsafe(work, loop))
    with pytest.raises(InfrastructureError, match="mcp_bad_response:maths.*structured content"):
        await server.call("total", {})
