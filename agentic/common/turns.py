"""One model call of the policy, exactly as the engine saw it.

Inputs: the ids sent to the engine, and the ids and log-probs it returned.
Invariants: `tokens` is prompt ids followed by response ids; mask and log-probs are aligned to the response and of
its length; a response has at least one token; a turn that is not trained has an all-zero mask. Text is for display
and parsing only and is never encoded again.
Left out: rewards and advantages (they belong to trajectories, see `convert`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

FINISH_REASONS = ("stop", "length", "abort")


@dataclass
class TurnRecord:
    """Tokens, mask and engine log-probs of one call (P prompt tokens, R response tokens)."""

    tokens: list[int]
    """Prompt ids then response ids, length P + R."""
    response_length: int
    """R >= 1."""
    loss_mask: list[int]
    """0 or 1 for each response token, length R."""
    rollout_log_probs: list[float]
    """Natural log-probabilities the engine sampled the response tokens with, length R."""
    role: str
    finish_reason: str
    """`stop`, `length` (limit reached) or `abort` (ended by the engine)."""
    text: str = ""
    weight_version: str | None = None
    trained: bool = True
    cached_tokens: int = 0
    """Prompt tokens the engine had in its prefix cache."""

    @classmethod
    def from_engine(
        cls, prompt_ids: list[int], response_ids: list[int], log_probs: list[float], *, trained: bool, **fields_: Any
    ) -> TurnRecord:
        """Join what was sent and what came back; the only place where a record's lists are built.

        Raises ValueError when the lists do not fit together.
        """
        mask = [int(trained)] * len(response_ids)
        record = cls(
            [*prompt_ids, *response_ids], len(response_ids), mask, list(log_probs), trained=trained, **fields_
        )
        record.validate()
        return record

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokens[: self.prompt_length]

    @property
    def response_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def validate(self) -> None:
        """Raise ValueError, naming the role and the numbers, when an invariant of the module is broken."""
        problem = self._problem()
        if problem:
            raise ValueError(f"turn record of role '{self.role}': {problem}")

    def _problem(self) -> str | None:
        sizes = (len(self.loss_mask), len(self.rollout_log_probs), self.response_length)
        if self.response_length < 1:
            return f"response_length is {self.response_length}, must be at least 1"
        if len(set(sizes)) != 1:
            return "loss_mask, rollout_log_probs and response_length differ: {}, {}, {}".format(*sizes)
        if self.response_length > len(self.tokens):
            return f"response_length {self.response_length} exceeds the {len(self.tokens)} tokens"
        if self.finish_reason not in FINISH_REASONS:
            return f"finish_reason '{self.finish_reason}' is none of {', '.join(FINISH_REASONS)}"
        if not set(self.loss_mask) <= ({0, 1} if self.trained else {0}):
            return "loss_mask must hold only 0 and 1, and only 0 in a turn that is not trained"
        if not all(math.isfinite(value) for value in self.rollout_log_probs):
            return "rollout_log_probs holds a value that is not finite"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only, so that it can travel in a sample's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TurnRecord:
        """Inverse of `to_dict`; raises ValueError on unknown keys or broken invariants."""
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"turn record: unknown keys {sorted(unknown)}")
        record = cls(**data)
        record.validate()
        return record
