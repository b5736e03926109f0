"""The parameters of a Megatron model under their canonical names, on one rank and as a whole.

Inputs: model chunks, wrapped or not, with `parallel_state` initialised. Invariants: a name means the same on every rank, whatever
the parallel layout and the layer implementation; `iter_full_params` gives every parameter once, in the order of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slime.backends.megatron_utils.parallel_ranks import ParallelRanks
from slime.backends.megatron_utils.param_names import (
    OUTPUT,
    canonical_name,
    is_expert,
    sharding_of,
    with_global_numbers,
    with_other_expert,
)
from slime.utils.model_shape import ModelShape


def unwrap(chunk: nn.Module) -> Any:
    """The model inside the wrappers of data parallelism and mixed precision."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def named_params(model_chunks: Sequence[nn.Module], first_expert: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of what this rank holds, but for a value head, which has no counterpart.

    Layers have their global numbers, experts are counted from `first_expert`.
    """
    for chunk in model_chunks:
        model = unwrap(chunk)
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            name = with_global_numbers(canonical_name(name), numbers, first_expert)
            if not (name.startswith("output_layer.") and parameter.shape[0] == 1):
                yield name, parameter


@dataclass(frozen=True)
class _Entry:
    """One parameter of a stage as all stages know it: name on expert rank 0, shape after gathering, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def iter_full_params(model_chunks: Sequence[nn.Module], shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """(canonical name, whole parameter, vocabulary still padded), on every rank. Collective: all ranks must exhaust it."""
    ranks = ParallelRanks.current()
    own = [entry for entry in named_params(model_chunks, 0) if shape.untied or entry[0] != OUTPUT]
    experts = shape.num_experts // ranks.ep[1]
    for stage, entries in enumerate(_plans(own, ranks)):
        for position, entry in enumerate(entries):
            parameter = own[position][1] if stage == ranks.pp[0] else None
            whole = _on_every_stage(entry, parameter, stage, ranks)
            for distance, tensor in enumerate(whole):
                yield with_other_expert(entry.name, distance * experts), tensor


def _plans(own: Sequence[tuple[str, nn.Parameter]], ranks: ParallelRanks) -> list[list[_Entry]]:
    """What each pipeline stage will send, in order."""
    from megatron.core import parallel_state as state

    entries = [_entry(name, parameter, ranks) for name, parameter in own]
    if ranks.pp[1] == 1:
        return [entries]
    plans: list[Any] = [None] * ranks.pp[1]
    dist.all_gather_object(plans, entries, group=state.get_pipeline_model_parallel_group())
    return plans


def _entry(name: str, parameter: torch.Tensor, ranks: ParallelRanks) -> _Entry:
    sharding, size = sharding_of(name), list(parameter.shape)
    if sharding.dim is not None:
        size[sharding.dim] *= ranks.tensor(sharding)[1]
    return _Entry(name, (ranks.ep[1] if is_expert(name) else 1, *size), parameter.dtype)


def _on_every_stage(entry: _Entry, parameter: nn.Parameter | None, stage: int, ranks: ParallelRanks) -> torch.Tensor:
    """The gathered parameter, with the expert ranks as first dimension; `parameter` is None on stages without it."""
    from megatron.core import parallel_state as state

    if parameter is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    else:
        whole = gather(entry.name, parameter.data, ranks)
    if ranks.pp[1] > 1:
        group = state.get_pipeline_model_parallel_group()
        dist.broadcast(whole, src=dist.get_global_rank(group, stage), group=group)
    return whole


def gather(name: str, part: torch.Tensor, ranks: ParallelRanks) -> torch.Tensor:
    """The whole parameter from the parts of tensor-parallel ranks, those of all expert ranks in the first dimension."""
    from megatron.core import parallel_state as state

    sharding = sharding_of(name)
    if sharding.dim is not None:
        group = (
            state.get_expert_tensor_parallel_group() if sharding.expert else state.get_tensor_model_parallel_group()
        )
        parts = _all_gather(part, group, ranks.tensor(sharding)[1])
        part = join(parts, sharding.dim, sharding.gated)
    if sharding.expert:
        return torch.stack(_all_gather(part, state.get_expert_model_parallel_group(), ranks.ep[1]))
    return part[None]


def _all_gather(part: torch.Tensor, group: Any, size: int) -> list[torch.Tensor]:
    if size == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def join(parts: Sequence[torch.Tensor], dim: int, gated: bool) -> torch.Tensor:
    """The inverse of `hf_to_megatron.common.cut`."""
    if len(parts) == 1:
        return parts[0]
    if gated:
        halves = [part.chunk(2, dim=dim) for part in parts]
        return torch.cat([half[i] for i in range(2) for half in halves], dim=dim)
    return torch.cat(list(parts), dim=dim)
