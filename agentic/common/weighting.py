"""Weight of each trained turn in the loss, expressed as the denominator slime's reducer divides by.

The reducer computes sum_k (x_k * mask_k).sum() / denominator_k and divides by the number G of trajectories, so the
weight of one token of turn k is 1 / (G * denominator_k), the same for policy gradient, KL and entropy.
Input: the mask sums of one trajectory's T trained turns. Pure; knows no trajectory, reward or file.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentic.common.errors import ConfigError

TURN_WEIGHTINGS = ("paper", "token_mean", "uniform_turn")


def turn_denominators(mask_sums_T: Sequence[int], mode: str) -> list[float]:
    """Denominator of each turn of one trajectory, at least 1, in input order.

    `paper`: T * mask_sum_k, the mean over tokens, then turns, then trajectories (AgentFlow, arXiv 2510.05592, eq. of
    Flow-GRPO); `token_mean`: the trajectory's total, every token alike; `uniform_turn`: mask_sum_k, every turn weighs
    as much as a whole single-turn trajectory. T counts turns with at least one unmasked token.
    Raises ConfigError for an unknown mode, ValueError for a negative sum.
    """
    if mode not in TURN_WEIGHTINGS:
        raise ConfigError(f"turn_weighting '{mode}' is none of {', '.join(TURN_WEIGHTINGS)}")
    if any(mask_sum < 0 for mask_sum in mask_sums_T):
        raise ValueError(f"negative mask sum in {list(mask_sums_T)}")
    turns = sum(mask_sum > 0 for mask_sum in mask_sums_T)
    total = sum(mask_sums_T)
    by_mode = {
        "paper": [turns * mask_sum for mask_sum in mask_sums_T],
        "token_mean": [total] * len(mask_sums_T),
        "uniform_turn": list(mask_sums_T),
    }
    return [float(max(denominator, 1)) for denominator in by_mode[mode]]
