"""What a rollout cost, by name: an expert's alias, the policy, a search or sandbox fee.

Inputs: tokens as the servers reported them, seconds, US dollars. Invariants: nothing is ever taken off; a call that
failed adds its time and a failure, never a call or tokens; `dollars` and `seconds` are the sums over all names.
Leaves out: prices (who records knows them) and what the sums mean for the reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class LedgerEntry:
    """Sums of one name."""

    calls: int = 0
    """Calls that were answered."""
    failures: int = 0
    """Calls that were not, after all their retries."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    dollars: float = 0.0


class CostLedger:
    """The account of one rollout; plain JSON through `to_dict`."""

    def __init__(self) -> None:
        self.entries: dict[str, LedgerEntry] = {}

    def record(
        self, alias: str, prompt_tokens: int, completion_tokens: int, seconds: float, dollars: float
    ) -> LedgerEntry:
        """One answered call. Raises ValueError for a negative or not finite number."""
        _check(alias, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        entry = self.charge(alias, dollars, seconds)
        entry.calls += 1
        entry.prompt_tokens += prompt_tokens
        entry.completion_tokens += completion_tokens
        return entry

    def charge(self, alias: str, dollars: float, seconds: float) -> LedgerEntry:
        """Money and time that are no call of a model (a search fee, a sandbox, the rest of a tool's wall clock)."""
        _check(alias, dollars=dollars, seconds=seconds)
        entry = self.entries.setdefault(alias, LedgerEntry())
        entry.dollars += dollars
        entry.seconds += seconds
        return entry

    def fail(self, alias: str, seconds: float) -> LedgerEntry:
        """One call that got no answer; its time is spent, its tokens are unknown and not charged."""
        entry = self.charge(alias, 0.0, seconds)
        entry.failures += 1
        return entry

    @property
    def dollars(self) -> float:
        return sum(entry.dollars for entry in self.entries.values())

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self.entries.values())

    @property
    def counts(self) -> dict[str, int]:
        """Answered calls by name, without the names that have none."""
        return {name: entry.calls for name, entry in self.entries.items() if entry.calls}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """`{name: {calls, failures, prompt_tokens, completion_tokens, seconds, dollars}}`."""
        return {name: asdict(entry) for name, entry in self.entries.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> CostLedger:
        """Inverse of `to_dict`. Raises ValueError for unknown keys."""
        ledger, known = cls(), {field.name for field in fields(LedgerEntry)}
        for name, values in data.items():
            if set(values) - known:
                raise ValueError(f"ledger entry '{name}': unknown keys {sorted(set(values) - known)}")
            ledger.entries[name] = LedgerEntry(**values)
        return ledger


def _check(alias: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"ledger entry '{alias}': {name} is {value!r}, must be a number >= 0")
