"""Counting of failures by reason and the limit that stops a run."""

from __future__ import annotations

import pytest

from agentic.common.errors import RoleTimeout, TooManyFailures, Unscored
from agentic.common.failures import check_failure_rate, count_failures, failure_reason, mark_failed
from slime.utils.types import Sample


def batch(failed: int) -> list[list[Sample]]:
    samples = [Sample(index=i, metadata={"question": "q"}) for i in range(8)]
    for i in range(failed):
        mark_failed(samples[i], RoleTimeout("executor", "no answer") if i else Unscored("no verdict"))
    return [samples[:4], samples[4:]]


def test_mark_failed_takes_the_sample_out_and_keeps_its_metadata() -> None:
    sample = batch(1)[0][0]
    assert sample.remove_sample and sample.status == Sample.Status.ABORTED
    assert sample.metadata == {"question": "q", "failure_reason": "unscored", "failure_detail": "no verdict"}
    assert failure_reason(sample) == "unscored" and failure_reason(Sample()) is None


def test_counts_by_reason_in_nested_groups() -> None:
    assert count_failures(batch(3)) == {"unscored": 1, "role_timeout:executor": 2}
    assert check_failure_rate(batch(4), 0.5).total() == 4
    assert check_failure_rate([], 0.0).total() == 0


def test_more_than_the_limit_stops_with_the_reasons() -> None:
    with pytest.raises(
        TooManyFailures, match=r"5 of 8 rollouts failed \(limit 50%\): role_timeout:executor x4, unscored x1"
    ):
        check_failure_rate(batch(5), 0.5)
