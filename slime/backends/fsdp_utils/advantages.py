"""Advantages of a rollout, and which log-probs a rollout needs before it can be trained on.

Inputs: prepared rollout data (`batches.prepare_rollout_data`), with `ref_log_probs` and `log_probs` where they were computed.
Outputs, stored in the data: `kl` (which only a custom function reads), `advantages`, `returns`; lists of tensors [R_i], float32.

The estimators themselves are pure functions in `slime.utils.ppo_utils`. Left out: estimators beyond the group-relative ones (grpo, gspo, cispo share the rule), and value functions.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.backends.fsdp_utils.batches import Batch
from slime.utils import ppo_utils
from slime.utils.misc import load_function


def needs_old_log_probs(args: Namespace, num_steps: int) -> bool:
    """Whether a forward-only pass must fix the old log-probs before the first optimiser step.

    With one step, a policy loss and nothing else that reads them, the loss uses its own detached values, which are the same.
    """
    if not args.compute_advantages_and_returns or args.use_rollout_logprobs:
        return False
    reused = num_steps == 1 and args.loss_type == "policy_loss" and not args.custom_advantage_function_path
    return not reused or args.advantage_estimator == "gspo"


def compute_advantages_and_returns(args: Namespace, data: Batch) -> None:
    """Fill `kl`, `advantages` and `returns`. Raises `ValueError` when a custom function leaves them unset."""
    kl = _token_kl(args, data)
    data["kl"] = kl
    if args.custom_advantage_function_path:
        load_function(args.custom_advantage_function_path)(args, data)
        if "advantages" not in data or "returns" not in data:
            raise ValueError(
                f"--custom-advantage-function-path={args.custom_advantage_function_path} must set "
                "rollout_data['advantages'] and rollout_data['returns']"
            )
        return
    rewards_B = torch.tensor(data["rewards"], dtype=torch.float32)
    data["advantages"] = data["returns"] = ppo_utils.get_grpo_returns(rewards_B, kl)


def _token_kl(args: Namespace, data: Batch) -> list[torch.Tensor]:
    """KL per token between the policy before the update and the reference; zeros where one of them was not computed."""
    policy = data.get("rollout_log_probs") if args.use_rollout_logprobs else data.get("log_probs")
    reference = data.get("ref_log_probs")
    if policy is None or reference is None:
        return [torch.zeros_like(mask_R) for mask_R in data["loss_masks"]]
    return [
        ppo_utils.compute_approx_kl(new_R, ref_R, args.kl_loss_type)
        for new_R, ref_R in zip(policy, reference, strict=True)
    ]
