"""Hugging Face to Megatron and back: names, layouts, cuts and padding as properties; whole models bit for bit on several ranks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers_convert as helpers
import helpers_fsdp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.hf_to_megatron import supports_hf_weight_loading
from slime.backends.megatron_utils.hf_to_megatron.common import (
    SafetensorReader,
    check_tensor_names,
    cut,
    megatron_tensor,
    merge_qkv,
    pad_vocabulary,
)
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf, remove_padding, split_qkv
from slime.backends.megatron_utils.model_params import join
from slime.backends.megatron_utils.param_names import (
    EMBEDDING,
    Sharding,
    all_names,
    canonical_name,
    hf_names,
    sharding_of,
    with_global_numbers,
)
from slime.backends.megatron_utils.transformer_config import read_shape
from slime.utils.model_shape import shape_of_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: helpers.save_family(root / name, name) for name in helpers.FAMILIES}


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_whole_model_round_trip_is_bit_exact(models: dict[str, Path], family: str) -> None:
    shape, reader = read_shape(models[family]), SafetensorReader(models[family])
    back: dict[str, torch.Tensor] = {}
    for name in all_names(shape):
        back |= convert_to_hf(name, megatron_tensor(name, reader.get_tensor, shape), shape)
    helpers.assert_same_tensors(back, helpers.tensors_of(models[family]))


@given(groups=st.integers(1, 4), per_group=st.integers(1, 4), size=st.integers(1, 3), bias=st.booleans())
def test_qkv_is_interleaved_by_group(groups: int, per_group: int, size: int, bias: bool) -> None:
    shape = _shape(num_attention_heads=groups * per_group, num_query_groups=groups, kv_channels=size)
    rest = () if bias else (5,)
    q, k, v = (torch.randn(groups * n * size, *rest) for n in (per_group, 1, 1))
    merged = merge_qkv(q, k, v, shape)
    first = torch.cat([q[: per_group * size], k[:size], v[:size]])
    assert torch.equal(merged[: (per_group + 2) * size], first)
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(merged, shape), (q, k, v), strict=True))


@given(size=st.sampled_from([1, 2, 4]), dim=st.sampled_from([0, 1]), gated=st.booleans(), blocks=st.integers(1, 3))
def test_cut_and_join_are_inverse(size: int, dim: int, gated: bool, blocks: int) -> None:
    whole = torch.randn(8 * blocks, 8 * blocks)
    gated = gated and dim == 0
    parts = [cut(whole, Sharding(dim, gated), rank, size) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(join(parts, dim, gated), whole)


def test_a_gated_cut_has_gate_and_up() -> None:
    whole = torch.arange(8)[:, None]
    assert cut(whole, Sharding(0, gated=True), 1, 2)[:, 0].tolist() == [2, 3, 6, 7]
    with pytest.raises(ValueError, match="tensor-parallel size 3"):
        cut(whole, Sharding(0), 0, 3)


@settings(max_examples=20)
@given(rows=st.integers(1, 9), extra=st.integers(0, 9))
def test_padding_comes_off_again(rows: int, extra: int) -> None:
    tensor = torch.randn(rows, 3)
    padded = pad_vocabulary(tensor, rows + extra)
    assert padded.shape[0] == rows + extra and not padded[rows:].any()
    assert torch.equal(remove_padding(EMBEDDING, padded, rows), tensor)
    assert remove_padding("decoder.final_layernorm.weight", padded, rows) is padded


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("module.module.decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "1.input_layernorm.weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "1.pre_mlp_layernorm.weight"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight3", "1.mlp.experts.local_experts.3.linear_fc1.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", "1.self_attention.linear_qkv.weight"),
    ],
)
def test_transformer_engine_names_are_local_names(name: str, wanted: str) -> None:
    assert canonical_name(name) == f"decoder.layers.{wanted}"


def test_global_numbers_of_layers_and_experts() -> None:
    name = with_global_numbers("decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight", [8, 9], 4)
    assert hf_names(name) == ("model.layers.9.mlp.experts.6.down_proj.weight",)
    assert sharding_of(name) == Sharding(1, expert=True)
    with pytest.raises(KeyError, match="mtp"):
        hf_names("mtp.layers.0.enorm.weight")


def _shape(**changes: Any) -> Any:
    config = {**helpers.SIZES, "model_type": "qwen2"}
    return Namespace(**{**shape_of_config(config, "here").__dict__, **changes})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known to --train-backend megatron and its converters"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is not 1"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**helpers.SIZES, "model_type": "llama", **change}))
    with pytest.raises(ValueError, match=message):
        read_shape(tmp_path)
    assert not supports_hf_weight_loading(tmp_path)


def test_missing_and_surplus_tensors_are_named(models: dict[str, Path]) -> None:
    reader, shape = SafetensorReader(models["qwen3"]), read_shape(models["qwen3"])
    check_tensor_names(reader, shape)
    assert supports_hf_weight_loading(models["qwen3"])
    file = reader.shards.pop("model.norm.weight")
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        check_tensor_names(reader, shape)
    reader.shards |= {"model.norm.weight": file, "model.layers.0.extra": file}
    with pytest.raises(ValueError, match="no place for: model.layers.0.extra"):
        check_tensor_names(reader, shape)


# ---- whole Megatron models ----

# (tensor, pipeline, expert) parallel sizes, and the families that are tried with them
TWO_RANKS = {
    (2, 1, 1): ("qwen2", "qwen3", "llama", "qwen3-moe"),
    (1, 2, 1): ("qwen2", "qwen3", "llama-tied-bf16"),
    (1, 1, 2): ("qwen3-moe",),
    (2, 1, 2): ("qwen3-moe",),
}
FOUR_RANKS = {(2, 2, 1): ("qwen2", "llama"), (1, 2, 2): ("qwen3-moe",)}


def _load_and_export(root: str, layouts: dict[tuple[int, int, int], tuple[str, ...]]) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.hf_to_megatron import load_hf_into
    from slime.backends.megatron_utils.megatron_to_hf import export_hf

    for sizes, families in layouts.items():
        helpers.start_megatron(*sizes)
        for family in families:
            folder = Path(root) / family
            args = Namespace(hf_checkpoint=str(folder))
            chunks = helpers.megatron_model(folder, *sizes)
            load_hf_into(chunks, folder, args)
            tensors = {name: tensor.clone() for name, tensor in export_hf(chunks, args)}
            helpers.assert_same_tensors(tensors, helpers.tensors_of(folder))
        dist.barrier()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "world, layouts", [(1, {(1, 1, 1): tuple(helpers.FAMILIES)}), (2, TWO_RANKS), (4, FOUR_RANKS)], ids=["1", "2", "4"]
)
def test_load_and_export_on_any_layout(models: dict[str, Path], world: int, layouts: dict[Any, Any]) -> None:
    """Every rank loads its part and gets the whole model back, bit for bit (the workers assert, and fail the test)."""
    helpers_fsdp.run_workers(_load_and_export, world, str(models["qwen2"].parent), layouts)
