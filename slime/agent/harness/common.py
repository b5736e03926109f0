"""What every harness does: install a command-line agent, write its configuration, run it on a prompt.

Inputs: a sandbox, and the adapter's address as the sandbox sees it; the session id travels as the agent's API key.
Invariants: nothing is downloaded inside the sandbox, the archives come from this machine; the agent runs as a user without
privileges. Leaves out: what the agent did (the adapter knows it) and whether it was right.
"""

from __future__ import annotations

import asyncio
import shlex
from abc import ABC, ABCMeta, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from slime.agent.engine import agent_env
from slime.agent.sandbox import AGENT_USER, Sandbox, ensure_agent_user, exec_and_wait
from slime.utils.misc import SingletonMeta

AGENT_HOME = f"/home/{AGENT_USER}"
_INSTALL_TIMEOUT_SEC = 600


class SingletonABCMeta(ABCMeta, SingletonMeta):
    """An abstract class of which every concrete subclass has one instance."""


@dataclass
class HarnessContext:
    """Where an agent works and whom it asks."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"
    """The name under which the agent asks for its model; the adapter takes any."""


class BaseHarness(ABC, metaclass=SingletonABCMeta):
    """One command-line agent. Stateless, so that one instance serves all rollouts."""

    name: str = ""

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Make the agent's command available; does nothing when it is."""

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Point the agent at the adapter, as far as files do it."""

    @abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run the agent on `prompt`, at most `time_budget_sec` seconds; its exit code."""

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: int,
        prompt: str,
    ) -> int:
        """Everything in order; the agent's exit code, `EXIT_TIME_BUDGET_EXCEEDED` when it was ended."""
        ctx = HarnessContext(workdir=workdir, session_id=session_id, adapter_url=adapter_url.rstrip("/"))
        await self.install_cli(sb)
        await ensure_agent_user(sb, workdir)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)


async def run_agent(sb: Sandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: int) -> int:
    """Run an agent's command as the agent user; its exit code."""
    environment = {"HOME": AGENT_HOME, **env}
    exit_code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        time_budget_sec=time_budget_sec,
        tag="agent",
        user=AGENT_USER,
        env=environment,
        workdir=workdir,
    )
    return exit_code


async def install_npm_cli(sb: Sandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Install a packed npm package (`npm pack`) with Node 22 from `node_runtime`; nothing when `check_cmd` succeeds."""
    if (await sb.exec(check_cmd))[0] == 0:
        return
    await install_node22(sb, node_runtime)
    remote = f"/tmp/{npm_package.name}"
    await sb.write_file(remote, await asyncio.to_thread(npm_package.read_bytes))
    install = f"npm install --global --offline --no-audit --no-fund {shlex.quote(remote)}"
    await sb.exec(install, timeout=_INSTALL_TIMEOUT_SEC, check=True)
    await sb.exec(check_cmd, check=True)


async def install_node22(sb: Sandbox, host_tarball: Path) -> None:
    """Unpack a Node 22 archive (`node-v22*-linux-*.tar.gz` or `.tar.xz`) into /usr/local; nothing when Node 22 is there."""
    if (await sb.exec("node --version 2>/dev/null | grep -q '^v22'"))[0] == 0:
        return
    remote = f"/tmp/{host_tarball.name}"
    await sb.write_file(remote, await asyncio.to_thread(host_tarball.read_bytes))
    unpack = f"tar -xf {shlex.quote(remote)} -C /usr/local --strip-components=1"
    await sb.exec(unpack, timeout=_INSTALL_TIMEOUT_SEC, check=True)


async def write_prompt(sb: Sandbox, name: str, prompt: str) -> str:
    """Put the prompt into a file, so that no shell reads it; returns the path."""
    path = f"{AGENT_HOME}/{name}_prompt.txt"
    await sb.write_file(path, prompt, user=AGENT_USER)
    return path


def host_file(name: str) -> Path:
    """The file of this machine that `SLIME_AGENT_<name>` names. Raises FileNotFoundError."""
    path = agent_env(name)
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"SLIME_AGENT_{name}={path!r}: set it to an archive on this machine")
    return Path(path)
