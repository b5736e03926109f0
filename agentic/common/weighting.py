"""Weight of each trained turn in the loss, expressed as the denominator slime's reducer divides by.

The reducer computes sum_k (x_k * mask_k).sum() / denominator_k and divides by the number G of trajectories, so the
weight of one token of turn k is 1 / (G * denominator_k), the same for policy gradient, KL and entropy.
Input: the mask sums of T trained turns, of one trajectory (`turn_denominators`) or of all of them in the order of the
rows (`step_denominators`, for means over a whole optimiser step). Pure; knows no trajectory, reward or file.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentic.common.errors import ConfigError

TURN_WEIGHTINGS = ("paper", "token_mean", "uniform_turn")
LOSS_NORMS = ("token", "conv", "traj")
TURN_CREDITS = ("broadcast", "amortized")


def turn_denominators(mask_sums_T: Sequence[int], mode: str) -> list[float]:
    """Denominator of each turn of one trajectory, at least 1, in input order.

    `paper`: T * mask_sum_k, the mean over tokens, then turns, then trajectories (AgentFlow, arXiv 2510.05592, eq. of
    Flow-GRPO); `token_mean`: the trajectory's total, every token alike; `uniform_turn`: mask_sum_k, every turn weighs
    as much as a whole single-turn trajectory. T counts turns with at least one unmasked token.
    Raises ConfigError for an unknown mode, ValueError for a negative sum.
    """
    _check_name("turn_weighting", mode, TURN_WEIGHTINGS)
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


def step_denominators(
    mask_sums: Sequence[Sequence[int]], rollouts_per_step: int, loss_norm: str, turn_credit: str
) -> list[list[float]]:
    """Denominator of each turn of all trajectories; consecutive `rollouts_per_step` (G) of them are one optimiser step.

    With N tokens and M turns in the step, n_i tokens and T_i turns in trajectory i, and l tokens in the turn:
    `token`: N / G, every token weighs 1 / N (MemAgent, arXiv 2507.02259, the Multi-Conv DAPO objective);
    `conv`: M l / G, the mean over turns of their token means;
    `traj`: n_i, the mean over trajectories of their token means.
    `broadcast` gives every turn the whole advantage, `amortized` the T_i-th part of it; because it is the weight that
    is divided, the KL term shrinks with the policy gradient. A turn without tokens gets 1.
    A denominator below 1, which slime's reducer would raise to 1, needs a step with hardly any real rollout.
    Raises ConfigError for an unknown name, ValueError for a negative sum or a step without rollouts.
    """
    _check_name("loss_norm", loss_norm, LOSS_NORMS)
    _check_name("turn_credit", turn_credit, TURN_CREDITS)
    if rollouts_per_step < 1:
        raise ValueError(f"{rollouts_per_step} rollouts in a step")
    if any(mask_sum < 0 for turns in mask_sums for mask_sum in turns):
        raise ValueError(f"negative mask sum in {[list(turns) for turns in mask_sums]}")
    denominators: list[list[float]] = []
    for start in range(0, len(mask_sums), rollouts_per_step):
        step = mask_sums[start : start + rollouts_per_step]
        tokens = sum(map(sum, step))
        turns_M = sum(mask_sum > 0 for turns in step for mask_sum in turns)
        for turns in step:
            parts = sum(mask_sum > 0 for mask_sum in turns) if turn_credit == "amortized" else 1
            by_norm = {
                "token": [tokens / rollouts_per_step] * len(turns),
                "conv": [turns_M * mask_sum / rollouts_per_step for mask_sum in turns],
                "traj": [float(sum(turns))] * len(turns),
            }
            pairs = zip(turns, by_norm[loss_norm], strict=True)
            denominators.append([parts * denominator if mask_sum else 1.0 for mask_sum, denominator in pairs])
    return denominators


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"{what} '{name}' is none of {', '.join(known)}")
