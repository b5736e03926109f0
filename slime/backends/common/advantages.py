"""Advantages of a rollout, and which log-probs a rollout needs before it can be trained on.

Inputs: prepared rollout data (`batches.prepare_rollout_data`), with `ref_log_probs`, `log_probs` and (ppo) `values` where they were
computed. Outputs, stored in the data: `kl`, `advantages`, `returns`, with `--use-opd` also `opd_reverse_kl`; lists of tensors [R_i],
float32.

Order: KL of the policy before the update to the reference, then the estimator (or the user's function), then the penalty of
on-policy distillation, then whitening over all ranks. A fully masked row (padding, a failed rollout) gets 0 everywhere and counts in
no statistic. The formulas themselves are pure functions in `slime.utils.ppo_utils`.
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.distributed as dist

from slime.backends.common.batches import Batch
from slime.backends.common.distributed import all_reduce_sums
from slime.utils import ppo_utils
from slime.utils.distributed_utils import distributed_masked_whiten
from slime.utils.misc import load_function

Rows = list[torch.Tensor]


def needs_old_log_probs(args: Namespace, num_steps: int) -> bool:
    """Whether a forward-only pass must fix the old log-probs before the first optimiser step.

    With one step, a policy loss and nothing else that reads them, the loss uses its own detached values, which are the same.
    """
    if not args.compute_advantages_and_returns:
        return False
    if args.use_rollout_entropy or args.get_mismatch_metrics:
        return True
    if args.use_rollout_logprobs:
        return False
    reused = num_steps == 1 and args.loss_type == "policy_loss" and not args.custom_advantage_function_path
    reused = reused and not getattr(args, "keep_old_actor", False)
    return not reused or args.kl_coef != 0 or args.use_opd or args.advantage_estimator in ("gspo", "ppo")


def compute_advantages_and_returns(args: Namespace, data: Batch, group: dist.ProcessGroup | None = None) -> None:
    """Fill `kl`, `advantages` and `returns`. Collective over `group` (all ranks) with `--normalize-advantages`.

    Raises `ValueError` when a custom function leaves them unset, or when log-probs or values that the flags ask for are missing.
    """
    data["kl"] = _token_kl(args, data)
    if getattr(args, "custom_advantage_function_path", None):
        load_function(args.custom_advantage_function_path)(args, data)
        if "advantages" not in data or "returns" not in data:
            raise ValueError(
                f"--custom-advantage-function-path={args.custom_advantage_function_path} must set "
                "rollout_data['advantages'] and rollout_data['returns']"
            )
    else:
        data["advantages"], data["returns"] = _estimate(args, data)
    if getattr(args, "use_opd", False):
        data["advantages"] = list(data["advantages"])  # not the list of the returns
        apply_opd_kl_to_advantages(args, data, data["advantages"], _policy_log_probs(args, data))
    if args.normalize_advantages:
        data["advantages"] = _whiten(data["advantages"], data["loss_masks"], group)


def apply_opd_kl_to_advantages(
    args: Namespace, rollout_data: Batch, advantages: Rows, student_log_probs: Rows | None
) -> None:
    """Store `opd_reverse_kl` = student - teacher log-prob, and subtract `opd_kl_coef` times it from the entries of `advantages`.

    Without `loss_masks` in the data all tokens count. Raises ValueError when teacher or student log-probs are missing.
    """
    if rollout_data.get("teacher_log_probs") is None or student_log_probs is None:
        lacking = "teacher_log_probs" if student_log_probs is not None else "log_probs of the policy"
        raise ValueError(
            f"--use-opd: the rollout data hold no {lacking}; set Sample.teacher_log_probs, for instance with --custom-rm-path "
            "slime.rollout.on_policy_distillation.reward_func and --custom-reward-post-process-path "
            "slime.rollout.on_policy_distillation.post_process_rewards"
        )
    masks = rollout_data.get("loss_masks") or [torch.ones_like(row) for row in student_log_probs]
    gaps = ppo_utils.get_opd_reverse_kl(student_log_probs, rollout_data["teacher_log_probs"], masks)
    rollout_data["opd_reverse_kl"] = gaps
    advantages[:] = [row - args.opd_kl_coef * gap for row, gap in zip(advantages, gaps, strict=True)]


def _estimate(args: Namespace, data: Batch) -> tuple[Rows, Rows]:
    """(advantages, returns) of the chosen estimator."""
    kl, masks = data["kl"], data["loss_masks"]
    rewards_B = torch.tensor(data["rewards"], dtype=torch.float32)
    if args.advantage_estimator == "ppo":
        return _ppo(args, data, rewards_B)
    if args.advantage_estimator == "reinforce_plus_plus":
        rows = _reinforce_plus_plus(args, data, rewards_B)
    elif args.advantage_estimator == "reinforce_plus_plus_baseline":
        rows = ppo_utils.get_reinforce_plus_plus_baseline_advantages(rewards_B, kl, masks, args.kl_coef)
    else:
        rows = ppo_utils.get_grpo_returns(rewards_B, kl)
    return rows, rows


def _reinforce_plus_plus(args: Namespace, data: Batch, rewards_B: torch.Tensor) -> Rows:
    masks = data["loss_masks"]
    rows = [torch.zeros_like(kl_R) for kl_R in data["kl"]]
    chosen = [i for i, mask_R in enumerate(masks) if mask_R.any()]
    returns = ppo_utils.get_reinforce_plus_plus_returns(
        rewards_B[chosen],
        [data["kl"][i] for i in chosen],
        [masks[i] for i in chosen],
        [data["response_lengths"][i] for i in chosen],
        [data["local_total_lengths"][i] for i in chosen],
        args.kl_coef,
        args.gamma,
    )
    for i, row in zip(chosen, returns, strict=True):
        rows[i] = row
    return rows


def _ppo(args: Namespace, data: Batch, rewards_B: torch.Tensor) -> tuple[Rows, Rows]:
    if data.get("values") is None:
        raise ValueError("--advantage-estimator ppo: no values of a critic came with the rollout data")
    token_rewards = ppo_utils.get_ppo_token_rewards(rewards_B, data["kl"], args.kl_coef)
    return ppo_utils.get_advantages_and_returns_batch(
        data["local_total_lengths"], data["response_lengths"], data["values"], token_rewards, args.gamma, args.lambd
    )


def _whiten(rows: Rows, masks: Rows, group: dist.ProcessGroup | None) -> Rows:
    """Advantages with mean 0 and variance 1 over the trained tokens of all ranks of the group. Collective."""
    values_S, mask_S = torch.cat(rows), torch.cat(masks)
    if not all_reduce_sums({"trained": mask_S.sum()}, values_S.device, group)["trained"]:
        # A rollout without any trained token has nothing to learn from, and no statistics.
        return [torch.zeros_like(row) for row in rows]
    return list(distributed_masked_whiten(values_S, mask_S, group).split([len(row) for row in rows]))


def _policy_log_probs(args: Namespace, data: Batch) -> Rows | None:
    return data.get("rollout_log_probs") if getattr(args, "use_rollout_logprobs", False) else data.get("log_probs")


def _token_kl(args: Namespace, data: Batch) -> Rows:
    """KL per token between the policy before the update and the reference; zeros where one of them was not computed."""
    policy, reference = _policy_log_probs(args, data), data.get("ref_log_probs")
    masks = data["loss_masks"]
    if policy is None or reference is None:
        return [torch.zeros_like(mask_R, dtype=torch.float32) for mask_R in masks]
    rows = zip(policy, reference, masks, strict=True)
    # The engine's log-probs may be anything at tokens that are not trained, the trainer's are 0 there.
    return [
        torch.where(mask_R != 0, ppo_utils.compute_approx_kl(new_R, ref_R, args.kl_loss_type), 0.0)
        for new_R, ref_R, mask_R in rows
    ]
