"""pass^k: the chance that k independent trials of a task all succeed, averaged over tasks.

Input: rewards of every trial of every task, None for a trial that an infrastructure failure ended.
Invariants: no task is dropped; k goes up to the smallest number of scored trials of any task; a failed trial is
missing, never a zero, and is reported. Leaves out: confidence intervals (`agentic.common.evaluation_statistics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

SUCCESS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class PassHat:
    """Result over a set of tasks."""

    values: dict[int, float]
    """k -> pass^k; empty when some task has no scored trial."""
    tasks: int
    trials: int
    """Scored trials of all tasks."""
    missing: int
    """Trials lost to infrastructure failures."""


def is_success(reward: float) -> bool:
    """tau2's rule: the reward is 1 up to rounding."""
    return abs(reward - 1.0) <= SUCCESS_TOLERANCE


def pass_hat_k(trials: int, successes: int, k: int) -> float:
    """`C(successes, k) / C(trials, k)` for one task.

    Raises ValueError when k is below 1 or above the number of trials, or successes are not within 0..trials.
    """
    if not 1 <= k <= trials:
        raise ValueError(f"pass^{k} needs at least {max(k, 1)} trials of the task and k >= 1, has {trials} trials")
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    return comb(successes, k) / comb(trials, k)


def pass_hat(rewards: Mapping[str, Sequence[float | None]]) -> PassHat:
    """pass^1 .. pass^n over all tasks, n being the smallest number of scored trials. Raises ValueError without tasks."""
    if not rewards:
        raise ValueError("pass^k of no tasks")
    scored = [[reward for reward in trials if reward is not None] for trials in rewards.values()]
    missing = sum(len(trials) for trials in rewards.values()) - sum(map(len, scored))
    values = {k: _mean_over_tasks(scored, k) for k in range(1, min(map(len, scored)) + 1)}
    return PassHat(values, len(scored), sum(map(len, scored)), missing)


def _mean_over_tasks(scored: Sequence[Sequence[float]], k: int) -> float:
    return sum(pass_hat_k(len(trials), sum(map(is_success, trials)), k) for trials in scored) / len(scored)
