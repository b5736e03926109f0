"""Hook `custom_convert` (`--custom-convert-samples-to-train-data-path`): ToolOrchestra's rows from finished rollouts.

Inputs: samples, flat or in nested lists. Each has `metadata["orch"]` and `metadata["turn_spans"]`, a list of
[start, end, format_ok] in response tokens, one entry for each turn of the policy in it. Layout `stream`: one sample per
rollout; layout `turns`: one sample per turn, with a common `rollout_id` and its number in `metadata["turn"]`.
Invariants: rewards, advantages and filters are those of rollouts within their `group_index`, so a rollout counts once
however many rows it has, and all its rows carry its advantage; both layouts give the same loss for the same tokens; failed
rollouts leave all statistics; nothing is trimmed: what is not trained stays as one masked row of two tokens.
Leaves out: the mathematics (`reward`, `filters`, `agentic.common`).
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentic.common.convert import Trajectory, expand_turns
from agentic.common.errors import ConfigError
from agentic.common.failures import check_failure_rate, failure_reason
from agentic.common.turns import TurnRecord
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.filters import (
    FAILED,
    HOMOGENEOUS,
    INVALID,
    MALFORMED,
    OUT_OF_SCOPE,
    Span,
    clip_advantages,
    filter_report,
    homogeneous_groups,
    mask_malformed,
)
from agentic.toolorchestra.preferences import Features
from agentic.toolorchestra.reward import GENERATE, REWARDS, features_of, is_failed, record_of
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


@dataclass
class Rollout:
    """All samples of one rollout."""

    members: list[Sample]
    features: Features | None
    """None when it leaves all statistics: it failed, or the simulated user found it out of its scope."""
    reason: str | None = None
    """Why it is not trained; None when it is."""
    reward: float | None = None

    @property
    def first(self) -> Sample:
        return self.members[0]

    @property
    def group(self) -> int:
        assert self.first.group_index is not None
        return self.first.group_index


def custom_convert(args: Namespace, samples: Sequence[Any]) -> dict[str, list[Any]]:
    """Lists of equal length, as slime's default conversion gives them; `rewards` holds the clipped advantages.

    `raw_reward` is the outcome, so that the reported mean is the success rate; None for a failed rollout. A step's loss is
    the mean over its trained rollouts of the mean over their trained tokens.

    Raises:
        TooManyFailures: the share of failed rollouts is above `orchestra_max_failure_rate`.
        ConfigError: flags that contradict the objective, or samples that did not come from `generate`.
        ValueError: a row breaks an invariant, e.g. it has no log-probs.
    """
    config = OrchestraConfig.from_args(args)
    _check_flags(args)
    rollouts = collect_rollouts(_flat(samples), config.reward == "preference")
    check_failure_rate([_spokesman(rollout) for rollout in rollouts], config.max_failure_rate)
    _reward_groups(rollouts, config.reward)
    homogeneous = homogeneous_groups([r.reward for r in rollouts], [r.group for r in rollouts], config.min_group_std)
    trajectories = [_trajectory(rollout, rollout.group in homogeneous) for rollout in rollouts]
    _report(rollouts)
    data = expand_turns(trajectories, partial(_weights, args.global_batch_size), args.grpo_std_normalization)
    _warn_small_denominators(data)
    return _finish(data, rollouts, config.advantage_clip)


def _check_flags(args: Namespace) -> None:
    if not getattr(args, "rewards_normalization", True):
        raise ConfigError("ToolOrchestra needs group advantages; remove --disable-rewards-normalization")
    if not getattr(args, "global_batch_size", None):
        raise ConfigError(
            "--global-batch-size (or --num-steps-per-rollout) is not set; the loss is a mean over a step"
        )


def _flat(samples: Iterable[Any]) -> Iterator[Sample]:
    for item in samples:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


# --------------------------------------------------------------------------------------------------------------------
# Rollouts and their rewards.


def collect_rollouts(samples: Iterable[Sample], preference: bool) -> list[Rollout]:
    """Samples joined by rollout id, whatever their order. Raises ConfigError for samples that do not fit together."""
    members: dict[Any, list[Sample]] = {}
    for sample in samples:
        if sample.index is None or sample.group_index is None:
            raise ConfigError(
                f"sample {sample.index} has no index or no group; it did not come from slime's data source"
            )
        members.setdefault(_rollout_id(sample), []).append(sample)
    return [_rollout(siblings, preference) for siblings in members.values()]


def _rollout_id(sample: Sample) -> Any:
    rollout_id = getattr(sample, "rollout_id", None)  # a field that samples of slime 0.2.2 have not
    return sample.index if rollout_id is None else rollout_id


def _rollout(siblings: list[Sample], preference: bool) -> Rollout:
    first = siblings[0]
    if any(is_failed(sample) for sample in siblings):
        return Rollout(siblings, None, FAILED)
    if record_of(first).get("termination") == OUT_OF_SCOPE:
        return Rollout(siblings, None, OUT_OF_SCOPE)
    if len(siblings) > 1:
        siblings = sorted(siblings, key=lambda sample: sample.metadata.get("turn", -1))
        turns = [sample.metadata.get("turn") for sample in siblings]
        if None in turns or len(set(turns)) < len(turns):
            raise ConfigError(
                f"the samples of rollout {_rollout_id(first)} have the turns {turns}; each needs its own"
            )
    if not hasattr(first, "rollout_id") and len(siblings) > 1:
        raise ConfigError("this slime knows no rollout ids, so it weighs rows alike; set orchestra_layout: stream")
    features = features_of(first, preference)
    if any(s.group_index != first.group_index or features_of(s, preference) != features for s in siblings):
        raise ConfigError(f"the samples of rollout {_rollout_id(first)} differ in group or episode")
    return Rollout(siblings, features)


def _spokesman(rollout: Rollout) -> Sample:
    """The sample that says why a rollout failed, else the first."""
    return next((sample for sample in rollout.members if failure_reason(sample)), rollout.first)


def _reward_groups(rollouts: Sequence[Rollout], kind: str) -> None:
    """Set the reward of every rollout that did not fail, group by group."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.features is not None:
            groups.setdefault(rollout.group, []).append(rollout)
    for members in groups.values():
        rewards = REWARDS[kind]([rollout.features for rollout in members if rollout.features is not None])
        for rollout, reward in zip(members, rewards, strict=True):
            rollout.reward = reward


# --------------------------------------------------------------------------------------------------------------------
# Rows.


def _trajectory(rollout: Rollout, homogeneous: bool) -> Trajectory:
    first = rollout.first
    assert first.index is not None
    turns = [] if rollout.features is None else _rows(rollout)
    if rollout.features is not None:
        rollout.reason = _filtered(rollout, homogeneous, bool(turns))
    return Trajectory(
        index=first.index,
        group_index=rollout.group,
        rollout_id=_rollout_id(first),
        reward=rollout.reward,
        truncated=any(sample.status == Sample.Status.TRUNCATED for sample in rollout.members),
        turns=[] if rollout.reason else turns,
    )


def _filtered(rollout: Rollout, homogeneous: bool, any_valid_turn: bool) -> str | None:
    if homogeneous:
        return HOMOGENEOUS
    if not record_of(rollout.first).get("valid_answer"):
        return INVALID
    return None if any_valid_turn else MALFORMED


def _rows(rollout: Rollout) -> list[TurnRecord]:
    """The rows with at least one trained token; malformed turns are masked, in `stream` inside the row."""
    rows = []
    for sample in rollout.members:
        if sample.response_length:
            mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
            rows.append(_record(sample, mask_malformed(mask, spans_of(sample))))
    return [row for row in rows if any(row.loss_mask)]


def spans_of(sample: Sample) -> list[Span]:
    """`metadata["turn_spans"]`. Raises ConfigError when there are none, or one has another form."""
    spans = (sample.metadata or {}).get("turn_spans")
    if not isinstance(spans, list) or not all(isinstance(span, (list, tuple)) and len(span) == 3 for span in spans):
        raise ConfigError(
            f"sample {sample.index}: metadata['turn_spans'] is {str(spans)[:80]}; the format filter needs a list of "
            f"[start, end, format_ok]; set --custom-generate-function-path {GENERATE}"
        )
    return [Span(int(start), int(end), bool(format_ok)) for start, end, format_ok in spans]


def _record(sample: Sample, mask: list[int]) -> TurnRecord:
    return TurnRecord(
        list(sample.tokens),
        sample.response_length,
        mask,
        list(sample.rollout_log_probs or []),
        role="orchestrator",
        finish_reason="length" if sample.status == Sample.Status.TRUNCATED else "stop",
    )


def _weights(rollouts_per_step: int, mask_sums: list[list[int]]) -> list[list[float]]:
    """Denominators; consecutive `rollouts_per_step` rollouts are one optimiser step, whose loss is their sum divided by that.

    n_i K / G for every row of rollout i with n_i trained tokens, where K of the G rollouts are trained: rows that filters
    took out do not thin the gradient. A step without any trained rollout gets 1.
    """
    denominators: list[list[float]] = []
    for start in range(0, len(mask_sums), rollouts_per_step):
        step = mask_sums[start : start + rollouts_per_step]
        share = sum(any(rows) for rows in step) / rollouts_per_step
        denominators += [[sum(rows) * share or 1.0] * len(rows) for rows in step]
    return denominators


def _warn_small_denominators(data: dict[str, list[Any]]) -> None:
    pairs = zip(data.get("rollout_mask_sums", []), data.get("loss_masks", []), strict=True)
    small = sum(denominator < 1 and any(mask) for denominator, mask in pairs)
    if small:
        logger.warning("%d rows weigh less than they should: their step has hardly any trained rollout", small)


def _finish(data: dict[str, list[Any]], rollouts: Sequence[Rollout], clip: float) -> dict[str, list[Any]]:
    if not data:
        return data
    outcomes = {rollout.first.index: rollout.features.outcome for rollout in rollouts if rollout.features is not None}
    raw: list[float | None] = [outcomes.get(index) for index in data["sample_indices"]]
    if not hasattr(rollouts[0].first, "rollout_id"):  # slime 0.2.2 averages this column and knows no None
        known = [outcome for outcome in raw if outcome is not None]
        raw = (
            [sum(known) / len(known) if outcome is None else outcome for outcome in raw] if known else [0.0] * len(raw)
        )
    return data | {"rewards": clip_advantages(data["rewards"], clip), "raw_reward": raw}


def _report(rollouts: Sequence[Rollout]) -> None:
    counted = [sample for rollout in rollouts if rollout.features is not None for sample in rollout.members]
    malformed = sum(not span.format_ok for sample in counted for span in spans_of(sample))
    report = filter_report([r.reason for r in rollouts], [r.group for r in rollouts], malformed)
    logger.info("filters: %s", json.dumps(report))
