"""Metrics of the training side: sums of all ranks become means, and what a rollout looked like to the trainer.

Input: per-rank sums or lists. Invariants: every rank of the group calls; a mean is taken over the whole batch, never over the
means of ranks, wherever a count is known; only the source rank gets (and logs) the result. Left out: the loss itself.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

import torch

from slime.observability import logging_utils
from slime.observability.metric_utils import compute_pass_rate, compute_rollout_step, dict_add_prefix
from slime.observability.timer import Timer
from slime.utils.types import RolloutBatch

# Per-token columns whose mean over trained tokens of a sample is reported.
_TOKEN_COLUMNS = (
    *("log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values", "advantages", "returns"),
    *("kl", "opd_reverse_kl", "entropy"),
)
_SAMPLE_COLUMNS = ("rewards", "truncated", "response_lengths")


def reduce_train_step_metrics(
    losses_reduced: list[dict[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: Any,
) -> dict[str, float]:
    """Means of one optimiser step out of the micro-batches of all ranks.

    Each entry is `{"keys": names, "values": tensor}` with values `[normaliser, sum of name 1, ...]`. Sums run over the group; they
    are divided by `step_global_batch_size`, or with per-token loss by the summed normaliser (which every context-parallel rank
    reports for the whole sequence, hence the factor `cp_size`).
    """
    if not losses_reduced:
        return {}
    names = list(losses_reduced[0]["keys"])
    totals = torch.stack([entry["values"].detach().double() for entry in losses_reduced]).sum(dim=0)
    _all_reduce(totals, dp_with_cp_group)
    scale = cp_size / max(float(totals[0]), 1.0) if calculate_per_token_loss else 1.0 / step_global_batch_size
    return {name: float(value) * scale for name, value in zip(names, totals[1:], strict=True)}


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """(numerator, denominator) of this rank: over all DP x CP ranks their sums' ratio is the mean over rollouts.

    The reducer's sum holds this rank's part of its sequences; every rank adds `rollouts / dp_size` to the denominator.
    """
    return per_rank_reducer_sum * cp_size, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: dict[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: Any
) -> dict[str, float] | None:
    """Joins the dicts of all ranks on the source rank (None elsewhere).

    A pair is (numerator, denominator), summed over ranks and divided; a number is averaged. A key that some rank lacks is
    reduced over those that have it.
    """
    gathered: list[Any] = [log_dict]
    if _is_distributed() and dp_size > 1:
        import torch.distributed as dist

        is_source = dist.get_rank() == dp_src_rank
        gathered = [None] * dp_size
        dist.gather_object(log_dict, gathered if is_source else None, dst=dp_src_rank, group=dp_group)
        if not is_source:
            return None
    names = dict.fromkeys(name for entry in gathered for name in entry)
    return {name: _joined([entry[name] for entry in gathered if name in entry]) for name in names}


def _joined(values: list[Any]) -> float:
    if not all(isinstance(value, tuple) for value in values):
        return statistics.fmean(float(value) for value in values)
    denominator = sum(float(d) for _, d in values)
    return sum(float(n) for n, _ in values) / denominator if denominator else 0.0


def gather_log_data(
    metric_name: str, args: Namespace, rollout_id: int, log_dict: dict[str, float | tuple[float, float]]
) -> dict[str, float] | None:
    """Joins over all ranks and logs under `<metric_name>/` on rank 0; returns what was logged there."""
    size = _world_size()
    reduced = gather_and_reduce_log_dict(log_dict, dp_size=size, dp_src_rank=0, dp_group=None)
    if reduced is None:
        return None
    metrics: dict[str, Any] = dict_add_prefix(reduced, f"{metric_name}/")
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, metrics, step_key="rollout/step")
    return metrics


def log_rollout_data(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """Means of what this rollout's rows hold: rewards, lengths, and per-token columns over their trained tokens."""
    masks = [torch.as_tensor(mask).float() for mask in rollout_data["loss_masks"]]
    contributions: dict[str, float | tuple[float, float]] = {}
    for name in _SAMPLE_COLUMNS:
        if rollout_data.get(name) is not None:
            contributions[name] = (float(sum(map(float, rollout_data[name]))), float(len(masks)))
    for name in _TOKEN_COLUMNS:
        column = rollout_data.get(name)
        if column is not None:
            pairs = zip(column, masks, strict=True)
            means = [float((torch.as_tensor(v).float() * m).sum() / m.sum().clamp(min=1)) for v, m in pairs]
            contributions[name] = (sum(means), float(len(masks)))
    gather_log_data("rollout", args, rollout_id, contributions)


def log_multi_turn_data(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """Turns and trained tokens per row, of rows that know their `round_number`."""
    rounds = [value for value in rollout_data.get("round_number") or [] if value is not None]
    if not rounds:
        return
    trained = [float(torch.as_tensor(mask).sum()) for mask in rollout_data["loss_masks"]]
    lengths = [float(length) for length in rollout_data["response_lengths"]]
    contributions: dict[str, float | tuple[float, float]] = {
        "round_number_mean": (float(sum(rounds)), float(len(rounds))),
        "trained_tokens_mean": (sum(trained), float(len(trained))),
        "observed_tokens_mean": (sum(lengths) - sum(trained), float(len(lengths))),
    }
    gather_log_data("multi_turn", args, rollout_id, contributions)


def log_passrate(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """pass@k over the whole batch's raw rewards, which every rank has; logged by rank 0."""
    rewards = [reward for reward in rollout_data["raw_reward"] if reward is not None]
    group_size = args.n_samples_per_prompt
    if _rank() != 0 or len(rewards) % group_size:
        return
    metrics: dict[str, Any] = dict_add_prefix(compute_pass_rate(rewards, group_size), "passrate/")
    if metrics:
        metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
        logging_utils.log(args, metrics, step_key="rollout/step")


def log_perf_data(rollout_id: int, args: Namespace, extra_metrics: dict[str, Any] | None = None) -> None:
    """The sums of this process's timers, on rank 0; the timers start anew."""
    seconds = {f"perf/{name}_time": value for name, value in Timer().log_dict().items()}
    Timer().reset()
    if _rank() == 0:
        metrics = {**seconds, **(extra_metrics or {}), "rollout/step": compute_rollout_step(args, rollout_id)}
        logging_utils.log(args, metrics, step_key="rollout/step")


def _is_distributed() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if _is_distributed() else 1


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if _is_distributed() else 0


def _all_reduce(value: torch.Tensor, group: Any) -> None:
    import torch.distributed as dist

    if _is_distributed():
        dist.all_reduce(value, group=group)
