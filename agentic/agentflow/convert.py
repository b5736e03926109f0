"""Hook `custom_convert` (`--custom-convert-samples-to-train-data-path`): from scored samples to train data.

Inputs: the samples of one rollout with `train_metadata["turns"]`. Invariants: advantages are those of trajectories
within their `group_index`, computed before the turns are expanded (Flow-GRPO, arXiv 2510.05592); failed trajectories
leave the statistics and stay as one masked token; too many of them stop the run. Leaves out: the mathematics, which
is in `agentic.common` (`group_stats`, `weighting`, `convert`), but for what slime 0.2.2 needs (`pad_turns`).
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from typing import Any

from agentic.agentflow.config import AgentFlowConfig
from agentic.common.convert import STUB_TOKENS, Trajectory, expand_turns
from agentic.common.errors import ConfigError
from agentic.common.failures import check_failure_rate
from agentic.common.turns import TurnRecord
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def custom_convert(args: Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """One row for each trained turn; lists of equal length, as slime's default conversion gives them.

    Raises:
        TooManyFailures: the share of failed trajectories is above `agentflow_max_failure_rate`.
        ConfigError: group normalisation is switched off, a sample did not come from `generate`, or the batch size
            does not fit the layout `padded_turns`.
        ValueError: a turn record breaks an invariant, e.g. it has no log-probs.
    """
    config = AgentFlowConfig.from_args(args)
    if not args.rewards_normalization:
        raise ConfigError("AgentFlow needs group advantages; remove --disable-rewards-normalization")
    failures = check_failure_rate(samples, config.max_failure_rate)
    if failures:
        logger.warning("failed trajectories: %s", dict(failures))
    trajectories = [_trajectory(sample) for sample in samples]
    data = expand_turns(trajectories, config.turn_weighting, args.grpo_std_normalization)
    if config.batch_layout == "rollouts":
        return data
    rows = len(trajectories) * config.most_trained_turns
    if args.global_batch_size != rows:
        raise ConfigError(
            f"--global-batch-size is {args.global_batch_size}: agentflow_batch_layout padded_turns needs "
            f"{len(trajectories)} trajectories x {config.most_trained_turns} turns; set --global-batch-size {rows}"
        )
    return pad_turns(data, len(trajectories), rows)


def pad_turns(data: dict[str, list[Any]], trajectories: int, rows: int) -> dict[str, list[Any]]:
    """The same policy gradient from a loss that is the mean over B = `rows` rows of their token means (slime 0.2.2).

    Turn k of n = `trajectories` weighs sum(mask_k) / (n d_k) with its denominator d_k, so its advantage is multiplied by
    B sum(mask_k) / (n d_k): B / (n T_i) with the paper's weighting. Masked rows of one token fill the batch. Every row is
    a rollout of its own, so that a loss over rollouts gives the same. What has no reward shows the mean of what has,
    because only averages of `raw_reward` are reported, and without knowledge of None.
    Raises ValueError when there are more rows already.
    """
    missing = rows - len(data["tokens"])
    if missing < 0:
        raise ValueError(f"{len(data['tokens'])} trained turns in a batch of {rows}")
    mask_sums = [sum(mask) for mask in data["loss_masks"]]
    columns = zip(data["rewards"], mask_sums, data["rollout_mask_sums"], strict=True)
    scaled = [advantage * rows * own / (trajectories * denominator) for advantage, own, denominator in columns]
    known = [reward for reward in data["raw_reward"] if reward is not None]
    mean = sum(known) / len(known) if known else 0.0
    stub = {"tokens": list(STUB_TOKENS), "response_lengths": 1, "loss_masks": [0], "rewards": 0.0, "truncated": 0}
    stub |= {"raw_reward": mean, "sample_indices": -1, "rollout_log_probs": [0.0]}
    padded = {key: data[key] + [copy.copy(value) for _ in range(missing)] for key, value in stub.items()}
    padded["rewards"][: len(scaled)] = scaled
    padded["raw_reward"] = [mean if reward is None else reward for reward in padded["raw_reward"]]
    ones = [float(max(own, 1)) for own in mask_sums] + [1.0] * missing
    return padded | {"rollout_ids": list(range(rows)), "rollout_mask_sums": ones}


def _trajectory(sample: Sample) -> Trajectory:
    if sample.train_metadata is None or sample.index is None or sample.group_index is None:
        raise ConfigError(
            f"sample {sample.index} has no recorded turns or no index; "
            "set --custom-generate-function-path agentic.agentflow.rollout.generate"
        )
    rollout_id = getattr(sample, "rollout_id", None)  # a field that samples of slime 0.2.2 have not
    return Trajectory(
        index=sample.index,
        group_index=sample.group_index,
        rollout_id=sample.index if rollout_id is None else rollout_id,
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
