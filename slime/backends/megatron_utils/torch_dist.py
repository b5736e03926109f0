"""Megatron's checkpoint format ("torch_dist") from and to Hugging Face weights, without building a model.

Layout of the directory: DCP files, `common.pt` (plain values) and `metadata.json`. A parameter of a layer is stored with all layers
stacked, one of an expert with layers and experts in front; so the format does not depend on the parallel layout.

Invariants: what is written here loads into the model that megatron-core builds for the same shape, with any tensor, pipeline and
expert parallel size, from its own layers and from TransformerEngine's (their empty extra states are there too); what megatron-core
wrote is read back bit for bit, whichever layers it was written from.
Left out: optimizer states, which are skipped when reading.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from slime.backends.common.dcp_files import DcpReader, Piece, load_plain
from slime.backends.common.hf_weights import SafetensorReader
from slime.backends.megatron_utils.hf_to_megatron.common import megatron_tensor, pad_vocabulary
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.param_names import EMBEDDING, OUTPUT, all_names, is_expert
from slime.utils.model_shape import FAMILIES, SIZE_KEYS, ModelShape

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
# Canonical part of a layer -> how the stored one is called; of several, the first that is there is read, and all are written.
_STORED: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}
# Modules of a layer that store an extra state, here always None: those of megatron-core's own layers and TransformerEngine's.
_WITH_STATE = tuple(
    f"self_attention.{name}" for name in ("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm")
)
_MLP_WITH_STATE = ("linear_fc1", "linear_fc2")
_MODEL_WITH_STATE = ("decoder.final_layernorm", "output_layer")
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def stored_place(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Possible stored names of a canonical name, and its position in the leading dimensions."""
    layer = _LAYER.match(name)
    if layer is None:
        return (name,), ()
    expert = _EXPERT.match(layer[2])
    if expert:
        return (f"decoder.layers.mlp.experts.experts.{expert[2]}",), (int(layer[1]), int(expert[1]))
    return tuple(f"decoder.layers.{part}" for part in _STORED.get(layer[2], (layer[2],))), (int(layer[1]),)


def _stacked(name: str, shape: ModelShape) -> tuple[int, ...]:
    if not _LAYER.match(name):
        return ()
    return (shape.num_layers, shape.num_experts) if is_expert(name) else (shape.num_layers,)


def padded_rows(vocab_size: int, divisor: int, tensor_parallel: int) -> int:
    """Rows of a padded vocabulary: the next multiple of `divisor * tensor_parallel`."""
    multiple = divisor * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def pieces_of_hf(reader: SafetensorReader, shape: ModelShape, rows: int, dtype: torch.dtype) -> Iterator[Piece]:
    """What to write for a Hugging Face model: each parameter of `dtype`, the vocabulary padded to `rows`."""
    for name in all_names(shape):
        make = _maker(name, reader, shape, rows)
        size = _size(name, reader, shape, rows)
        stored, index = stored_place(name)
        ones = tuple(1 for _ in index)
        for key in stored if index and shape.num_experts else stored[:1]:
            yield Piece(key, index, (*ones, *size), (*_stacked(name, shape), *size), dtype, make)


def _maker(name: str, reader: SafetensorReader, shape: ModelShape, rows: int) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        whole = megatron_tensor(name, reader.get_tensor, shape)
        return pad_vocabulary(whole, rows) if name in (EMBEDDING, OUTPUT) else whole

    return make


def _size(name: str, reader: SafetensorReader, shape: ModelShape, rows: int) -> tuple[int, ...]:
    """Shape of the merged parameter, from the shapes in the files."""

    def empty(hf_name: str) -> torch.Tensor:
        return torch.empty(reader.get_shape(hf_name), device="meta")

    if name in (EMBEDDING, OUTPUT):
        return rows, shape.hidden_size
    return tuple(megatron_tensor(name, empty, shape).shape)


def extra_states(shape: ModelShape) -> Iterator[str]:
    """Names of the empty extra states."""
    for number in range(shape.num_layers):
        place = f"_extra_state/shard_{number}_{shape.num_layers}"
        mlp = () if shape.num_experts else tuple(f"mlp.{name}" for name in _MLP_WITH_STATE)
        for module in (*_WITH_STATE, *mlp, "input_layernorm", "pre_mlp_layernorm"):
            yield f"decoder.layers.{module}.{place}"
        for expert in range(shape.num_experts):
            inside = f"_extra_state/shard_{number}.{expert}_{shape.num_layers}.{shape.num_experts}"
            for module in _MLP_WITH_STATE:
                yield f"decoder.layers.mlp.experts.experts.{module}.{inside}"
    for module in _MODEL_WITH_STATE:
        yield f"{module}._extra_state/shard_0_1"


def write_common(folder: Path, args: Namespace, iteration: int) -> None:
    """The files beside the tensors. `args` may hold plain values only."""
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": iteration}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_FORMAT))


def read_common(folder: Path) -> dict[str, Any]:
    """Content of `common.pt`, plain values only. Raises ValueError when it holds anything else."""
    path = folder / "common.pt"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no common.pt there; give an iter_* or release directory of --save")
    try:
        return dict(load_plain(path, [Namespace]))
    except ValueError as error:
        raise ValueError(f"{error}; give --origin-hf-dir") from error


def shape_of_args(args: Any, model_name: str, rows: int) -> ModelShape:
    """Sizes from the arguments in a checkpoint, whose embedding has `rows`. Raises ValueError when they do not say them."""
    family = FAMILIES[model_name.replace("qwen2.5", "qwen2")]
    sizes = {name: size for name in SIZE_KEYS if (size := getattr(args, name, None))}
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if name not in sizes]
    if missing:
        raise ValueError(f"the checkpoint does not say {', '.join(missing)}; give --origin-hf-dir")
    heads = sizes["num_attention_heads"]
    # Widths of feed-forward parts are not needed here: the tensors have them.
    known = {"num_query_groups": heads, "kv_channels": sizes["hidden_size"] // heads, "vocab_size": rows}
    known |= {"ffn_hidden_size": 0, "moe_router_topk": min(1, sizes.get("num_experts", 0)), **sizes}
    untied = getattr(args, "untie_embeddings_and_output_weights", True)
    return ModelShape(**known, qkv_bias=family.qkv_bias, qk_layernorm=family.qk_layernorm, untied=untied)


def args_of_shape(shape: ModelShape) -> Namespace:
    """The inverse: what a checkpoint written from a Hugging Face model says about itself."""
    sizes = {name: getattr(shape, name) or None for name in SIZE_KEYS}
    return Namespace(**sizes, untie_embeddings_and_output_weights=shape.untied)


def hf_tensors(
    reader: DcpReader, shape: ModelShape, missing: Callable[[str], None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor), one parameter in memory at a time.

    A parameter that is not in the checkpoint is an error (ValueError), or reported to `missing`.
    """
    there = set(reader.names())
    places = {name: stored_place(name) for name in all_names(shape)}
    for name, (keys, _) in places.items():
        if there.isdisjoint(keys):
            if missing is None:
                raise ValueError(f"{reader.folder}: no {keys[0]}; is it a Megatron checkpoint of this model?")
            missing(name)
    for name, (keys, index) in places.items():
        key = next((key for key in keys if key in there), None)
        if key is None:
            continue
        yield from convert_to_hf(name, reader.read(key, index), shape)
