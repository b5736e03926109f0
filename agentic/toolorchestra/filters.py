"""The three filters of ToolOrchestra (arXiv 2511.21689, section 3.2) and the clip of advantages, as pure functions.

All are applied after the advantages were computed over the full group, so that what is left out still counts in mean and
standard deviation:
* homogeneity: a group whose rewards hardly differ teaches nothing; its rollouts are not trained;
* format: a turn without a valid call or message is not trained; a rollout without any valid turn is not trained at all;
* invalid output: a rollout that never gave an answer, or has no evaluation result, is not trained.
Failed rollouts, and those that the simulated user left because its scenario said nothing, are no matter of filters: they
have no reward. Leaves out: building rows (`convert`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

# Why a rollout is not trained, in the order in which the reasons are looked for.
FAILED, OUT_OF_SCOPE = "failed", "out_of_scope"
HOMOGENEOUS, INVALID, MALFORMED = "homogeneous", "invalid_output", "malformed"
REASONS = (FAILED, OUT_OF_SCOPE, HOMOGENEOUS, INVALID, MALFORMED)


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def homogeneous_groups(
    rewards: Sequence[float | None], groups: Sequence[Hashable], min_std: float = 0.1
) -> set[Hashable]:
    """Groups to leave out: the sample standard deviation of their rewards is not above `min_std`.

    None is the reward of a failed rollout; a group with none but failed ones is left out as well.
    """
    members: dict[Hashable, list[float]] = {group: [] for group in groups}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    return {group for group, values in members.items() if not sample_std(values) > min_std}


def clip_advantages(advantages: Sequence[float], limit: float = 3.0) -> list[float]:
    """Into [-limit, limit]."""
    return [min(max(advantage, -limit), limit) for advantage in advantages]


@dataclass(frozen=True)
class Span:
    """One turn of the policy inside a response: tokens [start, end), and whether it had a valid call or message."""

    start: int
    end: int
    format_ok: bool


def mask_malformed(mask_R: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """A copy of the loss mask (one entry per response token) with the tokens of malformed turns at 0.

    Raises ValueError when a span does not lie inside the response.
    """
    masked = list(mask_R)
    for span in spans:
        if not 0 <= span.start <= span.end <= len(masked):
            raise ValueError(f"turn [{span.start}, {span.end}) lies outside a response of {len(masked)} tokens")
        if not span.format_ok:
            masked[span.start : span.end] = [0] * (span.end - span.start)
    return masked


def filter_report(reasons: Sequence[str | None], groups: Sequence[Hashable], malformed_turns: int) -> dict[str, Any]:
    """Counts for the log; `reasons` has one entry per rollout, None for a trained one."""
    counts = Counter(reason for reason in reasons if reason is not None)
    dropped = {group for reason, group in zip(reasons, groups, strict=True) if reason == HOMOGENEOUS}
    return {
        "rollouts": len(reasons),
        "trained": len(reasons) - sum(counts.values()),
        **{reason: counts[reason] for reason in REASONS},
        "groups": len(set(groups)),
        "homogeneous_groups": len(dropped),
        "malformed_turns": malformed_turns,
    }
