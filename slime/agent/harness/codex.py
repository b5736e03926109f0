"""Codex against an `OpenAIAdapter`, over its Responses endpoint.

`SLIME_AGENT_NODE_TARBALL` and `SLIME_AGENT_CODEX_TARBALL` name the archives to install from; not needed for images that
bring the command.
"""

from __future__ import annotations

import json
import shlex

from slime.agent.harness.common import (
    AGENT_HOME,
    BaseHarness,
    HarnessContext,
    host_file,
    install_npm_cli,
    run_agent,
    write_prompt,
)
from slime.agent.sandbox import AGENT_USER, Sandbox

KEY_VARIABLE = "SLIME_AGENT_SESSION"
_CHECK = "codex --version"
_STREAM_IDLE_TIMEOUT_MS = 3_600_000
_HOME = f"{AGENT_HOME}/.codex"


class CodexHarness(BaseHarness):
    """`codex exec` without approvals; the sandbox around it is the protection."""

    name = "codex"

    async def install_cli(self, sb: Sandbox) -> None:
        """See `BaseHarness.install_cli`."""
        if (await sb.exec(_CHECK))[0] != 0:
            node, package = host_file("NODE_TARBALL"), host_file("CODEX_TARBALL")
            await install_npm_cli(sb, node_runtime=node, npm_package=package, check_cmd=_CHECK)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """A provider of its own, so that no account is asked for."""
        await sb.exec(f"mkdir -p {_HOME}", user=AGENT_USER, check=True)
        await sb.write_file(f"{_HOME}/config.toml", config_toml(ctx), user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """See `BaseHarness.launch_and_wait`."""
        path = await write_prompt(sb, self.name, prompt)
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=start_command(path),
            env=environment(ctx),
            time_budget_sec=time_budget_sec,
        )


def start_command(prompt_file: str) -> str:
    """The command line."""
    options = "--json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
    return f"codex exec {options} - < {shlex.quote(prompt_file)}"


def environment(ctx: HarnessContext) -> dict[str, str]:
    """The session id travels as the provider's key."""
    return {KEY_VARIABLE: ctx.session_id, "CODEX_HOME": _HOME}


def config_toml(ctx: HarnessContext) -> str:
    """Codex's configuration; strings in JSON's spelling are TOML strings as well."""
    return "\n".join(
        [
            f"model = {json.dumps(ctx.model_label)}",
            'model_provider = "slime"',
            "",
            "[model_providers.slime]",
            'name = "slime"',
            f"base_url = {json.dumps(ctx.adapter_url + '/v1')}",
            f"env_key = {json.dumps(KEY_VARIABLE)}",
            'wire_api = "responses"',
            f"stream_idle_timeout_ms = {_STREAM_IDLE_TIMEOUT_MS}",
            "request_max_retries = 2",
            "",
        ]
    )
