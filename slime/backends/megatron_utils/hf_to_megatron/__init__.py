"""Hugging Face weights into a Megatron model, without a detour: each rank reads what it needs.

Inputs: the model chunks of this rank (wrapped or not), with `parallel_state` initialised, and a directory of safetensors files.
Invariants: names are checked before the first copy; a parameter without counterpart is an error; a value head (one row) keeps its values.
Left out: the float32 copies of an optimizer, which must be read again from the parameters (`reload_model_params`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from slime.backends.megatron_utils.hf_to_megatron.common import SafetensorReader, check_tensor_names, rank_tensor
from slime.backends.megatron_utils.model_params import named_params
from slime.backends.megatron_utils.parallel_ranks import ParallelRanks
from slime.backends.megatron_utils.param_names import sharding_of
from slime.backends.megatron_utils.transformer_config import read_shape

__all__ = ["load_hf_into", "load_hf_weights", "supports_hf_weight_loading"]


def supports_hf_weight_loading(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory of a family with a converter."""
    try:
        read_shape(path)
        SafetensorReader(path)
    except (FileNotFoundError, ValueError, KeyError):
        return False
    return True


def load_hf_weights(args: Namespace, model: Sequence[nn.Module], path: str | Path) -> None:
    """Load `path` into the model chunks of this rank, see `load_hf_into`."""
    load_hf_into(model, path, args)


@torch.no_grad()
def load_hf_into(model_chunks: Sequence[nn.Module], hf_dir: str | Path, args: Namespace) -> None:
    """Fill every parameter of the chunks from `hf_dir`. Not collective.

    Raises FileNotFoundError for a missing directory, ValueError when names or shapes do not fit.
    """
    shape, reader, ranks = read_shape(hf_dir), SafetensorReader(hf_dir), ParallelRanks.current()
    check_tensor_names(reader, shape)
    first_expert = ranks.ep[0] * (shape.num_experts // ranks.ep[1])
    parameters = list(named_params(model_chunks, first_expert))
    for name, parameter in tqdm(parameters, desc="load HF weights", disable=not ranks.is_main):
        rank, size = ranks.tensor(sharding_of(name))
        parameter.data.copy_(rank_tensor(name, reader.get_tensor, shape, parameter, rank, size))
