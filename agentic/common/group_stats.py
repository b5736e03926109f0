"""Group-relative advantages of whole trajectories (GRPO), as a pure function.

Inputs: one reward per trajectory (None when it failed) and the group each belongs to, in any order.
Invariants: a trajectory counts once however many turns it has; a failed one is outside mean and standard deviation
and gets 0; a group without any contrast gets exactly 0, never NaN.
Left out: expansion to turns (`convert`) and the weight of turns (`weighting`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> list[float]:
    """A_i = (R_i - mean_g) / (std_g + eps), or without the division (AgentFlow, arXiv 2510.05592, section 3).

    std is Bessel-corrected. Returns one float per reward, in input order. Raises ValueError when the lengths differ
    or a reward is not finite.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    if any(reward is not None and not math.isfinite(reward) for reward in rewards):
        raise ValueError("a reward is not finite; a failed trajectory has reward None")
    members: dict[Hashable, list[int]] = {}
    for position, (reward, group) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is not None:
            members.setdefault(group, []).append(position)
    advantages = [0.0] * len(rewards)
    for positions in members.values():
        values = [float(rewards[position] or 0.0) for position in positions]
        for position, advantage in zip(positions, _standardise(values, normalize_std, eps), strict=True):
            advantages[position] = advantage
    return advantages


def _standardise(values: list[float], normalize_std: bool, eps: float) -> list[float]:
    if min(values) == max(values):  # covers the single member, and keeps rounding noise out of equal groups
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    centred = [value - mean for value in values]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(values) - 1))
    return [value / (std + eps) for value in centred]
