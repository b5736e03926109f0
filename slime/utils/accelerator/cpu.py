"""The CPU as a device: one of it, no queue to wait for, memory of the machine and of this process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from slime.utils.accelerator.base import Device
from slime.utils.accelerator.torch_accelerator import TorchAccelerator


class CPUEvent:
    """A point in time. Work is done when a call returns, so it never has to be waited for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the present."""
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        """Whether everything before it is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return once everything before it is done: at once."""

    def synchronize(self) -> None:
        """The same."""

    def elapsed_time(self, end_event: CPUEvent) -> float:
        """Milliseconds from this event to the other one. Raises RuntimeError when one was not recorded."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise RuntimeError("both events must be recorded before the time between them is asked for")
        return (end_event._recorded_s - self._recorded_s) * 1000.0


class CPUAccelerator(TorchAccelerator):
    """`torch.cpu` with gloo."""

    name = "cpu"
    device_type = "cpu"
    communication_backend_name = "gloo"

    def is_available(self) -> bool:
        """See the base class."""
        return True

    def device(self, index: Device = None) -> torch.device:
        """See the base class: there is one, whatever the index."""
        return torch.device("cpu")

    def current_device(self) -> str:  # type: ignore[override]
        """See the base class."""
        return "cpu"

    def default_stream(self, device: Device = None) -> Any:
        """See the base class: work is done when a call returns, so there is one stream."""
        return torch.cpu.current_stream()

    @property
    def Event(self) -> Any:
        """See the base class."""
        return CPUEvent

    def empty_cache(self) -> None:
        """See the base class: the allocator of the CPU keeps nothing that could be given back."""

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        """See the base class."""
        machine = psutil.virtual_memory()
        return machine.available, machine.total

    def memory_allocated(self, device: Device = None) -> int:
        """See the base class."""
        return int(psutil.Process().memory_info().rss)

    def memory_reserved(self, device: Device = None) -> int:
        """See the base class."""
        return self.memory_allocated()

    def get_device_properties(self, device: Device = None) -> Any:
        """See the base class."""
        return SimpleNamespace(name="cpu", total_memory=psutil.virtual_memory().total)

    def manual_seed(self, seed: int) -> None:
        """See the base class."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """See the base class."""
        torch.manual_seed(seed)

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """See the base class."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        """See the base class."""
        torch.set_rng_state(state)

    def initial_seed(self) -> int:
        """See the base class."""
        return torch.initial_seed()

    def supports(self, capability: str) -> bool:
        """See the base class: none of them."""
        return False
