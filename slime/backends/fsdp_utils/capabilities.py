"""What the FSDP back end can do. An option that would be ignored is refused, with the reason and the way out.

Pure: reads the parsed arguments only.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.arguments.megatron import refuse_sizes

LOSS_TYPES = ("policy_loss", "sft_loss", "custom_loss")
ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
LR_STYLES = ("constant", "linear", "cosine", "WSD")

# flag name -> values that this back end honours; any other value is an error, and needs the megatron back end
_REFUSED: dict[str, tuple[Any, ...]] = {
    "opd_type": (None, "sglang"),
    "opd_teacher_load": (None,),
    "opd_teacher_ckpt_step": (None,),
    "ref_ckpt_step": (None,),
    "use_routing_replay": (False,),
    "use_rollout_routing_replay": (False,),
    "use_stateless_adam": (False,),
    "async_save": (False,),
    "release_train": (False,),
    "enable_mtp_training": (False,),
    "offload_train": (False, None),
    "allgather_cp": (False,),
    "recompute_loss_function": (False,),
    "custom_model_provider_path": (None,),
    "custom_megatron_init_path": (None,),
    "custom_megatron_before_log_prob_hook_path": (None,),
    "custom_megatron_before_train_step_hook_path": (None,),
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "context_parallel_size": (1,),
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (None, 1),
    "sequence_parallel": (False,),
    "decoder_first_pipeline_num_layers": (None,),
    "decoder_last_pipeline_num_layers": (None,),
    "recompute_granularity": (None,),
    "recompute_method": (None,),
    "recompute_num_layers": (None,),
    "recompute_modules": (None,),
    "data_pad_size_multiplier": (128,),
    "make_vocab_size_divisible_by": (128,),
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_supported(args: Namespace, role: str = "actor") -> None:
    """Raise `ValueError` naming the first flag that this back end cannot honour for the role."""
    if not getattr(args, "balance_by_flops", False):  # which itself sets them, from the model's configuration
        refuse_sizes(args, role)
    for name, off in _REFUSED.items():
        value = getattr(args, name, off[0])
        if value not in off:
            raise ValueError(
                f"{_flag(name)}={value} is not available with --train-backend fsdp, only with megatron; remove it"
            )
    _check_choice("loss_type", args.loss_type, LOSS_TYPES)
    _check_choice("advantage_estimator", args.advantage_estimator, ESTIMATORS)
    _check_choice("lr_decay_style", args.lr_decay_style, LR_STYLES)
    _check_choice("optimizer", args.optimizer, ("adam",))
    _check_lora(args)
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        raise ValueError(
            f"--rollout-top-p={args.rollout_top_p}: replay of the nucleus is not available with --train-backend fsdp, "
            "so trainer and engine log-probs would differ; use --rollout-top-p 1.0"
        )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{_flag(name)}={value} is not available with --train-backend fsdp; use one of {allowed}")


def _check_lora(args: Namespace) -> None:
    if args.lora_rank is None:
        for name, default in (("lora_alpha", None), ("lora_target_modules", None), ("lora_dropout", 0.0)):
            if getattr(args, name) != default:
                raise ValueError(f"{_flag(name)} {getattr(args, name)}: has no effect without --lora-rank")
        return
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        if getattr(args, name):
            raise ValueError(f"{_flag(name)}: --lora-rank trains its adapters only; remove one of the two")
    if args.ref_update_interval is not None:
        raise ValueError(
            "--ref-update-interval: the reference of --lora-rank is the model without adapters; remove it"
        )
    if not 0 <= args.lora_dropout < 1:
        raise ValueError(f"--lora-dropout {args.lora_dropout}: must be at least 0 and less than 1")
