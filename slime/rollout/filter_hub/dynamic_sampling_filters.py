"""Shipped dynamic filters: drop groups whose rewards are all equal, because they carry no GRPO signal.

Input: a finished group; a member may be a list of samples cut out of one rollout (fan-out).
Invariant: a rollout counts once, however many samples it was cut into; unscored (failed) rollouts do not count.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.rollout.base_types import iter_leaves
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

_STD_EPS = 1e-6


def rollout_rewards(args: Any, group: list[Any]) -> list[float]:
    """One reward per scored rollout of the group: that of its first sample with a reward.

    Samples belong to one rollout when they share a `rollout_id`, or stand in the same nested list without one.
    """
    rewards: dict[Any, float] = {}
    for position, member in enumerate(group):
        for sample in iter_leaves(member):
            key = ("member", position) if sample.rollout_id is None else ("rollout", sample.rollout_id)
            if sample.reward is not None:
                rewards.setdefault(key, float(sample.get_reward_value(args)))
    return list(rewards.values())


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keeps a group whose rewards have a Bessel-corrected standard deviation above 1e-6.

    Fewer than two scored rollouts have no spread and are dropped.
    """
    rewards = rollout_rewards(args, samples)
    if len(rewards) >= 2 and torch.tensor(rewards, dtype=torch.float64).std().item() > _STD_EPS:
        return DynamicFilterOutput(keep=True)
    reason = f"zero_std_{round(rewards[0], 1)}" if rewards else "no_scored_rollout"
    return DynamicFilterOutput(keep=False, reason=reason)


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but a rejected group is kept when no spare group is left."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
