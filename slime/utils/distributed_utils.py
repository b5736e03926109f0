"""Statistics over the tokens of all ranks.

Invariants: every rank of the group must call, also one that has no token; the result does not depend on how the tokens were
distributed. Left out: process groups themselves (a backend makes them).
"""

from __future__ import annotations

import torch


def distributed_masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: torch.distributed.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """(x - mean) / sqrt(var + epsilon), with mean and unbiased variance of the unmasked values of all ranks in the group.

    `values`, `mask`: same shape, possibly empty. Without `shift_mean` the mean is added back. Masked entries are transformed
    like the others but count in no statistic. Sums are taken in float64, the result has the dtype of `values`. Without an
    initialised process group the statistics are those of this process.

    Raises ValueError, on every rank, when no value of any rank is unmasked.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values of shape {tuple(values.shape)} with a mask of shape {tuple(mask.shape)}")
    # Masked entries may be anything, also infinite, and 0 * inf is not 0.
    kept = mask != 0
    x, m = values.detach().double().masked_fill(~kept, 0.0), mask.double()
    count, total = _sum_over_ranks(torch.stack([m.sum(), (x * m).sum()]), process_group).unbind()
    if count == 0:
        raise ValueError("cannot whiten: no token of any rank is trained; the global sum of the loss masks is 0")
    mean = total / count
    # Two passes, because the difference of large sums of squares loses the variance of small advantages.
    squares = _sum_over_ranks((((x - mean) ** 2) * m).sum(), process_group)
    # One token has no spread; its whitened value is 0 whatever stands below.
    variance = squares / (count - 1).clamp(min=1.0)
    whitened = (values.double() - mean) * torch.rsqrt(variance + epsilon)
    return (whitened if shift_mean else whitened + mean).to(values.dtype)


def _sum_over_ranks(value: torch.Tensor, process_group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, group=process_group)
    return value
