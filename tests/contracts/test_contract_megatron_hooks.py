"""Hooks that only the Megatron backend has: when they are called, and with which arguments."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers_fsdp
import helpers_megatron as helpers

HERE = __name__
CALLS: list[list[Any]] = []


def on_init(args: Namespace) -> None:
    CALLS.append(["init", args.tensor_model_parallel_size])


def before_log_prob(args: Namespace, model: list[Any], store_prefix: str) -> None:
    CALLS.append(["log_prob", len(model), store_prefix])


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    CALLS.append(["train_step", rollout_id, step_id, len(model), hasattr(optimizer, "param_groups")])


def own_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    CALLS.append(["provider", pre_process, post_process])
    (model_dir,) = MODEL_DIRS
    return get_model_provider_func(helpers.make_args(model_dir))(pre_process, post_process, vp_stage)


MODEL_DIRS: list[Path] = []


def _train(folder: Path) -> None:
    from slime.backends.megatron_utils.trainer import MegatronTrainer

    MODEL_DIRS.append(folder / "model")
    args = helpers.make_args(
        folder / "model",
        custom_model_provider_path=f"{HERE}.own_provider",
        custom_megatron_init_path=f"{HERE}.on_init",
        custom_megatron_before_log_prob_hook_path=f"{HERE}.before_log_prob",
        custom_megatron_before_train_step_hook_path=f"{HERE}.before_train_step",
    )
    helpers.run_trainer(MegatronTrainer(), args, range(1))
    (folder / "calls.json").write_text(json.dumps(CALLS))


def test_hooks_of_the_megatron_backend(tmp_path: Path) -> None:
    helpers.make_model(tmp_path / "model", "qwen2")
    helpers_fsdp.run_workers(_train, 1, tmp_path)
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert calls[0] == ["init", 1]
    assert calls[1] == ["provider", True, True] and [call[0] for call in calls].count("provider") == 2
    assert {tuple(call) for call in calls if call[0] == "log_prob"} == {("log_prob", 1, "ref_"), ("log_prob", 1, "")}
    steps = [call for call in calls if call[0] == "train_step"]
    assert steps == [["train_step", 0, number, 1, True] for number in range(len(steps))] and len(steps) == 3
