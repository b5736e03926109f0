"""Hook `custom_convert` (`--custom-convert-samples-to-train-data-path`): Multi-Conv DAPO's rows from scored samples.

Inputs: the samples of one rollout, in either layout. Invariants: advantages are those of rollouts within their
`group_index`, computed before the conversations are expanded, so that a right answer never counts as a wrong one because
its document was long; credit and mean are weights of the whole loss, KL included; every conversation that `generate` made
must have arrived; failed rollouts leave the statistics and stay as one masked row. Leaves out: the mathematics, which is
in `agentic.common` (`group_stats`, `weighting`, `convert`).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from agentic.common.convert import BatchWeighting, Trajectory, expand_turns
from agentic.common.errors import ConfigError
from agentic.common.failures import check_failure_rate
from agentic.common.turns import TurnRecord
from agentic.common.weighting import step_denominators
from agentic.memagent.config import MemAgentConfig
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def custom_convert(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """One row for each trained conversation; lists of equal length, as slime's default conversion gives them.

    Raises:
        TooManyFailures: the share of failed rollouts is above `memagent_max_failure_rate`.
        ConfigError: flags that contradict the objective, or samples that did not come from `generate` and `reward_func`.
        ValueError: a turn record breaks an invariant, e.g. it has no log-probs.
    """
    config = MemAgentConfig.from_args(args)
    config.check_flags(args)
    rollouts = _rollouts(samples)
    failures = check_failure_rate([members[-1] for members in rollouts], config.max_failure_rate)
    if failures:
        logger.warning("failed rollouts: %s", dict(failures))
    trajectories = [_trajectory(members) for members in rollouts]
    data = expand_turns(trajectories, _weighting(args, config), config.divides_by_std(args.grpo_std_normalization))
    _warn_small_denominators(data)
    return data


def _rollouts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each rollout in the order of their conversations."""
    rollouts: dict[Any, list[Sample]] = {}
    for sample in samples:
        if "conversation" not in (sample.metadata or {}) or sample.index is None or sample.group_index is None:
            raise ConfigError(
                f"sample {sample.index} has no recorded conversation or no index; "
                "set --custom-generate-function-path agentic.memagent.rollout.generate"
            )
        rollouts.setdefault(_rollout_id(sample), []).append(sample)
    ordered = [sorted(members, key=lambda s: s.metadata["conversation"]) for members in rollouts.values()]
    for members in ordered:
        _check_complete(members)
    return ordered


def _rollout_id(sample: Sample) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def _check_complete(members: Sequence[Sample]) -> None:
    first, numbers = members[0], [member.metadata["conversation"] for member in members]
    wanted = list(range(first.metadata["conversations"]))
    if numbers not in (wanted, wanted[-1:]):
        raise ConfigError(
            f"rollout {_rollout_id(first)} has the conversations {numbers} of {len(wanted)}; keep all or none"
        )
    for name in ("index", "group_index", "reward"):
        values = {getattr(member, name) for member in members}
        if len(values) > 1:
            raise ConfigError(
                f"the samples of rollout {_rollout_id(first)} differ in {name}: {sorted(map(str, values))}"
            )


def _trajectory(members: Sequence[Sample]) -> Trajectory:
    first = members[0]
    removed = any(member.remove_sample for member in members)
    assert first.index is not None and first.group_index is not None
    return Trajectory(
        index=first.index,
        group_index=first.group_index,
        rollout_id=_rollout_id(first),
        reward=None if removed else _reward(first),
        truncated=any(member.status == Sample.Status.TRUNCATED for member in members),
        turns=[] if removed else _turns(members),
    )


def _turns(members: Sequence[Sample]) -> list[TurnRecord]:
    recorded = (members[-1].train_metadata or {}).get("turns")
    if recorded is not None:
        return [TurnRecord.from_dict(turn) for turn in recorded]
    if len(members) < members[0].metadata["conversations"]:
        raise ConfigError(f"rollout {_rollout_id(members[0])} came without its memory conversations")
    return [_turn(member) for member in members]


def _turn(sample: Sample) -> TurnRecord:
    mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    return TurnRecord(
        list(sample.tokens),
        sample.response_length,
        mask,
        list(sample.rollout_log_probs or []),
        role=sample.metadata["role"],
        finish_reason=sample.metadata["finish_reason"],
        trained=any(mask),
    )


def _reward(sample: Sample) -> float:
    if not isinstance(sample.reward, (int, float)):
        raise ConfigError(
            f"sample {sample.index} has the reward {sample.reward!r}, not a number; "
            "set --custom-rm-path agentic.memagent.reward.reward_func"
        )
    return float(sample.reward)


def _weighting(args: Namespace, config: MemAgentConfig) -> BatchWeighting:
    size = getattr(args, "global_batch_size", None)
    if not size:
        raise ConfigError(
            "--global-batch-size (or --num-steps-per-rollout) is not set; the loss is a mean over a step"
        )
    return partial(
        step_denominators, rollouts_per_step=size, loss_norm=config.loss_norm, turn_credit=config.turn_credit
    )


def _warn_small_denominators(data: dict[str, list[Any]]) -> None:
    pairs = zip(data.get("rollout_mask_sums", []), data.get("loss_masks", []), strict=True)
    small = sum(denominator < 1 and any(mask) for denominator, mask in pairs)
    if small:
        logger.warning("%d rows weigh less than they should: their step has hardly any real rollout", small)
