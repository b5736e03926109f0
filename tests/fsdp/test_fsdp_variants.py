"""Other losses, estimators and precisions, one run on two ranks: each is compared with an independent value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

ROLLOUT = helpers.make_rollout(5, rollouts=4)
SFT = {
    "loss_type": "sft_loss",
    "compute_advantages_and_returns": False,
    "use_kl_loss": False,
    "rollout_temperature": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"train_dtype": "bf16"},
    "sft": SFT,
    "sft_per_token": {**SFT, "calculate_per_token_loss": True},
    "custom": {**SFT, "loss_type": "custom_loss", "custom_loss_function_path": "helpers_fsdp.sft_from_logits"},
    "frozen": {"freeze_params_name_list": ["layers.0", "embed_tokens"]},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "new_reference": {"ref_update_interval": 1},
    "hook": {"rollout_data_postprocess_path": "helpers_fsdp.mask_everything", "entropy_coef": 0.0},
}


def _run_all(folder: Path, model_dir: Path) -> None:
    from slime.backends.fsdp_utils.hf_export import gather_full_state
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    results: dict[str, Any] = {}
    for name, flags in VARIANTS.items():
        trainer = FSDPTrainer()
        args = helpers.make_args(model_dir, **flags)
        trainer.init(args, with_ref=args.use_kl_loss)
        share = helpers.split(args, ROLLOUT, trainer.context.rank, trainer.context.world_size)
        results[name] = {"metrics": trainer.train(0, share), "weights": gather_full_state(trainer.model)}
        if name == "new_reference":
            results[name]["again"] = trainer.train(1, share)
    if trainer.context.is_main:
        torch.save(results, folder / "variants.pt")
    trainer.shutdown()


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("variants")
    model_dir = helpers.make_model(folder / "model")
    helpers.run_workers(_run_all, 2, folder, model_dir)
    return {"model": model_dir, **torch.load(folder / "variants.pt", weights_only=False)}


def _nll(model_dir: Path) -> list[tuple[float, int]]:
    """Per row: summed negative log-likelihood of trained tokens, and their number, straight from HF."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = []
    for tokens, mask in zip(ROLLOUT["tokens"], ROLLOUT["loss_masks"], strict=True):
        ids, weights = torch.tensor(tokens), torch.tensor(mask)
        with torch.no_grad():
            log_probs = hf(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        rows.append((-float((log_probs[-len(mask) :] * weights).sum()), int(weights.sum())))
    return rows


def test_sft_loss_over_rollouts_and_over_tokens(variants: dict[str, Any]) -> None:
    rows = _nll(variants["model"])
    by_rollout = sum(nll / max(2 * count, 1) for nll, count in rows) / 4
    assert variants["sft"]["metrics"]["train/loss"] == pytest.approx(by_rollout, rel=1e-5)
    tokens = sum(max(count, 1) for _, count in rows)
    assert variants["sft_per_token"]["metrics"]["train/loss"] == pytest.approx(
        sum(n for n, _ in rows) / tokens, rel=1e-5
    )
    assert variants["sft"]["metrics"]["train/num_tokens"] == sum(count for _, count in rows)


def test_custom_loss_from_logits_trains_like_the_built_in(variants: dict[str, Any]) -> None:
    for name in ("train/loss", "train/grad_norm"):
        assert variants["custom"]["metrics"][name] == pytest.approx(variants["sft"]["metrics"][name], rel=1e-5)
    assert variants["custom"]["metrics"]["train/twice"] == pytest.approx(2 * variants["sft"]["metrics"]["train/loss"])


def test_gradient_checkpointing_changes_nothing_and_bf16_little(variants: dict[str, Any]) -> None:
    base = variants["base"]["metrics"]
    assert variants["checkpointing"]["metrics"]["train/grad_norm"] == pytest.approx(base["train/grad_norm"], rel=1e-5)
    assert variants["bf16"]["metrics"]["train/loss"] == pytest.approx(base["train/loss"], abs=0.05)
    assert {value.dtype for value in variants["bf16"]["weights"].values()} == {torch.float32}


def test_frozen_parameters_stay(variants: dict[str, Any]) -> None:
    before, after = variants["sft"]["weights"], variants["frozen"]["weights"]
    from safetensors.torch import load_file

    start = load_file(variants["model"] / "model.safetensors")
    moved = {name for name in after if not torch.equal(after[name], start[name])}
    assert moved and all("layers.1" in name or name == "model.norm.weight" for name in moved)
    assert not torch.equal(before["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_other_estimators_run_at_ratio_one(variants: dict[str, Any], name: str) -> None:
    metrics = variants[name]["metrics"]
    assert abs(metrics["train/ppo_kl"]) <= 1e-6 and metrics["train/grad_norm"] > 1e-3
    assert metrics["train/pg_clipfrac"] == 0.0


def test_reference_follows_the_policy_when_asked(variants: dict[str, Any]) -> None:
    assert abs(variants["new_reference"]["again"]["train/kl_loss"]) <= 1e-6


def test_a_step_without_trained_tokens_runs_and_has_no_gradient(variants: dict[str, Any]) -> None:
    metrics = variants["hook"]["metrics"]
    assert (metrics["train/num_tokens"], metrics["train/loss"], metrics["train/grad_norm"]) == (0.0, 0.0, 0.0)
