"""Process groups of a training rank: start-up, reductions of metrics, an extra group towards the engines, clean exit.

Inputs are the usual variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The module never chooses an address of its own.
Left out: anything about parameters, parallel layouts (each back end has its own), and which numbers are reduced.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from slime.utils import accelerator
from slime.utils.distributed_utils import init_process_group


@dataclass(frozen=True)
class DistContext:
    """One rank's place in the training group."""

    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def pick_device() -> torch.device:
    """The GPU that this process may use (Ray hides the others), else the CPU."""
    index = int(os.environ.get("LOCAL_RANK", 0)) % accelerator.device_count()
    accelerator.set_device(index)
    return accelerator.device(index)


def communication_backend(args: Namespace, device: torch.device) -> str:
    """Name of the torch.distributed back end: the flag, else the device's own (gloo on CPU, NCCL on GPU)."""
    return args.distributed_backend or accelerator.process_group_backend()


def init_distributed(args: Namespace) -> DistContext:
    """Join the training group, unless the caller already did."""
    device = pick_device()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if not dist.is_initialized():
        dist.init_process_group(communication_backend(args, device), timeout=timeout)
    return DistContext(dist.get_rank(), dist.get_world_size(), device, timeout)


def set_seed(seed: int) -> None:
    """Same seed on every rank: nothing in a training step is drawn per rank (dropout is off)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def all_reduce_sums(
    values: Mapping[str, torch.Tensor | float], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Sum every named scalar over the ranks of the group in one collective. All of them must pass the same names."""
    names = sorted(values)
    total_K = torch.tensor([float(values[name]) for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(total_K, group=group)
    return dict(zip(names, total_K.tolist(), strict=True))


def largest_over_ranks(value: int, device: torch.device, group: dist.ProcessGroup | None = None) -> int:
    """The largest of the values of the group's ranks. Collective."""
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def new_external_group(
    backend: str, address: str, port: int, rank: int, world_size: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group with processes outside the training group (the inference engines); rank 0 hosts its store."""
    return init_process_group(backend, f"tcp://{address}:{port}", timeout, world_size, rank, group_name=name)


def exit_worker(code: int = 0) -> None:
    """Flush and leave a worker process at once.

    The interpreter's finalisation after collectives on gloo aborts now and then, after correct results: a gloo thread asks for the
    GIL while it is being torn down. Worker processes therefore leave through `os._exit`.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
