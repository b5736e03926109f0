"""From scored trajectories to the rows slime trains on: one row for each trained turn.

Inputs: `Trajectory` objects in any order.
Invariants:
* advantages are computed over trajectories before expansion, so a long trajectory does not count twice;
* all turns of a trajectory share its rollout id, reward, truncation flag and index; only the masks differ;
* nothing is dropped: a failed trajectory, or one without trained turns, becomes one fully masked one-token row, so
  that the number of rollouts stays what the trainer expects;
* all lists have the same length and their order depends only on trajectory index and turn order.
Left out: padding to the global batch and the split over ranks (slime does both).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic.common.group_stats import group_advantages
from agentic.common.turns import TurnRecord
from agentic.common.weighting import turn_denominators

# Two ids: with an empty prompt the response token would have no logit that predicts it.
STUB_TOKENS = (0, 0)

# Mask sums of the turns of all trajectories, in the order of the rows -> denominators of the same shape.
BatchWeighting = Callable[[list[list[int]]], list[list[float]]]


@dataclass
class Trajectory:
    """One rollout of one prompt."""

    index: int
    """Unique in the batch (slime's sample index); orders the rows."""
    group_index: int
    rollout_id: int
    reward: float | None
    """Raw reward; None when the trajectory failed and must leave the statistics."""
    truncated: bool = False
    turns: list[TurnRecord] = field(default_factory=list)
    """All recorded turns in order; only those with `trained` become rows."""

    def trained_turns(self) -> list[TurnRecord]:
        if self.reward is None:
            return []
        return [turn for turn in self.turns if turn.trained and any(turn.loss_mask)]


def expand_turns(
    trajectories: Sequence[Trajectory], turn_weighting: str | BatchWeighting = "paper", normalize_std: bool = True
) -> dict[str, list[Any]]:
    """Train data as slime's `custom_convert` hook returns it; `rewards` holds the advantages.

    Keys: tokens, response_lengths, loss_masks, rewards, raw_reward, truncated, sample_indices, rollout_ids,
    rollout_mask_sums (see `weighting`), rollout_log_probs. raw_reward is None for a failed trajectory, as in slime's
    own conversion: it has no reward, and 0 would be one. `turn_weighting` is a mode of `turn_denominators`, or a
    function for weights that depend on the whole batch.
    Raises ValueError for an invalid turn record or repeated index or rollout id, ConfigError for an unknown weighting.
    """
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.index)
    _check_unique("sample index", [trajectory.index for trajectory in ordered])
    _check_unique("rollout id", [trajectory.rollout_id for trajectory in ordered])
    advantages = group_advantages(
        [trajectory.reward for trajectory in ordered],
        [trajectory.group_index for trajectory in ordered],
        normalize_std,
    )
    turns = [trajectory.trained_turns() or [_stub()] for trajectory in ordered]
    denominators = _denominators(turns, turn_weighting)
    rows = [
        row for parts in zip(ordered, turns, advantages, denominators, strict=True) for row in _trajectory_rows(*parts)
    ]
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _denominators(turns: list[list[TurnRecord]], weighting: str | BatchWeighting) -> list[list[float]]:
    mask_sums = [[sum(turn.loss_mask) for turn in members] for members in turns]
    if callable(weighting):
        return weighting(mask_sums)
    return [turn_denominators(members, weighting) for members in mask_sums]


def _trajectory_rows(
    trajectory: Trajectory, turns: list[TurnRecord], advantage: float, denominators: list[float]
) -> list[dict[str, Any]]:
    for turn in turns:
        turn.validate()
    return [
        {
            "tokens": list(turn.tokens),
            "response_lengths": turn.response_length,
            "loss_masks": list(turn.loss_mask),
            "rewards": advantage,
            "raw_reward": trajectory.reward,
            "truncated": int(trajectory.truncated),
            "sample_indices": trajectory.index,
            "rollout_ids": trajectory.rollout_id,
            "rollout_mask_sums": denominator,
            "rollout_log_probs": list(turn.rollout_log_probs),
        }
        for turn, denominator in zip(turns, denominators, strict=True)
    ]


def _stub() -> TurnRecord:
    return TurnRecord(list(STUB_TOKENS), 1, [0], [0.0], role="stub", finish_reason="stop", trained=False)


def _check_unique(what: str, values: list[int]) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1}) if len(set(values)) < len(values) else []
    if repeated:
        raise ValueError(f"{what} {repeated[0]} belongs to more than one trajectory")
