"""What the loop and a task environment say to each other.

Inputs: checked tool calls or a message of the policy; outputs: what the policy sees next, and at the end the outcome.
Invariants: an environment belongs to one rollout; it never sees the policy's thoughts; what the policy did wrong is an
observation, what the world did wrong (an expert, the retriever or the user is down) is an `InfrastructureError`.
Leaves out: tokens, templates and budgets (the loop), money and time (`experts` and the ledger).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True)
class ToolCall:
    """What the policy (or an expert) asked for, checked against the schemas of the sample."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """What the policy sees next."""

    kind: Literal["tool", "user", "end"]
    """`end`: the episode is over, nothing follows."""
    texts: tuple[str, ...] = ()
    """One tool result per executed call, in order; or the one text of the user."""


@dataclass(frozen=True)
class Outcome:
    """How the episode ended."""

    reward: float
    """Outcome 0 or 1 (equation 1)."""
    valid_answer: bool
    """QA: `answer` was executed; tau2: there is an evaluation result."""
    termination: str
    """`user_stop`, `answer`, `max_steps`, `too_many_errors`, `turn_limit`, `format_errors`, ..."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Parts of the reward, for the logs."""


class TaskEnvironment(Protocol):
    """One task of one rollout."""

    category: Literal["qa", "func_call"]
    tools: list[dict[str, Any]]
    """OpenAI function schemas offered in this sample."""

    async def start(self) -> list[dict[str, str]]:
        """Chat messages of the first prompt."""
        ...

    async def act(self, calls: Sequence[ToolCall]) -> Observation:
        """Carry out the calls of one turn."""
        ...

    async def say(self, text: str) -> Observation:
        """`func_call`: hand a message to the user. Never called for `qa`."""
        ...

    async def outcome(self, termination: str | None = None) -> Outcome:
        """The result; `termination` is given when the loop ended the episode (`turn_limit`, `truncated`, ...)."""
        ...

    def close(self) -> None:
        """Release what the episode holds; may be called twice."""
        ...


@runtime_checkable
class RebuildsPrompt(Protocol):
    """Optional part of an environment: it writes each turn's prompt from its own state (layout `turns`)."""

    def state_prompt(self) -> list[dict[str, str]]:
        """Chat messages of the next turn; environments without it get the conversation so far."""
        ...
