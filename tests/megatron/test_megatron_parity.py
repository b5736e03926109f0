"""The Megatron back end does what the FSDP back end does, however its ranks are divided: loss, gradient norm, weights; and a
checkpoint of one layout continues under another.

Two gloo ranks per family train the same rollouts (packed rows, reference KL, entropy, three optimiser steps) with FSDP first,
then with each layout in the same processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp
import helpers_megatron as helpers
import pytest
import torch

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": TENSOR,
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed_and_frozen": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
        "freeze_params_name_list": ["layers.0", "embed"],
    },
    "gspo_context": {"advantage_estimator": "gspo", "context_parallel_size": 2},
    "whitened_tensor": {
        "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "use_kl_loss": False,
        "kl_loss_coef": 0.0, "kl_coef": 0.1, **TENSOR,
    },
    "custom_loss": {
        "loss_type": "custom_loss", "custom_loss_function_path": "helpers_fsdp.sft_from_logits",
        "compute_advantages_and_returns": False, "use_kl_loss": False, **TENSOR,
    },
}  # fmt: skip
# Adam divides by the root of small squares: at a larger rate rounding of near-zero gradients alone would pass 1e-4.
COMMON = {"lr": 1e-3}
MEGATRON_ONLY = ("recompute", "parallel")


def layouts_of(family: str) -> list[str]:
    return [name for name in LAYOUTS if name != "expert" or family == "qwen3_moe"]


def _train_all(folder: Path, family: str) -> None:
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    model_dir, results = folder / "model", {}
    results["fsdp"] = helpers.run_trainer(FSDPTrainer(), helpers.make_args(model_dir, **COMMON), range(1))
    if family == "qwen2":
        for name, flags in VARIANTS.items():
            plain = {key: value for key, value in flags.items() if not any(word in key for word in MEGATRON_ONLY)}
            args = helpers.make_args(model_dir, **COMMON, **plain)
            results[f"fsdp_{name}"] = helpers.run_trainer(FSDPTrainer(), args, range(1), _needs_reference(args))
    from slime.backends.megatron_utils.trainer import MegatronTrainer

    for name in layouts_of(family):
        trainer = MegatronTrainer()
        args = helpers.make_args(model_dir, save=str(folder / name), **COMMON, **LAYOUTS[name])
        results[name] = helpers.run_trainer(trainer, args, range(1))
        if family == "qwen2" and name == "tensor":
            trainer.save_model(0)
            results["tensor_on"] = _one_more(trainer)
        if name in ("tensor", "expert"):
            _sync(trainer, folder, name)
        helpers.forget_layout()
    if family == "qwen2":
        _resume_and_vary(folder, model_dir, results)
    if trainer.context.is_main:
        torch.save(results, folder / "results.pt")
    torch.distributed.barrier()


def _sync(trainer: Any, folder: Path, name: str) -> None:
    """Send the weights to an engine that only keeps them, by broadcast and through a directory."""
    engines = [helpers_fsdp.EngineHandle()] if trainer.context.is_main else []
    trainer.args.update_weight_disk_dir = str(folder / "sync")
    for number, transport in enumerate(("nccl", "disk")):
        trainer.args.update_weight_transport = transport
        trainer.update_weights(engines, num_new_engines=int(number == 0), wait=helpers_fsdp.wait_for)
        for engine in engines:
            helpers_fsdp.wait_for([engine.report.remote(str(folder / f"{name}_{transport}.pt"))])
    for engine in engines:
        helpers_fsdp.wait_for([engine.stop.remote()])
    torch.save(helpers.weights_of(trainer), folder / f"{name}_{torch.distributed.get_rank()}.pt")
    trainer.updater.close()


def _one_more(trainer: Any) -> dict[str, Any]:
    metrics = trainer.train(1, helpers.share_of(trainer, helpers_fsdp.make_rollout(1)))
    return {"metrics": metrics, "weights": helpers.weights_of(trainer)}


def _resume_and_vary(folder: Path, model_dir: Path, results: dict[str, Any]) -> None:
    from slime.backends.megatron_utils.trainer import MegatronTrainer

    for name in ("pipeline", "context"):
        trainer = MegatronTrainer()
        args = helpers.make_args(model_dir, load=str(folder / "tensor"), **COMMON, **LAYOUTS[name])
        results[f"{name}_resumed"] = {**helpers.run_trainer(trainer, args, range(0)), "on": _one_more(trainer)}
        helpers.forget_layout()
    for name, flags in VARIANTS.items():
        args = helpers.make_args(model_dir, **COMMON, **flags)
        results[name] = helpers.run_trainer(MegatronTrainer(), args, range(1), _needs_reference(args))
        helpers.forget_layout()


def _needs_reference(args: Any) -> bool:
    return bool(args.use_kl_loss or args.kl_coef)


_runs: dict[str, dict[str, Any]] = {}


@pytest.fixture
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    family = request.param
    if family not in _runs:
        folder = tmp_path_factory.mktemp(family)
        helpers.make_model(folder / "model", family)
        helpers_fsdp.run_workers(_train_all, 2, folder, family)
        _runs[family] = {"folder": folder, **torch.load(folder / "results.pt", weights_only=False)}
    return _runs[family]


def _same_metrics(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    assert len(left) == len(right) and left
    for ours, wanted in zip(left, right, strict=True):
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def _gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


CASES = [(family, name) for family in helpers.FAMILIES for name in layouts_of(family)]


@pytest.mark.parametrize(("runs", "layout"), CASES, indirect=["runs"])
def test_every_layout_trains_like_fsdp(runs: dict[str, Any], layout: str) -> None:
    """Loss, KL, entropy, gradient norm and all other metrics of three steps, and the weights after them, to 1e-4."""
    _same_metrics(runs[layout]["steps"], runs["fsdp"]["steps"])
    assert len(runs[layout]["steps"]) == 3 and runs[layout]["steps"][0]["grad_norm"] > 1
    assert _gap(runs[layout]["weights"], runs["fsdp"]["weights"]) < 1e-4


@pytest.mark.parametrize(("runs", "variant"), [("qwen2", name) for name in VARIANTS], indirect=["runs"])
def test_variants_train_like_fsdp(runs: dict[str, Any], variant: str) -> None:
    _same_metrics(runs[variant]["steps"], runs[f"fsdp_{variant}"]["steps"])
    assert _gap(runs[variant]["weights"], runs[f"fsdp_{variant}"]["weights"]) < 1e-4


@pytest.mark.parametrize(("runs", "layout"), [("qwen2", "pipeline"), ("qwen2", "context")], indirect=["runs"])
def test_a_checkpoint_continues_under_another_layout(runs: dict[str, Any], layout: str) -> None:
    resumed, there = runs[f"{layout}_resumed"], runs["tensor_on"]
    assert resumed["start"] == 1 and _gap(resumed["weights"], runs["tensor"]["weights"]) == 0.0
    numbers = {name: value for name, value in there["metrics"].items() if name.startswith("train/")}
    seen = {name: value for name, value in resumed["on"]["metrics"].items() if name.startswith("train/")}
    assert seen == pytest.approx(numbers, rel=1e-4, abs=1e-4)
    assert _gap(resumed["on"]["weights"], there["weights"]) < 1e-4


@pytest.mark.parametrize("runs", ["qwen2"], indirect=True)
def test_checkpoint_layout(runs: dict[str, Any]) -> None:
    folder = runs["folder"] / "tensor"
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    names = {path.name for path in (folder / "iter_0000000").iterdir()}
    assert {"common.pt", "metadata.json", ".metadata", "meta.json", "rng.pt"} <= names


SYNCED = [(family, name) for family, name in CASES if name in ("tensor", "expert")]


@pytest.mark.parametrize("transport", ["nccl", "disk"])
@pytest.mark.parametrize(("runs", "layout"), SYNCED, indirect=["runs"])
def test_engines_are_sent_the_whole_model(runs: dict[str, Any], layout: str, transport: str) -> None:
    sent = torch.load(runs["folder"] / f"{layout}_{transport}.pt", weights_only=False)
    assert sent["versions"][-1] == {"nccl": "1", "disk": "2"}[transport]
    for rank in range(2):
        assert _gap(sent["weights"], torch.load(runs["folder"] / f"{layout}_{rank}.pt")) == 0.0
