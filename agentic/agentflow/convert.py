"""Hook `custom_convert` (`--custom-convert-samples-to-train-data-path`): from scored samples to train data.

Inputs: the samples of one rollout with `train_metadata["turns"]`. Invariants: advantages are those of trajectories
within their `group_index`, computed before the turns are expanded (Flow-GRPO, arXiv 2510.05592); failed trajectories
leave the statistics and stay as one masked token; too many of them stop the run. Leaves out: the mathematics, which
is in `agentic.common` (`group_stats`, `weighting`, `convert`).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from agentic.agentflow.config import AgentFlowConfig
from agentic.common.convert import Trajectory, expand_turns
from agentic.common.errors import ConfigError
from agentic.common.failures import check_failure_rate
from agentic.common.turns import TurnRecord
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def custom_convert(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """One row for each trained turn; lists of equal length, as slime's default conversion gives them.

    Raises:
        TooManyFailures: the share of failed trajectories is above `agentflow_max_failure_rate`.
        ConfigError: group normalisation is switched off, or a sample did not come from `generate`.
        ValueError: a turn record breaks an invariant, e.g. it has no log-probs.
    """
    config = AgentFlowConfig.from_args(args)
    if not args.rewards_normalization:
        raise ConfigError("AgentFlow needs group advantages; remove --disable-rewards-normalization")
    failures = check_failure_rate(samples, config.max_failure_rate)
    if failures:
        logger.warning("failed trajectories: %s", dict(failures))
    trajectories = [_trajectory(sample) for sample in samples]
    return expand_turns(trajectories, config.turn_weighting, args.grpo_std_normalization)


def _trajectory(sample: Sample) -> Trajectory:
    if sample.train_metadata is None or sample.index is None or sample.group_index is None:
        raise ConfigError(
            f"sample {sample.index} has no recorded turns or no index; "
            "set --custom-generate-function-path agentic.agentflow.rollout.generate"
        )
    return Trajectory(
        index=sample.index,
        group_index=sample.group_index,
        rollout_id=sample.index if sample.rollout_id is None else sample.rollout_id,
        reward=None if sample.remove_sample else _reward(sample),
        truncated=sample.status == Sample.Status.TRUNCATED,
        turns=[TurnRecord.from_dict(turn) for turn in sample.train_metadata["turns"]],
    )


def _reward(sample: Sample) -> float:
    if not isinstance(sample.reward, (int, float)):
        raise ConfigError(
            f"sample {sample.index} has the reward {sample.reward!r}, not a number; "
            "set --custom-rm-path agentic.agentflow.reward.reward_func"
        )
    return float(sample.reward)
