"""Attention over packed rows without a kernel of its own: torch's, row by row.

Input: what transformers hands to an attention function, with `position_ids` that restart at every row of the pack.
Invariants: rows do not see each other; the result is that of one call with a block-diagonal causal mask, but time and memory
grow with the sum of the squared row lengths, not with the square of the pack.
Left out: a key-value cache; packs of batch size other than 1.

Shape legend: H heads, T packed tokens, L tokens of a row, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROW_WISE = "sdpa_row_wise"
"""Name of this attention, for `--attn-implementation`."""


def row_wise_attention(
    module: nn.Module,
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    attention_mask: None,
    *,
    position_ids: torch.Tensor,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """(output [1, T, H, D], None). `position_ids` is [1, T]; a row sees `sliding_window` tokens back, where it is set."""
    lengths = row_lengths(position_ids)
    rows = zip(*(part.split(lengths, dim=2) for part in (query_1HTD, key_1HTD, value_1HTD)), strict=True)
    outputs = [
        sdpa_attention_forward(
            module, query, key, value, _window_mask(length, sliding_window, query.device), **options
        )[0]
        for length, (query, key, value) in zip(lengths, rows, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def row_lengths(position_ids_1T: torch.Tensor) -> list[int]:
    """Lengths of the packed rows: each begins where the positions are 0."""
    starts = torch.nonzero(position_ids_1T[0] == 0)[:, 0].tolist()
    return [stop - start for start, stop in zip(starts, [*starts[1:], position_ids_1T.shape[1]], strict=True)]


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """None where plain causal attention sees the same; else [L, L], true where the query sees the key."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _no_mask(**_: Any) -> None:
    """The rows' bounds are in `position_ids`."""


AttentionInterface.register(ROW_WISE, row_wise_attention)
AttentionMaskInterface.register(ROW_WISE, _no_mask)
