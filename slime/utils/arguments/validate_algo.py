"""What must hold between the flags of the algorithm, and the attributes derived from them.

`resolve_algorithm` raises ValueError or FileNotFoundError with one clear sentence. With `strict`, a flag that changes nothing in the chosen
combination is an error when it names a feature, and a warning when it only tunes one.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.arguments.algo import GROUP_ESTIMATORS
from slime.utils.arguments.parser import FlagError
from slime.utils.arguments.roles import ROLES, parse_megatron_role_args

logger = logging.getLogger(__name__)

_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
# Tuning flag -> (its default, what reads it).
_TUNING: dict[str, tuple[Any, str]] = {
    "gamma": (1.0, "--advantage-estimator reinforce_plus_plus or ppo"),
    "lambd": (1.0, "--advantage-estimator ppo"),
    "value_clip": (0.2, "--advantage-estimator ppo"),
    "num_critic_only_steps": (0, "--advantage-estimator ppo"),
    "tis_clip": (2.0, "--use-tis"),
    "tis_clip_low": (0.0, "--use-tis"),
    "opsm_delta": (1e-4, "--use-opsm"),
    "opd_kl_coef": (1.0, "--use-opd"),
    "kl_loss_type": ("k1", "--kl-coef or --use-kl-loss"),
}


def resolve_algorithm(args: Namespace, strict: bool = True) -> None:
    """Check `args`; sets `use_critic`, `eps_clip_high`, `eval_reward_key` and `grpo_std_normalization`."""
    args.use_critic = args.advantage_estimator == "ppo"
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    _check_rules(args)
    if strict:
        _check_loss(args)
        _check_kl(args)
        _check_estimator(args)
        _check_off_policy(args)
    _check_distillation(args, strict)
    if strict:
        _check_roles(args)
        _warn_about_tuning(args)
    _resolve_group_statistics(args)


def _check_rules(args: Namespace) -> None:
    """The rules of the public interface."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        raise FlagError(
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} exclude each other: give one"
        )
    if args.advantage_estimator in _WHITENED and not args.normalize_advantages:
        raise FlagError(f"--advantage-estimator {args.advantage_estimator}: needs --normalize-advantages")
    if args.use_rollout_logprobs and args.use_tis:
        raise FlagError("--use-rollout-logprobs and --use-tis exclude each other: both correct for the engine")
    if args.get_mismatch_metrics and not args.custom_tis_function_path:
        raise FlagError("--get-mismatch-metrics: needs --custom-tis-function-path, which computes them")
    if args.advantage_estimator == "cispo" and args.eps_clip < 1:
        logger.warning("--eps-clip %s with cispo also bounds weights from below; 1 or more leaves them", args.eps_clip)


def _check_loss(args: Namespace) -> None:
    if args.loss_type == "custom_loss" and not args.custom_loss_function_path:
        raise FlagError("--loss-type custom_loss: needs --custom-loss-function-path")
    if args.custom_loss_function_path and args.loss_type != "custom_loss":
        raise FlagError(f"--custom-loss-function-path: has no effect with --loss-type {args.loss_type}")
    without = not args.compute_advantages_and_returns and not args.rollout_data_postprocess_path
    if without and args.loss_type == "policy_loss":
        raise FlagError(
            "--disable-compute-advantages-and-returns: --loss-type policy_loss needs advantages; drop the flag, use "
            "another loss, or set them with --rollout-data-postprocess-path"
        )
    if args.eps_clip_c is not None and args.advantage_estimator == "cispo":
        raise FlagError(f"--eps-clip-c {args.eps_clip_c}: has no effect with --advantage-estimator cispo")


def _check_kl(args: Namespace) -> None:
    ignored = args.advantage_estimator in GROUP_ESTIMATORS and not args.custom_advantage_function_path
    if args.kl_coef != 0 and ignored:
        raise FlagError(
            f"--kl-coef {args.kl_coef}: has no effect with --advantage-estimator {args.advantage_estimator}; "
            "use --use-kl-loss --kl-loss-coef"
        )
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        raise FlagError(f"--kl-loss-coef {args.kl_loss_coef}: has no effect without --use-kl-loss")
    if args.use_unbiased_kl and not args.use_kl_loss:
        raise FlagError("--use-unbiased-kl: has no effect without --use-kl-loss")
    if args.ref_update_interval is not None and not (args.use_kl_loss or args.kl_coef):
        raise FlagError(
            f"--ref-update-interval {args.ref_update_interval}: there is no reference model without --use-kl-loss or "
            "--kl-coef"
        )


def _check_estimator(args: Namespace) -> None:
    if args.use_critic and (args.loss_type != "policy_loss" or not args.compute_advantages_and_returns):
        raise FlagError("--advantage-estimator ppo: needs --loss-type policy_loss and its advantages")
    if args.num_critic_only_steps < 0:
        raise FlagError(f"--num-critic-only-steps {args.num_critic_only_steps}: must be at least 0")
    if args.advantage_estimator == "gspo" and args.calculate_per_token_loss:
        logger.warning(
            "--calculate-per-token-loss with gspo weighs long sequences more; GSPO's own mean is per sequence"
        )


def _check_off_policy(args: Namespace) -> None:
    hook = args.custom_tis_function_path
    if hook and not (args.use_tis or args.get_mismatch_metrics):
        raise FlagError("--custom-tis-function-path: has no effect without --use-tis or --get-mismatch-metrics")
    if args.tis_clip_low > args.tis_clip:
        raise FlagError(f"--tis-clip-low {args.tis_clip_low}: must be at most --tis-clip {args.tis_clip}")
    if args.keep_old_actor and (args.use_rollout_logprobs or args.debug_train_only):
        other = "use_rollout_logprobs" if args.use_rollout_logprobs else "debug_train_only"
        raise FlagError(f"--keep-old-actor: has no effect with {_flag(other)}; remove one of the two")
    features = ("use_tis", "use_opsm", "keep_old_actor", "get_mismatch_metrics", "use_opd", "use_rollout_entropy")
    used = [name for name in features if getattr(args, name)]
    if used and args.loss_type != "policy_loss":
        raise FlagError(f"{_flag(used[0])}: has no effect with --loss-type {args.loss_type}")
    one_step = args.global_batch_size == args.rollout_batch_size * args.n_samples_per_prompt
    if args.use_opsm and one_step and not args.use_rollout_logprobs:
        logger.warning(
            "--use-opsm: with one optimiser step per rollout and without --use-rollout-logprobs the old policy is the "
            "current one, so no sequence is dropped"
        )


def _check_distillation(args: Namespace, strict: bool) -> None:
    if not args.use_opd:
        for name in ("opd_teacher_load", "opd_teacher_ckpt_step", "opd_type") if strict else ("opd_teacher_load",):
            if getattr(args, name) is not None:
                raise FlagError(f"{_flag(name)}: has no effect without --use-opd")
        return
    if args.opd_type is None:
        raise FlagError("--use-opd: needs --opd-type, sglang (an engine is the teacher) or megatron (a checkpoint)")
    _check_teacher(args)
    if args.rollout_temperature != 1.0:
        logger.warning(
            "--use-opd with --rollout-temperature %s: an engine gives teacher log-probs at temperature 1",
            args.rollout_temperature,
        )


def _check_teacher(args: Namespace) -> None:
    teacher = args.opd_teacher_load
    if args.opd_type == "sglang" and teacher:
        raise FlagError("--opd-teacher-load: has no effect with --opd-type sglang; start the teacher as an engine")
    if args.opd_type == "megatron" and not teacher:
        raise FlagError("--opd-teacher-load: needed by --opd-type megatron, a checkpoint of the teacher")
    if args.opd_type == "megatron" and not Path(teacher).exists():
        raise FileNotFoundError(f"--opd-teacher-load {teacher}: no such file or directory")


def _check_roles(args: Namespace) -> None:
    if args.megatron_config_path is None:
        return
    if not args.use_critic:
        raise FlagError("--megatron-config-path: has no effect without a critic (--advantage-estimator ppo)")
    for role in ROLES:
        parse_megatron_role_args(args, args.megatron_config_path, role)


def _warn_about_tuning(args: Namespace) -> None:
    discounts = args.advantage_estimator in ("reinforce_plus_plus", "ppo")
    corrects = args.use_tis or args.get_mismatch_metrics
    in_use = {
        "gamma": discounts,
        "tis_clip": corrects,
        "tis_clip_low": corrects,
        "opsm_delta": args.use_opsm,
        "opd_kl_coef": args.use_opd,
        "kl_loss_type": args.use_kl_loss or args.kl_coef != 0,
    }
    for name, (default, reader) in _TUNING.items():
        value = getattr(args, name)
        # A custom advantage function may read any of them.
        if value != default and not in_use.get(name, args.use_critic) and not args.custom_advantage_function_path:
            logger.warning("%s %s has no effect without %s", _flag(name), value, reader)


def _resolve_group_statistics(args: Namespace) -> None:
    if args.n_samples_per_prompt != 1:
        return
    # One sample has no standard deviation.
    args.grpo_std_normalization = False
    hooks = (
        args.custom_reward_post_process_path,
        args.custom_convert_samples_to_train_data_path,
        args.custom_advantage_function_path,
    )
    groups = args.advantage_estimator in (*GROUP_ESTIMATORS, "reinforce_plus_plus_baseline")
    if groups and args.rewards_normalization and args.loss_type == "policy_loss" and not any(hooks):
        logger.warning(
            "--n-samples-per-prompt 1 with --advantage-estimator %s: a group of one is its own mean, so every advantage is "
            "0 and nothing is learned; use more samples, --disable-rewards-normalization or another estimator",
            args.advantage_estimator,
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
