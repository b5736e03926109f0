"""The loop of AgentFlow for one question (arXiv 2510.05592, section 2).

    q -> analysis -> [ next step -> command -> tool -> memory -> verifier ]*  -> final answer

Inputs: a crew (clients, tools, prompts, settings; shared) and a question. Invariants: memory, trajectory and deadline
belong to one question; the policy is asked only through its token-level client, and every such call leaves one
`TurnRecord`; deadline and token budget are checked before a call; a bad plan, command or tool result is a memory entry
and the loop goes on; a failure of the infrastructure leaves as a typed error, and what was recorded until then stays
in `trajectory`. Leaves out: reward, and the translation to slime's `Sample`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentic.agentflow.crew import Crew
from agentic.agentflow.memory import Memory, truncate_middle
from agentic.agentflow.parsing import (
    Command,
    Malformed,
    NextStep,
    parse_command,
    parse_next_step,
    parse_stop,
    strip_reasoning,
)
from agentic.agentflow.tools import Tool, ToolResult, ToolSpec, execute
from agentic.common.errors import InfrastructureError, PromptTooLong
from agentic.common.turns import TurnRecord

VERIFIER_ERRORS_TO_STOP = 2
MALFORMED_COMMAND_CHARS = 500


class StepOutcome(NamedTuple):
    """One step as it enters the memory."""

    tool_name: str
    sub_goal: str
    command: str
    result: str


@dataclass
class Trajectory:
    """What happened. `turns` are the policy's calls, `trace` all calls in order (plain json types)."""

    question: str
    turns: list[TurnRecord] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    final_output: str = ""
    final_finish_reason: str = ""
    stop_reason: str = "max_steps"
    """Why the loop ended: `verifier`, `max_steps`, `token_budget`, `context_full` or `verifier_error`."""
    tool_seconds: float = 0.0

    @property
    def truncated(self) -> bool:
        """A trained turn or the final answer hit its length limit."""
        cut = any(turn.trained and turn.finish_reason == "length" for turn in self.turns)
        return cut or self.final_finish_reason == "length"

    @property
    def policy_tokens(self) -> int:
        """Prompt and response tokens of all policy calls."""
        return sum(len(turn.tokens) for turn in self.turns)


class Solver:
    """One question, from analysis to final answer. Build a new one for every question."""

    def __init__(self, crew: Crew, question: str, sampling_params: Mapping[str, Any], max_steps: int) -> None:
        config = crew.config
        self.crew = crew
        self.question = question
        self.tools = crew.toolbox.describe()
        self.sampling_params = sampling_params
        self.max_steps = max_steps
        self.trajectory = Trajectory(question)
        self.memory = Memory(crew.prompts, crew.tokenizer, config.max_result_tokens, config.max_memory_tokens)
        self._deadline = time.monotonic() + config.trajectory_timeout_s
        self._verifier_errors = 0
        self._step = 0

    async def solve(self) -> None:
        """Fill `trajectory`.

        Raises:
            InfrastructureError: a role failed after its retries, the engine aborted, or the trajectory's time is over.
            PromptTooLong: the prompt of the analysis, a command or the final answer does not fit into its context.
        """
        analysis = await self._ask_policy("analysis", question=self.question, tools=self.tools)
        for step in range(1, self.max_steps + 1):
            self._step = step
            plan = await self._plan(analysis)
            if plan is None:
                break
            self.memory.add(*await self._act(plan))
            if step < self.max_steps and await self._enough(analysis):
                break
        await self._answer(analysis)

    async def _plan(self, analysis: str) -> NextStep | Malformed | None:
        """The planner's next step; None when a budget leaves no room for it."""
        if self.trajectory.policy_tokens >= self.crew.config.max_trajectory_tokens:
            self.trajectory.stop_reason = "token_budget"
            return None
        left = self.max_steps - self._step
        try:
            reply = await self._ask_policy("next_step", **self._state(analysis), step=self._step, steps_left=left)
        except PromptTooLong:
            self.trajectory.stop_reason = "context_full"
            return None
        return parse_next_step(reply)

    async def _act(self, plan: NextStep | Malformed) -> StepOutcome:
        """Carry out one planned step. What goes wrong on the way is a result like any other."""
        if isinstance(plan, Malformed):
            return StepOutcome("", "", "", self._error("planner_malformed", plan.reason))
        tool = self.crew.toolbox.resolve(plan.tool_name)
        if tool is None:
            reason = f"there is no tool {plan.tool_name[:80]!r}; tools: {', '.join(self.crew.toolbox.names)}"
            return StepOutcome(plan.tool_name[:80], plan.sub_goal, "", self._error("unknown_tool", reason))
        reply = await self._ask_frozen("executor", "command", **self._command_fields(plan, tool.spec))
        commands = parse_command(reply, self.crew.config.max_calls_per_step)
        if isinstance(commands, Malformed):
            shown = truncate_middle(reply, MALFORMED_COMMAND_CHARS)
            return StepOutcome(tool.spec.name, plan.sub_goal, shown, self._error("command_malformed", commands.reason))
        results = [await self._call(tool, command) for command in commands]
        source = "\n".join(command.source for command in commands)
        return StepOutcome(tool.spec.name, plan.sub_goal, source, "\n".join(result.text for result in results))

    async def _call(self, tool: Tool, command: Command) -> ToolResult:
        self._check_deadline()
        start = time.monotonic()
        result = await execute(tool, command.kwargs)
        seconds = time.monotonic() - start
        self.trajectory.tool_seconds += seconds
        self.trajectory.counters["tool_calls"] += 1
        self.trajectory.counters["tool_errors"] += not result.ok
        self._record("tool", result.text, tool_name=tool.spec.name, ok=result.ok, seconds=seconds, **result.meta)
        return result

    async def _enough(self, analysis: str) -> bool:
        """Ask the verifier whether to stop. Its failure means "continue", but not twice in a row."""
        try:
            stop = parse_stop(await self._ask_frozen("verifier", "verify", **self._state(analysis)))
        except (InfrastructureError, PromptTooLong) as error:
            self.trajectory.counters["verifier_error"] += 1
            self._record("verifier", "", error=error.reason)
            self._verifier_errors += 1
            if self._verifier_errors < VERIFIER_ERRORS_TO_STOP:
                return False
            self.trajectory.stop_reason = "verifier_error"
            return True
        self._verifier_errors = 0
        self.trajectory.counters["verdict_missing"] += stop is None
        if stop:
            self.trajectory.stop_reason = "verifier"
        return bool(stop)

    async def _answer(self, analysis: str) -> None:
        """The final answer, by the policy when that turn is trained, else by the frozen generator."""
        fields = {"question": self.question, "analysis": analysis, "memory": self.memory.render()}
        if "final" in self.crew.config.train_roles:
            self.trajectory.final_output = await self._ask_policy("final", **fields)
        else:
            self.trajectory.final_output = await self._ask_frozen("generator", "final", **fields)
        self.trajectory.final_finish_reason = self.trajectory.trace[-1]["finish_reason"]

    async def _ask_policy(self, role: str, **fields: str | int) -> str:
        self._check_deadline()
        start = time.monotonic()
        turn = await self.crew.policy.generate(
            self.crew.prompts.render(role, **fields),
            dict(self.sampling_params),
            role_name=role,
            trained=role in self.crew.config.train_roles,
        )
        self.trajectory.turns.append(turn)
        self._record(
            role,
            turn.text,
            finish_reason=turn.finish_reason,
            trained=turn.trained,
            prompt_tokens=turn.prompt_length,
            completion_tokens=turn.response_length,
            seconds=time.monotonic() - start,
        )
        if turn.finish_reason == "abort":
            raise InfrastructureError("engine_aborted", f"during {role}")
        return strip_reasoning(turn.text)

    async def _ask_frozen(self, role: str, prompt: str, **fields: str | int) -> str:
        self._check_deadline()
        reply = await self.crew.frozen[role].complete(self.crew.prompts.render(prompt, **fields))
        self._record(
            role,
            reply.text,
            finish_reason=reply.finish_reason,
            trained=False,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            seconds=reply.seconds,
        )
        return strip_reasoning(reply.text)

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise InfrastructureError("trajectory_timeout", f"over {self.crew.config.trajectory_timeout_s:g} s")

    def _error(self, counter: str, reason: str) -> str:
        self.trajectory.counters[counter] += 1
        return f"Error: {reason}"

    def _state(self, analysis: str) -> dict[str, str]:
        """What planner and verifier see of the trajectory."""
        memory = self.memory.render()
        return {"question": self.question, "analysis": analysis, "tools": self.tools, "memory": memory}

    def _command_fields(self, plan: NextStep, spec: ToolSpec) -> dict[str, str]:
        fields = {"question": self.question, "sub_goal": plan.sub_goal, "context": plan.context}
        return fields | {"tool_name": spec.name, "tool_metadata": spec.describe()}

    def _record(self, role: str, text: str, **details: Any) -> None:
        self.trajectory.trace.append({"role": role, "step": self._step, "text": text, **details})
