"""Reduction of per-token values to one number per micro-batch.

The returned function takes the values of all response tokens of a micro-batch, samples one after the other, and gives a
*sum over samples*. Whoever calls it divides by the step's number of rollouts (or by its number of trained tokens), which
is the same on every rank, so that the sum over micro-batches and ranks does not depend on how samples were distributed.

Invariants: a masked token has weight 0; a fully masked sample contributes exactly 0. With the denominator of all samples of
a rollout set to that rollout's trained tokens, cutting a rollout into samples does not change the result.

With context parallelism a rank passes the values of its own response tokens; masks and denominators stay those of whole responses,
so that the sum over ranks equals the value of one rank with everything (`slime.utils.cp_utils`).

Left out: the scaling described above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime.utils.cp_utils import slice_log_prob_with_cp

Reducer = Callable[[torch.Tensor], torch.Tensor]


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float | int | torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Reducer:
    """Builds x -> sum_i (x_i * m_i).sum() / max(denom_i, 1), or sum_i (x_i * m_i).sum() with per-token loss.

    `loss_masks[i]`: 0/1 of shape [response_lengths[i]], any dtype. `sample_denoms[i]`: `rollout_mask_sums` of the sample;
    None means the sample's own mask sum. The reducer takes x of shape [sum(response_lengths)] (of the rank's part of each response
    with `cp_size` > 1) and returns a scalar.

    Raises ValueError when the lists or a mask do not fit together, or x has another length.
    """
    _check_lengths(total_lengths, response_lengths, loss_masks, sample_denoms)
    masks = [mask.detach().float() for mask in loss_masks]
    if not calculate_per_token_loss:
        denoms = [mask.sum() for mask in masks] if sample_denoms is None else sample_denoms
        masks = [_divide(mask, denom) for mask, denom in zip(masks, denoms, strict=True)]
    masks = [
        slice_log_prob_with_cp(mask, total, length, cp_size=cp_size, cp_rank=cp_rank)
        for mask, total, length in zip(masks, total_lengths, response_lengths, strict=True)
    ]
    weights = torch.cat(masks) if masks else torch.zeros(0)

    def reduce(x: torch.Tensor) -> torch.Tensor:
        if x.shape != weights.shape:
            raise ValueError(f"expected {tuple(weights.shape)} token values, got {tuple(x.shape)}")
        return (x * weights.to(x.device)).sum()

    return reduce


def _divide(mask: torch.Tensor, denom: float | int | torch.Tensor) -> torch.Tensor:
    # Stays on the mask's device: reading the number back would stall a GPU once per sample.
    return mask / torch.as_tensor(denom, dtype=mask.dtype, device=mask.device).clamp(min=1.0)


def _check_lengths(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float | int | torch.Tensor] | torch.Tensor | None,
) -> None:
    counts = {len(total_lengths), len(response_lengths), len(loss_masks)}
    counts |= set() if sample_denoms is None else {len(sample_denoms)}
    if len(counts) != 1:
        raise ValueError(f"per-sample lists of different lengths: {sorted(counts)}")
    for i, (length, mask) in enumerate(zip(response_lengths, loss_masks, strict=True)):
        if mask.shape != (length,):
            raise ValueError(f"sample {i}: loss mask of shape {tuple(mask.shape)} for a response of {length} tokens")
