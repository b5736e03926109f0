"""The one-dimensional mesh of a FSDP rank. Joining the group, reductions and exit: `common.distributed`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from slime.backends.common import distributed as common


@dataclass(frozen=True)
class FSDPContext(common.DistContext):
    """One rank's place in the training group. `mesh` has one dimension, `dp`, over all ranks."""

    mesh: DeviceMesh


def init_distributed(args: Namespace) -> FSDPContext:
    """Join the training group (unless the caller already did) and build the mesh."""
    place = common.init_distributed(args)
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("dp",))
    return FSDPContext(place.rank, place.world_size, place.device, place.timeout, mesh)


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """A sharded tensor in one piece, any other as it is. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value
