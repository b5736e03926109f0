"""What a dynamic filter returns, how it is called, and the count of what it dropped.

Input: one finished group, whose members are samples or (after fan-out) lists of samples.
Left out: the decision itself; see `dynamic_sampling_filters` for the shipped ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """Verdict on one group. `keep_when_insufficient` keeps a rejected group when dropping it would need a refill."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """True when the group must be dropped; `remaining_batch_size` counts groups kept or still in flight."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Calls the filter; no filter keeps everything, a bool is wrapped."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


class MetricGatherer:
    """Counts dropped groups by reason over one rollout."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Counts one drop; a drop without a reason is not counted."""
        if reason is not None:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """The counts as `rollout/dynamic_filter/drop_<reason>` metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}
