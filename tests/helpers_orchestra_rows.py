"""Finished ToolOrchestra samples as `rollout.generate` leaves them, built by hand."""

from __future__ import annotations

from typing import Any

from slime.utils.types import Sample

# The worked group: search count, answer count, outcome, dollars, seconds.
GROUP = {"A": (2, 1, 1, 0.04, 30), "B": (0, 1, 1, 0.01, 10), "C": (1, 1, 0, 0.02, 20), "D": (4, 1, 1, 0.09, 70)}
OUTCOME_ONLY = {"outcome": 1.0}
THRIFTY = {"outcome": 1.0, "cost": 0.5, "latency": 0.5}


def episode(
    search: int = 0,
    answer: int = 1,
    outcome: float = 1,
    dollars: float = 0.0,
    seconds: float = 0.0,
    pref_vec: dict[str, float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """`metadata["orch"]` of a finished rollout."""
    counts = {name: n for name, n in (("search-1", search), ("answer-1", answer)) if n}
    record = {"counts": counts, "outcome": float(outcome), "dollars": dollars, "seconds": float(seconds)}
    record |= {"pref_vec": THRIFTY if pref_vec is None else pref_vec, "turns": 2, "format_ok": True}
    return record | {"format_errors": 0, "valid_answer": True, "termination": "answer", "breakdown": {}} | more


def finished(index: int, record: dict[str, Any], group: int = 0, **fields: Any) -> Sample:
    """A sample with that episode; tokens are left to the caller."""
    sample = Sample(index=index, group_index=group, rollout_id=index, metadata={"orch": record})
    sample.status = Sample.Status.COMPLETED
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample
