"""The coder: a frozen model writes a program for the query, the sandbox runs it.

Inputs: the query. Invariants: the program never runs in this process and is not rewritten; output printed before a
failure is kept. Leaves out: state between calls; every program is fresh.
"""

from __future__ import annotations

from typing import Any, ClassVar

from agentic.agentflow.memory import truncate_middle
from agentic.agentflow.parsing import extract_program
from agentic.agentflow.prompts import PromptSet
from agentic.agentflow.tools.base import Kit, ToolResult, ToolSpec
from agentic.common.clients import FrozenClient
from agentic.common.sandbox import SandboxLimits, SandboxResult, run_python

STDOUT_CHARS = 4096
STDERR_CHARS = 1024


class PythonCoder:
    """Computes exactly by writing and running a short Python program."""

    spec: ClassVar[ToolSpec] = ToolSpec(
        name="python_coder",
        aliases=("python code generator", "python", "coder"),
        description="writes a short Python program for a task, runs it and returns what it prints",
        parameters={"query": "the task in plain words, with all numbers and data; no program code"},
        limitation="no network, no files, no input; a few seconds of run time; knows nothing of earlier steps",
        best_practice="use it for arithmetic, counting, search and symbolic mathematics; say what has to be printed",
        needs_role=True,
    )

    def __init__(self, client: FrozenClient, prompts: PromptSet, limits: SandboxLimits) -> None:
        self._client = client
        self._prompts = prompts
        self._limits = limits

    @classmethod
    def build(cls, kit: Kit) -> PythonCoder:
        return cls(kit.clients["python_coder"], kit.prompts, kit.limits)

    async def run(self, query: str) -> ToolResult:
        """Standard output of the program; after a failure also the end of standard error and the exit code."""
        reply = await self._client.complete(self._prompts.render("python_coder", query=query))
        meta: dict[str, Any] = {"completion_tokens": reply.completion_tokens, "prompt_tokens": reply.prompt_tokens}
        code = extract_program(reply.text)
        if not code:
            return ToolResult(False, "Error: no program was written", meta)
        outcome = await run_python(code, self._limits)
        ok = outcome.exit_code == 0 and not outcome.timed_out and not outcome.truncated
        meta |= {"code": code, "exit_code": outcome.exit_code, "timed_out": outcome.timed_out}
        return ToolResult(ok, describe_outcome(outcome, self._limits), meta)


def describe_outcome(outcome: SandboxResult, limits: SandboxLimits) -> str:
    """The text for the memory: plain output alone when all went well."""
    parts = [truncate_middle(outcome.stdout.strip(), STDOUT_CHARS)]
    if outcome.timed_out:
        parts.append(f"Error: stopped after the time limit of {limits.timeout_s:g} s")
    elif outcome.truncated:
        parts.append(f"Error: stopped, it printed more than {limits.output_bytes} bytes")
    elif outcome.exit_code != 0:
        parts += [f"Error: exit code {outcome.exit_code}", outcome.stderr.strip()[-STDERR_CHARS:]]
    elif not parts[0]:
        parts.append("(the program printed nothing)")
    return "\n".join(part for part in parts if part)
