"""Groups beside the default one: closed and opened again, and shared with processes of another world."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from helpers_fsdp import run_workers

from slime.utils import distributed_utils
from slime.utils.misc import get_free_port


def _use(group: torch.distributed.ProcessGroup, rank: int) -> None:
    import torch.distributed as dist

    value = torch.ones(2) * (rank + 1)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [3.0, 3.0]
    seen: list[int | None] = [None, None]
    dist.all_gather_object(seen, rank, group=group)
    assert seen == [0, 1] and dist.get_rank(group) == rank and dist.get_world_size(group) == 2
    dist.barrier(group)


def _start() -> int:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    return torch.distributed.get_rank()


def _close_and_open(switches: tuple[str, ...]) -> None:
    import torch.distributed as dist

    from slime.utils import reloadable_process_group as reloadable

    rank = _start()
    reloadable.register_default_process_group(timedelta(seconds=60))
    reloadable.monkey_patch_torch_dist()
    reloadable.monkey_patch_torch_dist()
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    assert isinstance(both, reloadable.ReloadableProcessGroup) and both.name() == "gloo"
    _use(both, rank)
    for switch in switches:
        os.environ["SLIME_DESTROY_WORLD_PROCESS_GROUP"] = switch
        reloadable.destroy_process_groups()
        assert dist.is_initialized() == (switch == "0")
        with pytest.raises(RuntimeError, match="is closed"):
            both.allreduce(torch.ones(1))
        assert both.size() == 2 and both.rank() == rank
        reloadable.reload_process_groups()
        _use(both, rank)
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=alone)


def test_groups_survive_being_closed() -> None:
    run_workers(_close_and_open, 2, ("0", "1", "1"))


def _join_two_worlds(port: int) -> None:
    import torch.distributed as dist

    rank, world_size = _start(), 2
    with pytest.raises(RuntimeError, match="init_gloo_group"):
        distributed_utils.get_gloo_group()
    assert distributed_utils.init_gloo_group() is distributed_utils.init_gloo_group()
    meeting = f"tcp://127.0.0.1:{port}"
    group = distributed_utils.init_process_group(
        "gloo", meeting, timedelta(seconds=60), world_size, world_size - 1 - rank, group_name="other"
    )
    value = torch.tensor([float(rank)])
    dist.broadcast(value, src=0, group=group)  # rank 0 of that group is our rank 1
    assert value.item() == world_size - 1
    dist.barrier(distributed_utils.get_gloo_group())


def test_a_group_of_its_own_world() -> None:
    run_workers(_join_two_worlds, 2, get_free_port(27100))


def _whiten(expected: list[float]) -> None:
    """One rank has all the tokens but the masked ones; the other has none."""
    rank = _start()
    values = torch.tensor([1.0, 2.0, 50.0, 6.0]) if rank == 0 else torch.empty(0)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0]) if rank == 0 else torch.empty(0)
    whole = distributed_utils.distributed_masked_whiten(values, mask)
    halves = torch.tensor([[1.0, 2.0], [50.0, 6.0]])[rank], torch.tensor([[1.0, 1.0], [0.0, 1.0]])[rank]
    part = distributed_utils.distributed_masked_whiten(*halves)
    wanted = torch.tensor(expected)
    torch.testing.assert_close(whole, wanted if rank == 0 else torch.empty(0))
    torch.testing.assert_close(part, wanted[2 * rank : 2 * rank + 2])


def test_whitening_does_not_depend_on_the_ranks() -> None:
    std = 7.0**0.5  # of 1, 2 and 6, with two degrees of freedom
    run_workers(_whiten, 2, [(value - 3.0) / std for value in (1.0, 2.0, 50.0, 6.0)])


def test_arguments_that_cannot_be_used() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(ValueError, match="exclude each other"):
        distributed_utils.init_process_group("gloo", "tcp://x:1", store=store)
    with pytest.raises(ValueError, match="needs rank"):
        distributed_utils.init_process_group("gloo", store=store)
