"""Claude Code against an `AnthropicAdapter`.

`SLIME_AGENT_NODE_TARBALL` and `SLIME_AGENT_CLAUDE_CODE_TARBALL` name the archives to install from; not needed for images
that bring the command.
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

_CHECK = "claude --version"
_REQUEST_TIMEOUT_MS = 3_600_000


class ClaudeCodeHarness(BaseHarness):
    """`claude --print` without permission prompts."""

    name = "claude_code"

    async def install_cli(self, sb: Sandbox) -> None:
        """See `BaseHarness.install_cli`."""
        if (await sb.exec(_CHECK))[0] != 0:
            node, package = host_file("NODE_TARBALL"), host_file("CLAUDE_CODE_TARBALL")
            await install_npm_cli(sb, node_runtime=node, npm_package=package, check_cmd=_CHECK)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Skip the first-run dialogues."""
        state = {"hasCompletedOnboarding": True, "projects": {ctx.workdir: {"hasTrustDialogAccepted": True}}}
        await sb.write_file(f"{AGENT_HOME}/.claude.json", json.dumps(state), user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """See `BaseHarness.launch_and_wait`."""
        path = await write_prompt(sb, self.name, prompt)
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=start_command(ctx, path),
            env=environment(ctx),
            time_budget_sec=time_budget_sec,
        )


def start_command(ctx: HarnessContext, prompt_file: str) -> str:
    """The command line."""
    model = shlex.quote(ctx.model_label)
    options = f"--model {model} --output-format stream-json --verbose --dangerously-skip-permissions"
    return f"claude --print {options} < {shlex.quote(prompt_file)}"


def environment(ctx: HarnessContext) -> dict[str, str]:
    """The agent asks the adapter for everything, and nobody else."""
    return {
        "ANTHROPIC_BASE_URL": ctx.adapter_url,
        "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
        "ANTHROPIC_MODEL": ctx.model_label,
        "ANTHROPIC_SMALL_FAST_MODEL": ctx.model_label,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": ctx.model_label,
        "API_TIMEOUT_MS": str(_REQUEST_TIMEOUT_MS),
        # A line with a changing hash at the start of the system prompt would make every prompt a new one.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",
    }
