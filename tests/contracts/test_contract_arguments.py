"""The rules of `slime_validate_args`: they need neither a model nor data, and what they set is what hooks read.

What the command line refuses beyond them is tested in tests/utils/test_arguments*.py.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.utils.arguments import get_slime_extra_args_provider, parse_megatron_role_args, slime_validate_args

EITHER = (ValueError, AssertionError)


def flags(**given: Any) -> Namespace:
    parser = get_slime_extra_args_provider()(argparse.ArgumentParser())
    args = parser.parse_args(["--rollout-batch-size", "4"])
    vars(args).update({"num_rollout": 3, "hf_checkpoint": "/nowhere", **given})
    return args


def validated(**given: Any) -> Namespace:
    args = flags(**given)
    slime_validate_args(args)
    return args


def test_defaults_need_no_model() -> None:
    args = validated()
    assert (args.eps_clip_high, args.use_critic, args.rollout_external) == (0.2, False, False)
    assert args.eval_function_path == args.rollout_function_path and args.eval_datasets == []
    assert (args.offload_train, args.offload_rollout, args.start_rollout_id) == (False, False, 0)
    assert args.finetune and args.no_load_optim and args.no_load_rng and not hasattr(args, "offload")
    assert (
        args.over_sampling_batch_size == 4 and args.grpo_std_normalization is False and args.eval_prompt_data is None
    )


@pytest.mark.parametrize(
    "given",
    [
        {"eval_prompt_data": ["a", "/p", "b"]},
        {"rollout_temperature": 0.0},
        {"use_opd": True},
        {"use_opd": True, "opd_type": "megatron"},
        {"use_opd": True, "opd_type": "sglang", "opd_teacher_load": "/tmp"},
        {"opd_teacher_load": "/tmp"},
        {"eval_interval": 1},
        {"save_interval": 1},
        {"kl_coef": 0.1, "kl_loss_coef": 0.1, "ref_load": "/tmp"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"use_rollout_logprobs": True, "use_tis": True},
        {"get_mismatch_metrics": True},
        {"use_dynamic_batch_size": True},
        {"balance_by_flops": True},
        {"save_debug_rollout_data": "/x", "save_debug_train_data": "/x"},
        {"debug_rollout_only": True, "debug_train_only": True},
        {"num_steps_per_rollout": 2, "n_samples_per_prompt": 8, "global_batch_size": 8},
        {"over_sampling_batch_size": 2},
        {"num_rollout": None},
        {"num_rollout": None, "num_epoch": 1, "rollout_global_dataset": False},
        {"enable_mtp_training": True},
        {"rollout_max_context_len": 100, "rollout_max_prompt_len": 100},
        {"only_train_params_name_list": ["a"], "freeze_params_name_list": ["b"]},
        {"update_weight_transport": "disk"},
        {"update_weight_mode": "delta"},
        {"release_train": True},
        {"release_train": True, "update_weight_transport": "disk", "update_weight_disk_dir": "/d"},
    ],
    ids=str,
)
def test_rules_raise(given: dict[str, Any]) -> None:
    with pytest.raises(EITHER):
        slime_validate_args(flags(**given))


@pytest.mark.parametrize(
    "given", [{"kl_coef": 0.1}, {"use_kl_loss": True, "ref_load": "/no"}, {"opd_teacher_load": "/no", "use_opd": True}]
)
def test_missing_directories(given: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError):
        slime_validate_args(flags(opd_type="megatron", **given))


def test_load_without_a_checkpoint_becomes_the_reference(tmp_path: Path) -> None:
    args = validated(load=str(tmp_path / "new"), ref_load=str(tmp_path), ref_ckpt_step=5, start_rollout_id=7)
    assert (args.load, args.ckpt_step, args.start_rollout_id, args.finetune) == (str(tmp_path), 5, 7, True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    args = validated(load=str(tmp_path))
    assert args.load == str(tmp_path) and args.start_rollout_id is None and not getattr(args, "finetune", False)


def test_derived_values(tmp_path: Path) -> None:
    assert validated(use_dynamic_batch_size=True, max_tokens_per_gpu=9).log_probs_max_tokens_per_gpu == 9
    assert validated(num_steps_per_rollout=2, n_samples_per_prompt=8).global_batch_size == 16
    assert validated(dump_details="/d").save_debug_train_data == "/d/train_data/{rollout_id}.pt"
    assert validated(load_debug_rollout_data="/x").debug_train_only is True
    assert validated(use_rollout_routing_replay=True).use_routing_replay is True
    args = validated(rollout_max_context_len=100)
    assert (args.eval_max_context_len, args.rollout_max_prompt_len) == (100, 99)
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": "/d"}
    assert validated(release_train=True, save=str(tmp_path), **disk).save_interval == 1


def test_who_leaves_the_gpu() -> None:
    args = validated(colocate=True)
    assert args.offload_train and args.offload_rollout and args.rollout_num_gpus == 8
    assert args.disable_grad_buffers_cpu_backup and args.disable_param_buffers_cpu_backup
    assert validated(colocate=True, offload_train=False).offload_train is False
    args = validated(advantage_estimator="ppo")
    assert args.use_critic and args.offload_train and (args.critic_num_nodes, args.critic_num_gpus_per_node) == (1, 8)
    args = validated(debug_rollout_only=True, rollout_num_gpus=16, colocate=True)
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node, args.colocate) == (2, 8, False)
    assert validated(debug_rollout_only=True, rollout_num_gpus=0).actor_num_nodes == 0


def test_the_critic_keeps_its_head_apart() -> None:
    args = parse_megatron_role_args(flags(kl_coef=0.1, use_opd=True), None, "critic")
    assert args.kl_coef == 0 and args.use_opd is False and args.custom_advantage_function_path is None
    assert args.untie_embeddings_and_output_weights and args.disable_param_buffers_cpu_backup is False
