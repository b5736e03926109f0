"""Build Megatron's parameters from Hugging Face tensors: merge, pad the vocabulary, cut the rank's part, copy it in.

Pure. Layouts: `linear_qkv` holds, group after group, the group's query heads, its key head and its value head; `linear_fc1` holds all gate
rows, then all up rows, and each tensor-parallel rank has its part of both.
Invariant: every value is copied bit for bit unless the parameter has another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from slime.backends.common.hf_weights import SafetensorReader
from slime.backends.megatron_utils.param_names import (
    EMBEDDING,
    HF_OUTPUT,
    OUTPUT,
    Sharding,
    all_names,
    hf_names,
    sharding_of,
    strip_mcore_wrappers,
)
from slime.utils.model_shape import ModelShape, text_config

__all__ = [
    "SafetensorReader",
    "check_tensor_names",
    "cut",
    "megatron_tensor",
    "merge_gate_up",
    "merge_qkv",
    "pad_vocabulary",
    "strip_mcore_wrappers",
    "text_config",
]

_NAMES_SHOWN = 5
# Constants that older checkpoints store as if they were weights.
_IGNORED = ("rotary_emb.inv_freq",)


def merge_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ModelShape) -> torch.Tensor:
    """Weights [rows, hidden] or biases [rows] of q, k and v, interleaved by group."""
    rest = q.shape[1:]
    parts = [x.reshape(config.num_query_groups, -1, config.kv_channels, *rest) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def merge_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate rows, then up rows."""
    return torch.cat([gate, up])


def pad_vocabulary(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows up to `rows`. Whoever computes log-probs must leave these rows out: their logits are 0, not minus infinity."""
    if tensor.shape[0] > rows:
        raise ValueError(
            f"the model has {rows} rows of vocabulary, the checkpoint {tensor.shape[0]}: wrong --vocab-size"
        )
    return F.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


def cut(tensor: torch.Tensor, sharding: Sharding, rank: int, size: int) -> torch.Tensor:
    """The part of tensor-parallel rank `rank` of `size`. Raises ValueError when it cannot be cut evenly."""
    if sharding.dim is None or size == 1:
        return tensor
    parts = 2 * size if sharding.gated else size
    if tensor.shape[sharding.dim] % parts:
        raise ValueError(f"{tensor.shape[sharding.dim]} rows cannot be cut evenly for tensor-parallel size {size}")
    if sharding.gated:
        return torch.cat([half.chunk(size, dim=sharding.dim)[rank] for half in tensor.chunk(2, dim=sharding.dim)])
    return tensor.chunk(size, dim=sharding.dim)[rank]


def megatron_tensor(name: str, read: Callable[[str], torch.Tensor], config: ModelShape) -> torch.Tensor:
    """The whole (uncut, unpadded) parameter of a canonical name. Tied embeddings answer for the output layer as well."""
    if name == OUTPUT and not config.untied:
        name = EMBEDDING
    tensors = [read(hf_name) for hf_name in hf_names(name)]
    if len(tensors) == 3:
        q, k, v = tensors
        return merge_qkv(q, k, v, config)
    return tensors[0] if len(tensors) == 1 else merge_gate_up(*tensors)


def rank_tensor(
    name: str, read: Callable[[str], torch.Tensor], config: ModelShape, parameter: torch.Tensor, rank: int, size: int
) -> torch.Tensor:
    """What belongs into `parameter`, the part of rank `rank` of `size`. Raises ValueError when the shapes do not fit."""
    whole, sharding = megatron_tensor(name, read, config), sharding_of(name)
    if name in (EMBEDDING, OUTPUT):
        whole = pad_vocabulary(whole, parameter.shape[0] * size)
    part = cut(whole, sharding, rank, size)
    if part.shape != parameter.shape:
        raise ValueError(f"{name}: the checkpoint gives {list(part.shape)}, the model has {list(parameter.shape)}")
    return part


def check_tensor_names(reader: SafetensorReader, config: ModelShape) -> None:
    """Raise ValueError when the directory lacks a tensor of the model, or has one that would be left out."""
    wanted = {hf_name for name in all_names(config) for hf_name in hf_names(name)}
    missing = sorted(wanted - set(reader.shards))
    extra = {name for name in set(reader.shards) - wanted if not name.endswith(_IGNORED)}
    if not config.untied:
        extra.discard(HF_OUTPUT)
    for names, what in ((missing, "lacks"), (sorted(extra), "has tensors that this model has no place for:")):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise ValueError(f"{Path(reader.folder)} {what} {', '.join(names[:_NAMES_SHOWN])}{more}")
