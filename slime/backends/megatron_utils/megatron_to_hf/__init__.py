"""Hugging Face tensors from Megatron's parameters: take off the padding, take apart what Megatron keeps merged.

`convert_to_hf` is pure; `export_hf` streams a whole model. Invariants: the inverse of `hf_to_megatron`, bit for bit; values keep
their dtype. Left out: quantised formats.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from slime.backends.megatron_utils.model_params import iter_full_params
from slime.backends.megatron_utils.param_names import EMBEDDING, OUTPUT, hf_names
from slime.backends.megatron_utils.transformer_config import read_shape
from slime.utils.model_shape import ModelShape

__all__ = ["convert_to_hf", "export_hf", "remove_padding", "split_qkv"]


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The rows of the vocabulary, when the parameter has a row for each token."""
    return param[:vocab_size] if name in (EMBEDDING, OUTPUT) else param


def split_qkv(merged: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """Weights or biases of q, k and v from `linear_qkv`, the inverse of `merge_qkv`."""
    rest = merged.shape[1:]
    per_group = shape.num_attention_heads // shape.num_query_groups
    grouped = merged.reshape(shape.num_query_groups, per_group + 2, shape.kv_channels, *rest)
    return [x.reshape(-1, *rest) for x in grouped.split([per_group, 1, 1], dim=1)]


def convert_to_hf(name: str, param: torch.Tensor, shape: ModelShape) -> list[tuple[str, torch.Tensor]]:
    """Named tensors of one whole parameter under its canonical name. Raises KeyError for a name without counterpart."""
    names = hf_names(name)
    param = remove_padding(name, param, shape.vocab_size)
    if len(names) == 1:
        return [(names[0], param)]
    parts = split_qkv(param, shape) if len(names) == 3 else param.chunk(2)
    return list(zip(names, parts, strict=True))


def export_hf(model_chunks: Sequence[nn.Module], args: Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor), one parameter of the model in memory at a time; the same on every rank.

    Collective: all ranks must exhaust it. Sizes come from `args.hf_checkpoint`.
    """
    shape = read_shape(args.hf_checkpoint)
    for name, param in iter_full_params(model_chunks, shape):
        yield from convert_to_hf(name, param, shape)
