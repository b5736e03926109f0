"""Loss of one micro-batch: policy gradient, supervised, or the user's own.

Inputs: the micro-batch (`batches.take_rows`) and per-row tensors of length R_i from the model, 0 at untrained tokens.
Outputs: a scalar that is a *sum over rows* (see `slime.utils.loss_reducers`), and detached scalars of the same kind to report.

Scaling. The step's objective is `1/B sum_i sum_t x_it m_it / d_i`, with B rollout executions in the step and
`d_i = rollout_mask_sums[i]`. With `d_i = T |a|` this is Flow-GRPO's mean over tokens in a turn, turns in a trajectory and
trajectories (AgentFlow, arXiv 2510.05592, section on Flow-GRPO). Each rank sees its part of the sum, times `loss_factor`; gradients
are summed over ranks.

Left out: estimators and clipping formulas (`slime.utils.ppo_utils`), log-probs (`model`).

Shape legend: S = sum of response lengths of the micro-batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import torch

from slime.backends.common.batches import Batch
from slime.utils import ppo_utils
from slime.utils.importance_sampling import vanilla_tis_function
from slime.utils.loss_reducers import get_sum_of_sample_mean
from slime.utils.misc import load_function

Reducer = Callable[[torch.Tensor], torch.Tensor]
LossOutput = tuple[torch.Tensor, dict[str, torch.Tensor]]


def make_reducer(args: Namespace, batch: Batch) -> Reducer:
    """x_S -> sum over rows, with the denominators of whole rollouts."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )


def loss_factor(args: Namespace, global_batch_size: int, tokens: float) -> float:
    """Turns a rank's sum into its part of the step's objective: one over the step's rollouts (or trained tokens)."""
    return 1.0 / (max(tokens, 1.0) if args.calculate_per_token_loss else global_batch_size)


def add_report(sums: dict[str, torch.Tensor], report: dict[str, torch.Tensor]) -> None:
    """Add one micro-batch's reported scalars to the step's sums, in place."""
    for name, part in report.items():
        sums[name] = sums[name] + part if name in sums else part


def token_loss(
    args: Namespace, batch: Batch, log_probs: list[torch.Tensor], entropy: list[torch.Tensor]
) -> LossOutput:
    """The loss of `--loss-type` from log-probs and entropies of whole rows."""
    reduce = make_reducer(args, batch)
    if args.loss_type == "sft_loss":
        return sft_loss(log_probs, reduce)
    return policy_loss(args, batch, log_probs, entropy, reduce)


def _pg_reducer(args: Namespace, batch: Batch, masks: list[torch.Tensor], default: Reducer) -> Reducer:
    """Reducer of the policy-gradient loss: the user's, else the default one over the (possibly corrected) masks."""
    path = args.custom_pg_loss_reducer_function_path
    if path:
        make = load_function(path)
        return make(batch["total_lengths"], batch["response_lengths"], masks, args.calculate_per_token_loss)
    return default if masks is batch["loss_masks"] else make_reducer(args, {**batch, "loss_masks": masks})


def _rollout_log_probs(batch: Batch, flag: str) -> list[torch.Tensor]:
    """The engine's log-probs, 0 at tokens that are not trained, as the trainer's are."""
    if batch.get("rollout_log_probs") is None:
        raise ValueError(f"{flag}: the rollout data hold no rollout_log_probs; remove the flag")
    rows = zip(batch["rollout_log_probs"], batch["loss_masks"], strict=True)
    return [torch.where(mask != 0, row, 0.0) for row, mask in rows]


def _train_log_probs(batch: Batch, log_probs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The trainer's log-probs before the first step; with one step these are its own detached values."""
    return batch["log_probs"] if "log_probs" in batch else [row.detach() for row in log_probs]


def _old_log_probs(args: Namespace, batch: Batch, log_probs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs of the behaviour policy, the denominator of the ratio."""
    if args.use_rollout_logprobs:
        return _rollout_log_probs(batch, "--use-rollout-logprobs")
    return _train_log_probs(batch, log_probs)


def _surrogate(
    args: Namespace, batch: Batch, log_probs: list[torch.Tensor], old: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token policy-gradient loss, clip indicator and old - new log-prob, each [S]."""
    advantages_S = torch.cat(batch["advantages"])
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    new_S = torch.cat(log_probs)
    if args.advantage_estimator == "gspo":
        ppo_kl_S = ppo_utils.compute_gspo_kl(log_probs, old, log_probs, batch["loss_masks"])
    else:
        ppo_kl_S = torch.cat(old) - new_S
    if args.advantage_estimator == "cispo":
        pg_S, clipped_S = ppo_utils.compute_cispo_loss(ppo_kl_S, new_S, advantages_S, args.eps_clip, high)
    else:
        pg_S, clipped_S = ppo_utils.compute_policy_loss(ppo_kl_S, advantages_S, args.eps_clip, high, args.eps_clip_c)
    return pg_S, clipped_S, ppo_kl_S


def _kl_loss(args: Namespace, batch: Batch, new_S: torch.Tensor, old_S: torch.Tensor) -> torch.Tensor:
    ratio_S = torch.exp(new_S - old_S) if args.use_unbiased_kl else None
    reference_S = torch.cat(batch["ref_log_probs"])
    return ppo_utils.compute_approx_kl(new_S, reference_S, args.kl_loss_type, importance_ratio=ratio_S)


def _rollout_gap(batch: Batch, own: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum over trained tokens of |trainer log-prob - engine log-prob|; the trainer divides by the number of tokens."""
    if batch.get("rollout_log_probs") is None:
        return {}
    gap_S = (torch.cat(own).detach() - torch.cat(batch["rollout_log_probs"])).abs()
    return {"train_rollout_logprob_abs_diff": (gap_S * (torch.cat(batch["loss_masks"]) != 0)).sum()}


def _mask_off_policy_sequences(
    args: Namespace, batch: Batch, log_probs: list[torch.Tensor], old: list[torch.Tensor], reduce: Reducer
) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
    """Factor [S] of off-policy sequence masking and its share of masked tokens; 1 without `--use-opsm`."""
    if not args.use_opsm:
        return 1.0, {}
    detached = [row.detach() for row in log_probs]
    keep_S, _ = ppo_utils.compute_opsm_mask(args, detached, old, batch["advantages"], batch["loss_masks"])
    return keep_S, {"opsm_clipfrac": reduce(1.0 - keep_S)}


def _correct_for_engine(
    args: Namespace,
    batch: Batch,
    pg_S: torch.Tensor,
    train: list[torch.Tensor],
    ppo_kl_S: torch.Tensor,
    reduce: Reducer,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Weights for the difference between trainer and engine: (loss [S], masks of its numerator, reduced metrics)."""
    if not (args.use_tis or args.get_mismatch_metrics):
        return pg_S, batch["loss_masks"], {}
    path = args.custom_tis_function_path
    correct = load_function(path) if path else vanilla_tis_function
    pg_S, masks, metrics = correct(
        args=args,
        pg_loss=pg_S,
        train_log_probs=train,
        rollout_log_probs=_rollout_log_probs(batch, "--use-tis" if args.use_tis else "--get-mismatch-metrics"),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    metrics = {**metrics, "ois": torch.exp(-ppo_kl_S)}
    return pg_S, masks, {name: reduce(value_S.detach()) for name, value_S in metrics.items()}


def policy_loss(
    args: Namespace, batch: Batch, log_probs: list[torch.Tensor], entropy: list[torch.Tensor], reduce: Reducer
) -> LossOutput:
    """Clipped surrogate, plus `kl_loss_coef` x KL to the reference, minus `entropy_coef` x entropy (per token, then `reduce`)."""
    old, train = _old_log_probs(args, batch, log_probs), _train_log_probs(batch, log_probs)
    pg_S, clipped_S, ppo_kl_S = _surrogate(args, batch, log_probs, old)
    keep_S, masking = _mask_off_policy_sequences(args, batch, log_probs, old, reduce)
    pg_S, masks, correction = _correct_for_engine(args, batch, pg_S * keep_S, train, ppo_kl_S, reduce)
    pg_loss = _pg_reducer(args, batch, masks, reduce)(pg_S)
    entropy_loss = reduce(torch.cat(entropy))
    loss = pg_loss - args.entropy_coef * entropy_loss if args.entropy_coef else pg_loss
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy_loss,
        "pg_clipfrac": reduce(clipped_S),
        "ppo_kl": reduce(ppo_kl_S),
        **_rollout_gap(batch, train),
        **masking,
        **correction,
    }
    if args.use_kl_loss:
        kl_loss = reduce(_kl_loss(args, batch, torch.cat(log_probs), torch.cat(old)))
        loss = loss + args.kl_loss_coef * kl_loss
        metrics["kl_loss"] = kl_loss
    if args.use_opd:
        metrics["opd_reverse_kl"] = reduce(torch.cat(batch["opd_reverse_kl"]))
    if args.use_rollout_entropy:
        metrics["rollout_entropy"] = reduce(torch.cat(batch["entropy"]))
    return loss, _report(loss, metrics)


def value_loss(args: Namespace, batch: Batch, values: list[torch.Tensor], reduce: Reducer) -> LossOutput:
    """The critic's clipped squared error against the returns; `batch["values"]` are its values before the first step."""
    old_S, returns_S = torch.cat(batch["values"]), torch.cat(batch["returns"])
    loss_S, clipped_S = ppo_utils.compute_value_loss(torch.cat(values), old_S, returns_S, args.value_clip)
    loss = reduce(loss_S)
    return loss, _report(loss, {"value_loss": loss, "value_clipfrac": reduce(clipped_S)})


def sft_loss(log_probs: list[torch.Tensor], reduce: Reducer) -> LossOutput:
    """Negative log-likelihood of the trained tokens."""
    loss = -reduce(torch.cat(log_probs))
    return loss, _report(loss, {})


def custom_loss(args: Namespace, batch: Batch, logits_1TV: torch.Tensor) -> LossOutput:
    """The hook `fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`; logits are float32, not divided by temperature."""
    reduce = make_reducer(args, batch)
    loss, metrics = load_function(args.custom_loss_function_path)(args, batch, logits_1TV, reduce)
    return loss, _report(loss, metrics)


def _report(loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}
