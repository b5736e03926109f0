"""Adapters on 1 and 2 real ranks: frozen base, reference without a second model, merged weights, folder for peft, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

ROLLOUTS = [helpers.make_rollout(seed) for seed in (0, 1)]
LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 5e-2, "entropy_coef": 0.0}


def _train(trainer: Any, rollout_id: int) -> dict[str, float]:
    world, rank = trainer.context.world_size, trainer.context.rank
    return trainer.train(rollout_id, helpers.split(trainer.args, ROLLOUTS[rollout_id], rank, world))


def _reference(trainer: Any) -> list[torch.Tensor]:
    from slime.backends.common.batches import prepare_rollout_data

    share = helpers.split(trainer.args, ROLLOUTS[0], trainer.context.rank, trainer.context.world_size)
    return trainer._reference_log_probs(prepare_rollout_data(share, trainer.context.device))


def _run(folder: Path, model_dir: Path, load: Path | None = None) -> None:
    """Train rollout 0, save, train rollout 1; with `load` also resume there and train rollout 1."""
    from slime.backends.fsdp_utils.hf_export import gather_full_state
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    folder.mkdir(exist_ok=True)
    trainer = FSDPTrainer()
    files = {"save": str(folder / "ckpt"), "save_hf": str(folder / "hf")}
    trainer.init(helpers.make_args(model_dir, **LORA, **files), with_ref=True)
    result: dict[str, Any] = {"start": gather_full_state(trainer.model), "ref_before": _reference(trainer)}
    result["rollout_0"] = _train(trainer, 0)
    result["merged"] = gather_full_state(trainer.model)
    trainer.save_model(0)
    result["rollout_1"] = _train(trainer, 1)
    result["ref_after"] = _reference(trainer)
    result["trained"] = [name for name, p in trainer.model.hf.named_parameters() if p.requires_grad]
    if load is not None:
        result.update(_resume(model_dir, load))
    if trainer.context.is_main:
        torch.save(result, folder / "result.pt")
    trainer.shutdown()


def _resume(model_dir: Path, load: Path) -> dict[str, Any]:
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    trainer = FSDPTrainer()
    start = trainer.init(helpers.make_args(model_dir, **LORA, load=str(load)), with_ref=True)
    metrics = _train(trainer, 1)
    dropping = FSDPTrainer()
    dropping.init(helpers.make_args(model_dir, **{**LORA, "lora_dropout": 0.5, "lora_target_modules": ["q_proj"]}))
    dropping.args.use_kl_loss = False
    twice = [_train(dropping, 0) for _ in range(2)]
    with pytest.raises(ValueError, match="saved with --lora-rank"):
        FSDPTrainer().init(helpers.make_args(model_dir, load=str(load)))
    with pytest.raises(ValueError, match="--lora-target-modules: model.embed_tokens is no linear layer"):
        FSDPTrainer().init(helpers.make_args(model_dir, **{**LORA, "lora_target_modules": ["embed_tokens"]}))
    sft = {"loss_type": "sft_loss", "compute_advantages_and_returns": False, "use_kl_loss": False}
    learner = FSDPTrainer()
    learner.init(helpers.make_args(model_dir, **LORA, **sft))
    losses = [_train(learner, 0)["train/loss"] for _ in range(8)]
    return {"next": start, "resumed": metrics, "dropout": twice, "losses": losses}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("lora")
    model = helpers.make_model(root / "model")
    helpers.run_workers(_run, 2, root / "two", model)
    helpers.run_workers(_run, 1, root / "one", model, root / "two" / "ckpt")
    results = {name: torch.load(root / name / "result.pt", weights_only=False) for name in ("one", "two")}
    return {"root": root, "model": model, **results}


def _gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_only_adapters_are_trained_and_the_start_is_the_model(runs: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    loaded = load_file(runs["model"] / "model.safetensors")
    assert _gap(runs["one"]["start"], loaded) == 0.0
    trained = runs["one"]["trained"]
    assert len(trained) == 2 * 7 * 2 and all(".lora_A." in name or ".lora_B." in name for name in trained)
    moved = {name for name, value in runs["one"]["merged"].items() if not torch.equal(value, loaded[name])}
    assert moved == {name for name in loaded if "_proj.weight" in name}


def test_one_and_two_ranks_agree(runs: dict[str, Any]) -> None:
    for rollout in ("rollout_0", "rollout_1"):
        one, two = (_numbers(runs[run][rollout]) for run in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
        assert one["train/grad_norm"] > 1e-3
    assert _gap(runs["one"]["merged"], runs["two"]["merged"]) < 1e-5


def test_the_reference_is_the_model_without_adapters(runs: dict[str, Any]) -> None:
    """It stays while the policy moves, and adapters are trained on after it was used."""
    for before, after in zip(runs["one"]["ref_before"], runs["one"]["ref_after"], strict=True):
        assert torch.equal(before, after)
    assert runs["one"]["rollout_1"]["train/kl_loss"] > 1e-3


def test_the_saved_adapter_and_the_merged_export_are_the_same_model(runs: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(runs["model"], dtype=torch.float32)
    adapter = runs["root"] / "two" / "ckpt" / "iter_0000001" / "adapter"
    by_peft = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(runs["root"] / "two" / "hf", dtype=torch.float32).state_dict()
    merged = runs["two"]["merged"]
    assert _gap({name: by_peft[name] for name in merged}, merged) < 1e-6
    assert _gap({name: exported[name] for name in merged}, merged) == 0.0


def test_a_run_on_two_ranks_is_resumed_on_one(runs: dict[str, Any]) -> None:
    assert runs["one"]["next"] == 1
    assert _numbers(runs["one"]["resumed"]) == pytest.approx(_numbers(runs["two"]["rollout_1"]), rel=1e-4, abs=1e-6)


def test_adapters_learn(runs: dict[str, Any]) -> None:
    losses = runs["one"]["losses"]
    assert losses[-1] < 0.8 * losses[0], losses


def test_dropout_is_for_optimiser_steps_only(runs: dict[str, Any]) -> None:
    """Log-probs of the old policy are taken without it: from the second rollout on the ratio is not 1."""
    first, second = runs["one"]["dropout"]
    assert first["train/grad_norm"] > 0 and abs(second["train/ppo_kl"]) > 1e-6
