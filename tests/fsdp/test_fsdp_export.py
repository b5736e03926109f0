"""Experts, which transformers stacks in memory, leave the FSDP back end one by one, as published checkpoints have them."""

from __future__ import annotations

from pathlib import Path

import helpers_convert
import helpers_fsdp as helpers
import torch

from slime.backends.megatron_utils.param_names import all_names, hf_names
from slime.backends.megatron_utils.transformer_config import read_shape


def _export(folder: Path, model_dir: Path) -> None:
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    trainer = FSDPTrainer()
    trainer.init(helpers.make_args(model_dir, use_kl_loss=False))
    source = trainer.weight_source()
    sent = {name: value.clone() for name, value in source.iter_full_tensors()}
    source.save_hf(folder / "saved")
    if trainer.context.is_main:
        torch.save((sent, list(trainer.model.stored_state())), folder / "sent.pt")
    trainer.shutdown()


def test_experts_have_the_names_of_published_checkpoints(tmp_path: Path) -> None:
    model = helpers_convert.save_family(tmp_path / "model", "qwen3-moe")
    helpers.run_workers(_export, 2, tmp_path, model)
    sent, stored = torch.load(tmp_path / "sent.pt")
    published = helpers_convert.tensors_of(model)
    assert (
        "model.layers.0.mlp.experts.gate_up_proj" in stored and "model.layers.0.mlp.experts.3.up_proj.weight" in sent
    )
    helpers_convert.assert_same_tensors(sent, published)
    helpers_convert.assert_same_tensors(helpers_convert.tensors_of(tmp_path / "saved"), published)
    assert set(sent) == {tensor for name in all_names(read_shape(model)) for tensor in hf_names(name)}
