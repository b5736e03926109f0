"""Failures are counted by reason and stop the run when there are too many; they are never a reward of zero.

Input: finished samples, flat or in groups; a failed one carries `metadata["failure_reason"]` (see `mark_failed`).
Left out: deciding what is a failure (the rollout boundary of each method does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from agentic.common.errors import AgenticError, TooManyFailures
from slime.utils.types import Sample

FAILURE_KEY = "failure_reason"
DETAIL_KEY = "failure_detail"


def mark_failed(sample: Sample, error: AgenticError) -> Sample:
    """Take the sample out of training: reason and detail in its metadata, `remove_sample`, status ABORTED."""
    sample.metadata = {**(sample.metadata or {}), FAILURE_KEY: error.reason, DETAIL_KEY: str(error)}
    sample.remove_sample = True
    sample.status = Sample.Status.ABORTED
    return sample


def failure_reason(sample: Sample) -> str | None:
    """The reason `mark_failed` recorded, or None for a sample that counts."""
    return (sample.metadata or {}).get(FAILURE_KEY)


def count_failures(samples: Iterable[Any]) -> Counter[str]:
    """Number of failed samples by reason; `samples` may be nested in groups."""
    reasons = (failure_reason(sample) for sample in _flat(samples))
    return Counter(reason for reason in reasons if reason is not None)


def check_failure_rate(samples: Iterable[Any], limit: float) -> Counter[str]:
    """Return the counts; raise TooManyFailures when more than the share `limit` (0 to 1) of the samples failed."""
    flat = list(_flat(samples))
    counts = count_failures(flat)
    failed = sum(counts.values())
    if failed > limit * len(flat):
        reasons = ", ".join(f"{reason} x{count}" for reason, count in counts.most_common())
        raise TooManyFailures(
            f"{failed} of {len(flat)} rollouts failed (limit {limit:.0%}): {reasons}; "
            f"look at metadata['{DETAIL_KEY}'] of the samples and at the role servers' logs"
        )
    return counts


def _flat(samples: Iterable[Any]) -> Iterator[Sample]:
    for item in samples:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
