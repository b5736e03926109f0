"""Pack the rows of a micro-batch into one sequence, and scatter results back to the rows. Pure tensor code.

Row i has `tokens` (length L_i), a response of the last R_i tokens and a 0/1 `loss_mask` of length R_i. Packed, rows follow each
other without padding; `position_ids` restart at 0 for each row, which is all that the attention code needs to keep rows apart
(an attention mask beside them would be silently wrong). The logit at position t predicts token t + 1, so a trained token at
row position t is read at t - 1.

Invariants: only positions with mask 1 are selected; `scatter` returns one tensor per row, of length R_i, 0 where the mask is 0.
Left out: which rows form a micro-batch (the data-parallel schedule decides).

Shape legend: T packed tokens, N trained tokens, S sum of response lengths, R one response length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as a single sequence. All index tensors are int64."""

    input_ids_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    select_N: torch.Tensor  # packed positions whose logits predict the trained tokens
    targets_N: torch.Tensor  # ids of the trained tokens
    slots_N: torch.Tensor  # where each trained token sits in the concatenated responses (0 .. S-1)
    response_lengths: tuple[int, ...]

    def scatter(self, values_N: torch.Tensor) -> list[torch.Tensor]:
        """Per-row tensors of length R_i: the given values at trained tokens, 0 elsewhere. Differentiable."""
        flat_S = values_N.new_zeros(sum(self.response_lengths)).index_put((self.slots_N,), values_N)
        return list(flat_S.split(list(self.response_lengths)))


def check_row(index: int, token_count: int, response_length: int, mask_length: int) -> None:
    """Raise `ValueError` naming the row when its lengths cannot be aligned."""
    if mask_length != response_length:
        raise ValueError(f"row {index}: loss_mask has {mask_length} entries but response_length is {response_length}")
    if not 0 <= response_length <= token_count:
        raise ValueError(f"row {index}: response_length {response_length} does not fit into {token_count} tokens")


def _trained_positions(index: int, token_count: int, mask_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Response offsets of the trained tokens, and the row positions of the logits that predict them."""
    offsets_n = torch.nonzero(mask_R, as_tuple=True)[0]
    logits_n = offsets_n + (token_count - len(mask_R)) - 1
    if len(logits_n) and int(logits_n[0]) < 0:
        raise ValueError(
            f"row {index}: the first token of a row has no context and cannot be trained; add a prompt token"
        )
    return offsets_n, logits_n


def pack_rows(
    tokens: Sequence[torch.Tensor], response_lengths: Sequence[int], loss_masks: Sequence[torch.Tensor]
) -> PackedBatch:
    """Pack rows (int64 token tensors, mask tensors of length R_i on the same device) into one sequence.

    Raises `ValueError` when a row's lengths disagree or its first token would be trained.
    """
    select, slots, targets = [], [], []
    token_start = slot_start = 0
    for index, (tokens_L, length, mask_R) in enumerate(zip(tokens, response_lengths, loss_masks, strict=True)):
        check_row(index, len(tokens_L), length, len(mask_R))
        offsets_n, logits_n = _trained_positions(index, len(tokens_L), mask_R)
        select.append(logits_n + token_start)
        slots.append(offsets_n + slot_start)
        targets.append(tokens_L[logits_n + 1])
        token_start += len(tokens_L)
        slot_start += length
    return PackedBatch(
        input_ids_1T=torch.cat(list(tokens))[None],
        position_ids_1T=torch.cat([torch.arange(len(row), device=row.device) for row in tokens])[None],
        select_N=torch.cat(select),
        targets_N=torch.cat(targets),
        slots_N=torch.cat(slots),
        response_lengths=tuple(response_lengths),
    )
