"""NVIDIA and ROCm GPUs, both of which torch calls `cuda`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime.utils.accelerator.base import Device
from slime.utils.accelerator.torch_accelerator import TorchAccelerator


class CUDAAccelerator(TorchAccelerator):
    """`torch.cuda` with NCCL."""

    name = "cuda"
    device_type = "cuda"
    communication_backend_name = "nccl"

    def is_available(self) -> bool:
        """See the base class."""
        return torch.cuda.is_available()

    def distributed_device_id(self, index: Device = None) -> torch.device | None:
        """See the base class: NCCL binds a group to its device at once instead of at the first collective."""
        return self.device(index)

    def attach_oom_observer(self, callback: Callable[..., None]) -> bool:
        """See the base class."""
        torch._C._cuda_attach_out_of_memory_observer(callback)  # type: ignore[attr-defined]
        return True

    def supports(self, capability: str) -> bool:
        """See the base class."""
        return capability in ("ipc", "memory_snapshot", "oom_observer", "pinned_memory", "streams")
