"""Process groups beside the default one, and statistics over the tokens of all ranks.

Invariants: everything here is collective; every rank of the group must call, also one that has no token, and the result does
not depend on how the tokens were distributed. Left out: the default group (a backend makes it).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

_gloo_group: torch.distributed.ProcessGroup | None = None


def init_gloo_group() -> torch.distributed.ProcessGroup:
    """The group of all ranks on gloo, for objects and barriers on the CPU; made at the first call."""
    import torch.distributed as dist

    if _gloo_group is None:
        set_gloo_group(dist.new_group(backend="gloo"))
    return get_gloo_group()


def get_gloo_group() -> torch.distributed.ProcessGroup:
    """The group that `init_gloo_group` made. Raises RuntimeError before that."""
    if _gloo_group is None:
        raise RuntimeError("there is no gloo group yet: every rank must call init_gloo_group() first")
    return _gloo_group


def set_gloo_group(group: torch.distributed.ProcessGroup | None) -> None:
    """Use a group that exists, or forget it (None)."""
    global _gloo_group
    _gloo_group = group


def init_process_group(
    backend: str | Any = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: torch.distributed.Store | None = None,
    group_name: str | None = None,
    pg_options: Any | None = None,
) -> torch.distributed.ProcessGroup:
    """A group with processes outside of the default group, such as the inference engines.

    `torch.distributed.new_group` can only take ranks of the default group, so this one stands on a store of its own: `store`, or
    the one at `init_method` (`tcp://host:port`, hosted by rank 0; default `env://`). Blocks until all members have joined.
    Raises ValueError for both at once or for missing ranks, torch's `DistStoreError` after `timeout`.
    """
    from torch.distributed import distributed_c10d as c10d

    timeout = timeout or c10d.default_pg_timeout
    group_name = group_name or "slime"
    if store is not None and init_method is not None:
        raise ValueError("init_process_group: store and init_method exclude each other")
    if store is not None and (rank < 0 or world_size < 1):
        raise ValueError(f"init_process_group: a store needs rank and world_size, got {rank} of {world_size}")
    if store is None:
        found = c10d.rendezvous(init_method or "env://", rank, world_size, timeout=timeout)
        store, rank, world_size = next(found)
        store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend or "undefined"),
        c10d.PrefixStore(group_name, store),
        group_name=c10d.GroupName(group_name),
        backend_options=pg_options,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


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
