"""A micro-batch as megatron-core takes it: packed rows with their bounds, and this rank's part of them.

Rows follow each other (`thd`). With context parallelism each row is padded to 2 x size equal chunks, of which a rank has two (zig-zag, see
`slime.utils.cp_utils`). A row of padding at the end makes the length a multiple that sequence parallelism (and
`--data-pad-size-multiplier`) asks for; nothing of it is selected.

Invariants: every trained token is read on exactly one context-parallel rank; rows do not see each other, nor the padding.

Shape legend: T packed tokens with padding, t of them on this context-parallel rank, n trained tokens that are read here.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.common.packing import PackedBatch
from slime.utils.cp_utils import slice_with_cp


@dataclass(frozen=True)
class StageBatch:
    """What a pipeline stage needs of a micro-batch. Index tensors are int64."""

    input_ids_1t: torch.Tensor
    position_ids_1t: torch.Tensor
    packed_seq_params: PackedSeqParams
    select_n: torch.Tensor
    """Positions in this rank's tokens whose hidden states predict trained tokens."""
    targets_n: torch.Tensor
    slots_n: torch.Tensor
    """Where each of them sits in the concatenated responses of the micro-batch (0 .. S - 1)."""
    response_lengths: tuple[int, ...]

    def scatter(self, values_n: torch.Tensor) -> torch.Tensor:
        """[S]: this rank's values at their tokens, 0 elsewhere. Differentiable; the sum over context ranks is the whole."""
        return values_n.new_zeros(sum(self.response_lengths)).index_put((self.slots_n,), values_n)


def stage_batch(args: Namespace, tokens: Sequence[torch.Tensor], packed: PackedBatch) -> StageBatch:
    """This context-parallel rank's part of the packed rows `tokens` (int64, [L_i])."""
    size, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    cp = {"cp_size": size, "cp_rank": rank}
    device = tokens[0].device
    lengths = _padded_lengths([len(row) for row in tokens], size, _alignment(args, size))
    rows = [*tokens, *[tokens[0].new_zeros(length) for length in lengths[len(tokens) :]]]
    ids = [_pad(row, length) for row, length in zip(rows, lengths, strict=True)]
    # The packed position of each token of this rank; -1 is padding.
    starts = torch.tensor([0, *[len(row) for row in tokens]]).cumsum(0).tolist()
    places = [
        _places(start, len(row), length, device) for start, row, length in zip(starts, tokens, lengths, strict=False)
    ]
    places += [torch.full((length,), -1, device=device) for length in lengths[len(tokens) :]]
    here_t = torch.cat([slice_with_cp(row, -1, **cp) for row in places])
    select_n, order_n = _locate(here_t, packed.select_N)
    return StageBatch(
        input_ids_1t=torch.cat([slice_with_cp(row, 0, **cp) for row in ids])[None],
        position_ids_1t=torch.cat([slice_with_cp(torch.arange(n, device=device), 0, **cp) for n in lengths])[None],
        packed_seq_params=_params(lengths, device),
        select_n=select_n,
        targets_n=packed.targets_N[order_n],
        slots_n=packed.slots_N[order_n],
        response_lengths=packed.response_lengths,
    )


def _alignment(args: Namespace, cp_size: int) -> int:
    """What the packed length over all context ranks must be a multiple of."""
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    return math.lcm(cp_size * tp_size * args.data_pad_size_multiplier, _row_multiple(cp_size))


def _row_multiple(cp_size: int) -> int:
    return 2 * cp_size if cp_size > 1 else 1


def _padded_lengths(lengths: Sequence[int], cp_size: int, multiple: int) -> list[int]:
    """Length of each row with padding, and of one more row of padding where it is needed."""
    step = _row_multiple(cp_size)
    padded = [-(-length // step) * step for length in lengths]
    missing = -sum(padded) % multiple
    return padded + ([missing] if missing else [])


def _pad(row: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([row, row.new_zeros(length - len(row))])


def _places(start: int, length: int, padded: int, device: torch.device) -> torch.Tensor:
    inside = torch.arange(start, start + length, device=device)
    return torch.cat([inside, torch.full((padded - length,), -1, device=device)])


def _locate(here_t: torch.Tensor, select_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions on this rank, which of the N they are) of those wanted packed positions that are here."""
    where = torch.full((int(max(here_t.max(), select_N.max() if len(select_N) else 0)) + 1,), -1, device=here_t.device)
    inside = here_t >= 0
    where[here_t[inside]] = torch.nonzero(inside)[:, 0]
    local_N = where[select_N]
    order_n = torch.nonzero(local_N >= 0)[:, 0]
    return local_N[order_n], order_n


def _params(lengths: Sequence[int], device: torch.device) -> Any:
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
