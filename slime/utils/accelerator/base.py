"""What a training process asks of its device, in one class per kind of device.

Inputs: a device as index, name, `torch.device` or None (the current one). Invariant: every method works on every device; where
a device has no such thing (a stream's cache, an out-of-memory observer) the method says so by its result, never by a fake one.
Left out: kernels and numerics, and how many processes share a device.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Device = int | str | torch.device | None
VENDOR_BACKENDS = ("nccl", "mccl")


class Accelerator(abc.ABC):
    """One kind of device. Sizes are bytes.

    Attributes:
        name: key under which it is registered.
        device_type: the `type` of its `torch.device`.
        communication_backend_name: its own back end of torch.distributed.
    """

    name: str
    device_type: str
    communication_backend_name: str

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether this process can use such a device."""

    @abc.abstractmethod
    def accelerator_module(self) -> Any:
        """The module of torch that drives it, such as `torch.cuda`."""

    @abc.abstractmethod
    def device(self, index: Device = None) -> torch.device:
        """The device of that index; None: the current one."""

    @abc.abstractmethod
    def device_name(self, index: Device = None) -> str:
        """The device as text, such as `cuda:0`."""

    @abc.abstractmethod
    def set_device(self, index: int | str | torch.device) -> None:
        """Make it the current device of this process."""

    @abc.abstractmethod
    def current_device(self) -> int | str:
        """Index of the current device, or its name where devices have no index."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """How many of them this process sees."""

    @abc.abstractmethod
    def synchronize(self, device: Device = None) -> None:
        """Wait for everything queued on the device."""

    @abc.abstractmethod
    def current_stream(self, device: Device = None) -> Any:
        """The stream that new work goes to."""

    @abc.abstractmethod
    def default_stream(self, device: Device = None) -> Any:
        """The stream that work goes to when nobody chose one."""

    @abc.abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which new work goes to `stream`."""

    @property
    @abc.abstractmethod
    def Stream(self) -> Any:
        """Class of its streams."""

    @property
    @abc.abstractmethod
    def Event(self) -> Any:
        """Class of its events."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused memory back."""

    @abc.abstractmethod
    def ipc_collect(self) -> None:
        """Release memory that other processes have let go of."""

    @abc.abstractmethod
    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        """(free, total) memory of the device."""

    @abc.abstractmethod
    def memory_allocated(self, device: Device = None) -> int:
        """Memory that tensors of this process use."""

    @abc.abstractmethod
    def memory_reserved(self, device: Device = None) -> int:
        """Memory that this process holds, cached blocks included."""

    @abc.abstractmethod
    def get_device_properties(self, device: Device = None) -> Any:
        """Name, total memory and so on, with the attributes `name` and `total_memory`."""

    @abc.abstractmethod
    def autocast(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """`torch.autocast` of this device; arguments as there, without the device."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> None:
        """Seed every device."""

    @abc.abstractmethod
    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """State of the random generator."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        """Restore what `get_rng_state` returned."""

    @abc.abstractmethod
    def initial_seed(self) -> int:
        """The seed that was set."""

    def memory_module(self) -> Any:
        """The module with memory snapshots; None where there is none."""
        return getattr(self.accelerator_module(), "memory", None)

    def set_allocator_expandable_segments(self) -> bool:
        """Let the allocator grow its segments. False where there is no such allocator."""
        return False

    def attach_oom_observer(self, callback: Callable[..., None]) -> bool:
        """Call `callback(device, allocated, device_total, device_free)` when memory runs out. False: never called."""
        return False

    def supports(self, capability: str) -> bool:
        """Whether it has a capability: `ipc`, `memory_snapshot`, `oom_observer`, `pinned_memory` or `streams`."""
        return False

    def distributed_device_id(self, index: Device = None) -> torch.device | None:
        """What `init_process_group(device_id=)` is to get; None where a group is not bound to a device."""
        return None

    def post_import_torch(self) -> None:
        """What must happen once after torch was imported."""
        return

    def communication_backend(self, default: str = "nccl") -> str:
        """Back end for collectives: `default`, unless that belongs to another kind of device; then its own."""
        foreign = any(vendor in default for vendor in VENDOR_BACKENDS if vendor != self.communication_backend_name)
        return self.communication_backend_name if foreign else default

    def weight_update_backend(self, default: str = "nccl") -> str:
        """Back end of the group that sends weights to the engines."""
        return self.communication_backend(default)

    @property
    def visible_devices_env(self) -> str:
        """Environment variable that lists the devices a process may see."""
        return "CUDA_VISIBLE_DEVICES"

    def resolve_visible_device_id(self, physical_device_id: int | float | str) -> int:
        """Index, within this process, of a device of the machine.

        Raises ValueError when the variable hides that device.
        """
        wanted = str(physical_device_id)
        if isinstance(physical_device_id, float) or wanted.replace(".", "", 1).isdigit():
            wanted = str(int(float(wanted)))
        listed = os.environ.get(self.visible_devices_env)
        if listed is None:
            return int(wanted)
        visible = [entry.strip() for entry in listed.split(",")]
        if wanted not in visible:
            raise ValueError(f"device {physical_device_id} is hidden by {self.visible_devices_env}={listed}")
        return visible.index(wanted)
