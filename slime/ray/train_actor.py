"""Base of a training rank: rendezvous environment, the interface the train group drives.

Invariant: rank 0 chooses the rendezvous port on its own node; the other ranks are told. The class knows no backend.
"""

from __future__ import annotations

import abc
import os
from argparse import Namespace
from typing import Any

from slime.ray.ray_actor import RayActor
from slime.utils import accelerator


def get_local_gpu_id() -> int:
    """Position, among the GPUs this process can see, of the one Ray reserved for it (0 without a GPU)."""
    import ray

    reserved = [str(gpu_id) for gpu_id in ray.get_gpu_ids()]
    if not reserved:
        return 0
    return accelerator.resolve_visible_device_id(reserved[0])


class TrainRayActor(RayActor, abc.ABC):
    """One training rank. `master_addr` None means: this rank hosts the rendezvous."""

    def __init__(self, world_size: int, rank: int, master_addr: str | None, master_port: int | None) -> None:
        self.world_size = world_size
        self.rank = rank
        if master_addr is None or master_port is None:
            master_addr, master_port = self.get_master_addr_and_port()
        self.master_addr, self.master_port = master_addr, master_port
        os.environ.update(
            MASTER_ADDR=str(master_addr),
            MASTER_PORT=str(master_port),
            WORLD_SIZE=str(world_size),
            RANK=str(rank),
            LOCAL_RANK=str(get_local_gpu_id()),
        )

    def rendezvous(self) -> tuple[str, int]:
        """Address and port that every rank of the group joins."""
        return self.master_addr, self.master_port

    @abc.abstractmethod
    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """Build the model; returns the id of the first rollout to run (0, or stored + 1 after a resume)."""

    @abc.abstractmethod
    def parallel_config(self) -> dict[str, int]:
        """Into how many shares rollout data are cut, and by what else ranks are divided (`dp_size`, `cp_size`, ...)."""

    @abc.abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> dict[str, Any] | None:
        """Train on one rollout; `rollout_data_ref` has one `Box` per data-parallel rank. Metrics on rank 0."""

    @abc.abstractmethod
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint of `rollout_id`."""

    @abc.abstractmethod
    def update_weights(self) -> None:
        """Send the current weights to the engines."""

    @abc.abstractmethod
    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Give the rank the handle through which it finds the engines."""

    @abc.abstractmethod
    def clear_memory(self) -> None:
        """Return cached device memory."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Move the model off the device."""

    @abc.abstractmethod
    def wake_up(self) -> None:
        """Bring the model back."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Leave the process groups and flush; the process is killed right after."""
