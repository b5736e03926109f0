"""Long commands in a real shell, E2B through a stand-in of its SDK, and what the harnesses run."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent import sandbox
from slime.agent.engine import agent_env, agent_env_number
from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness, HarnessContext, claude_code, codex
from slime.agent.harness.common import AGENT_HOME, install_npm_cli, run_agent
from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    CommandFailed,
    E2BSandbox,
    ExecResult,
    ensure_agent_user,
    exec_and_wait,
)


class ShellSandbox:
    """A sandbox that is this machine's shell; `user` is noted, not changed."""

    sandbox_id = "shell"

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def exec(
        self, cmd: str, *, env: Any = None, timeout: int = 120, check: bool = False, **_: Any
    ) -> ExecResult:
        self.commands.append(cmd)
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", cmd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout)
        if check and process.returncode:
            raise CommandFailed(err.decode())
        return ExecResult(process.returncode or 0, out.decode(), err.decode())

    async def write_file(self, sandbox_path: str, content: Any, **_: Any) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        await asyncio.to_thread(Path(sandbox_path).write_bytes, data)

    async def read_file(self, sandbox_path: str, **_: Any) -> str:
        return await asyncio.to_thread(Path(sandbox_path).read_text)


async def test_a_command_runs_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    code, output = await exec_and_wait(
        ShellSandbox(),
        cmd='echo "$GREETING from $(basename "$PWD")"; echo err >&2; exit 3',
        time_budget_sec=20,
        tag="t",
        env={"GREETING": "it's", "PATH": "/usr/bin:/bin"},
        workdir=str(tmp_path),
        out_file=str(out),
        want_output=True,
    )
    assert (code, output) == (3, f"it's from {tmp_path.name}\nerr\n")
    assert out.read_text() == output


async def test_a_missing_workdir_is_an_exit_code() -> None:
    code, output = await exec_and_wait(
        ShellSandbox(), cmd="echo no", time_budget_sec=20, tag="t", workdir="/does/not/exist", want_output=True
    )
    assert code != 0 and "no such file" in output.lower()


async def test_a_command_past_its_budget_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_KILL_GRACE_SEC", 0.1)
    child = tmp_path / "child.pid"
    cmd = f"sleep 300 & echo $! > {shlex.quote(str(child))}; wait"
    code, output = await exec_and_wait(ShellSandbox(), cmd=cmd, time_budget_sec=1, tag="t")
    assert (code, output) == (EXIT_TIME_BUDGET_EXCEEDED, "")
    for _ in range(100):
        state = Path(f"/proc/{child.read_text().strip()}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


class MarkerSandbox(ShellSandbox):
    """Answers the exit-code file from a script."""

    def __init__(self, markers: list[str]) -> None:
        super().__init__()
        self.markers = markers

    async def exec(self, cmd: str, **_: Any) -> ExecResult:
        return ExecResult(0, self.markers.pop(0) if cmd.startswith("cat ") else "")

    async def write_file(self, sandbox_path: str, content: Any, **_: Any) -> None:
        return None


async def test_an_empty_exit_code_means_not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_FIRST_POLL_SEC", 0.0)
    assert await exec_and_wait(MarkerSandbox(["", "\n", "x", "137\n"]), cmd="c", time_budget_sec=9, tag="t") == (
        137,
        "",
    )


async def test_agent_user_owns_the_workdir() -> None:
    noted = MarkerSandbox([])
    seen: list[str] = []

    async def note(cmd: str, **options: Any) -> ExecResult:
        seen.append(cmd)
        assert options["user"] == "root" and options["check"]
        return ExecResult(0, "")

    noted.exec = note  # type: ignore[method-assign]
    await ensure_agent_user(noted, "/repo with blank")
    assert "useradd" in seen[0] and f"chown -R agent {AGENT_HOME} '/repo with blank'" in seen[0]


def fake_e2b(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any]) -> dict[str, Any]:
    """Puts a stand-in of E2B's SDK in place; `outcomes` are what its calls raise or return, one after the other."""
    made: dict[str, Any] = {"killed": 0, "calls": []}

    async def answer(*args: Any, **kwargs: Any) -> Any:
        made["calls"].append((args, kwargs))
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def kill() -> None:
        made["killed"] += 1

    async def create(**options: Any) -> Any:
        made["options"] = options
        commands, files = SimpleNamespace(run=answer), SimpleNamespace(read=answer, write=answer)
        return SimpleNamespace(sandbox_id="sb-1", commands=commands, files=files, kill=kill)

    module = ModuleType("e2b")
    module.SandboxException = type("SandboxException", (Exception,), {})  # type: ignore[attr-defined]
    module.CommandExitException = type("CommandExitException", (Exception,), {})  # type: ignore[attr-defined]
    module.AsyncSandbox = SimpleNamespace(create=create)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "e2b", module)
    monkeypatch.setattr(sandbox, "_RETRY_DELAY_SEC", 0.0)
    return made


async def test_e2b_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = []
    made = fake_e2b(monkeypatch, outcomes)
    sdk = sys.modules["e2b"]
    failed = sdk.CommandExitException()
    failed.exit_code, failed.stdout, failed.stderr = 2, "", "bad"
    async with E2BSandbox("img", timeout=60, image_metadata_key="image", size="large") as sb:
        assert sb.sandbox_id == "sb-1"
        outcomes += [sdk.SandboxException("lost"), SimpleNamespace(exit_code=0, stdout="ok", stderr="")]
        assert await sb.exec("c", env={"A": "1"}) == (0, "ok", "")
        assert made["calls"][-1] == (("c",), {"user": "root", "envs": {"A": "1"}, "timeout": 120})
        outcomes += [failed, failed]
        assert (await sb.exec("c")).exit_code == 2
        with pytest.raises(CommandFailed, match="exit code 2"):
            await sb.exec("c", check=True)
        outcomes += [sdk.SandboxException("lost")]
        with pytest.raises(sdk.SandboxException):
            await sb.exec("c", idempotent=False)
        outcomes += [None, "text"]
        await sb.write_file("/f", "text")
        assert await sb.read_file("/f") == "text"
    assert made["options"] == {"timeout": 60, "metadata": {"image": "img", "size": "large"}}
    assert made["killed"] == 1
    with pytest.raises(RuntimeError, match="async with"):
        await sb.exec("c")


async def test_e2b_template_is_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_e2b(monkeypatch, [])
    monkeypatch.setenv("SWE_SANDBOX_TIMEOUT_SEC", "90")
    async with E2BSandbox("img"):
        assert made["options"] == {"timeout": 90, "metadata": {}, "template": "img"}


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ImportError, match="pip install e2b"):
        E2BSandbox("img")


def test_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWE_THING", "old")
    assert agent_env("THING") == "old"
    monkeypatch.setenv("SLIME_AGENT_THING", "new")
    assert agent_env("THING") == "new" and agent_env("OTHER", "d") == "d"
    with pytest.raises(ValueError, match="SLIME_AGENT_THING='new'"):
        agent_env_number("THING", 1)


# --------------------------------------------------------------------------------------------------------------------
# Harnesses

CTX = HarnessContext("/repo", "sid-1", "http://10.0.0.1:99")


class NotingSandbox(ShellSandbox):
    """Notes everything; commands of `missing` fail, all others succeed at once."""

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.missing, self.files, self.environments = list(missing), {}, []  # type: ignore[var-annotated]

    async def exec(self, cmd: str, *, env: Any = None, **_: Any) -> ExecResult:
        self.commands.append(cmd)
        self.environments.append(env)
        if cmd in self.missing:
            self.missing.remove(cmd)
            return ExecResult(127, "")
        return ExecResult(0, "0" if cmd.startswith("cat ") else "")

    async def write_file(self, sandbox_path: str, content: Any, **_: Any) -> None:
        self.files[sandbox_path] = content


async def run_harness(harness: BaseHarness) -> NotingSandbox:
    sb = NotingSandbox()
    code = await harness.run(
        sb,
        workdir="/repo",
        session_id="sid-1",
        adapter_url="http://10.0.0.1:99/",
        time_budget_sec=5,
        prompt="$(rm) 'x'",
    )
    assert code == 0
    assert sb.files[f"{AGENT_HOME}/{harness.name}_prompt.txt"] == "$(rm) 'x'"
    assert not any("rm)" in command for command in sb.commands)
    return sb


async def test_claude_code() -> None:
    sb = await run_harness(ClaudeCodeHarness())
    script = next(text for path, text in sb.files.items() if path.endswith(".sh"))
    assert "cd /repo && bash -c" in script and "claude --print --model slime-actor" in script
    env = next(env for env in sb.environments if env)
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"]) == ("http://10.0.0.1:99", "sid-1")
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and env["HOME"] == AGENT_HOME
    assert claude_code.start_command(CTX, "/p").endswith("--dangerously-skip-permissions < /p")


async def test_codex() -> None:
    sb = await run_harness(CodexHarness())
    config = tomllib.loads(sb.files[f"{AGENT_HOME}/.codex/config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://10.0.0.1:99/v1" and provider["wire_api"] == "responses"
    env = next(env for env in sb.environments if env)
    assert env[provider["env_key"]] == "sid-1"
    assert codex.start_command("/p").startswith("codex exec --json") and codex.start_command("/p").endswith("- < /p")


async def test_installing_needs_archives_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="SLIME_AGENT_NODE_TARBALL"):
        await ClaudeCodeHarness().install_cli(NotingSandbox(("claude --version",)))
    for name in ("node.tar.xz", "cli.tgz"):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(tmp_path / "node.tar.xz"))
    monkeypatch.setenv("SLIME_AGENT_CODEX_TARBALL", str(tmp_path / "cli.tgz"))
    check_node = "node --version 2>/dev/null | grep -q '^v22'"
    sb = NotingSandbox(("codex --version", "codex --version", check_node))
    await CodexHarness().install_cli(sb)
    assert sb.files == {"/tmp/node.tar.xz": b"node.tar.xz", "/tmp/cli.tgz": b"cli.tgz"}
    assert any("tar -xf /tmp/node.tar.xz" in c for c in sb.commands)
    assert any("npm install --global --offline" in c and "/tmp/cli.tgz" in c for c in sb.commands)


async def test_nothing_is_installed_twice() -> None:
    sb = NotingSandbox()
    await install_npm_cli(sb, node_runtime=Path("/none"), npm_package=Path("/none"), check_cmd="claude --version")
    assert sb.commands == ["claude --version"] and not sb.files


def test_harnesses_are_singletons_and_the_base_is_abstract() -> None:
    assert ClaudeCodeHarness() is ClaudeCodeHarness() and ClaudeCodeHarness() is not CodexHarness()
    with pytest.raises(TypeError, match="abstract"):
        BaseHarness()  # type: ignore[abstract]


async def test_run_agent_returns_the_exit_code() -> None:
    assert await run_agent(NotingSandbox(), workdir="/repo", start_cmd="x", env={}, time_budget_sec=3) == 0
