"""A device that torch drives through one module: `torch.cuda`, `torch.musa`, `torch.xpu` and the like.

Invariant: everything goes to that module; nothing here knows which one it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from slime.utils.accelerator.base import Accelerator, Device


class TorchAccelerator(Accelerator):
    """The methods of `Accelerator`, each by the function of the same name in `torch.<device_type>`."""

    def accelerator_module(self) -> Any:
        """See the base class. Raises RuntimeError when this build of torch has no such module."""
        module = getattr(torch, self.device_type, None)
        if module is None:
            raise RuntimeError(f"this torch has no torch.{self.device_type}: install the build for that device")
        return module

    def is_available(self) -> bool:
        """See the base class."""
        module = getattr(torch, self.device_type, None)
        return module is not None and bool(module.is_available())

    def device(self, index: Device = None) -> torch.device:
        """See the base class."""
        if isinstance(index, torch.device):
            return index
        if isinstance(index, str) and not index.isdigit():
            return torch.device(index)
        return torch.device(self.device_type, self.current_device() if index is None else int(index))

    def device_name(self, index: Device = None) -> str:
        """See the base class."""
        return str(self.device(index))

    def set_device(self, index: int | str | torch.device) -> None:
        """See the base class."""
        self.accelerator_module().set_device(self.device(index))

    def current_device(self) -> int:
        """See the base class."""
        return int(self.accelerator_module().current_device())

    def device_count(self) -> int:
        """See the base class."""
        return int(self.accelerator_module().device_count())

    def synchronize(self, device: Device = None) -> None:
        """See the base class."""
        self.accelerator_module().synchronize(device)

    def current_stream(self, device: Device = None) -> Any:
        """See the base class."""
        return self.accelerator_module().current_stream(device)

    def default_stream(self, device: Device = None) -> Any:
        """See the base class."""
        return self.accelerator_module().default_stream(device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """See the base class."""
        return self.accelerator_module().stream(stream)

    @property
    def Stream(self) -> Any:
        """See the base class."""
        return self.accelerator_module().Stream

    @property
    def Event(self) -> Any:
        """See the base class."""
        return self.accelerator_module().Event

    def empty_cache(self) -> None:
        """See the base class."""
        self.accelerator_module().empty_cache()

    def ipc_collect(self) -> None:
        """See the base class; nothing is shared where the module has no such function."""
        collect = getattr(self.accelerator_module(), "ipc_collect", None)
        if collect is not None:
            collect()

    def set_allocator_expandable_segments(self) -> bool:
        """See the base class."""
        configure = getattr(self.memory_module(), "_set_allocator_settings", None)
        if configure is None:
            return False
        configure("expandable_segments:True")
        return True

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        """See the base class."""
        free, total = self.accelerator_module().mem_get_info(device)
        return int(free), int(total)

    def memory_allocated(self, device: Device = None) -> int:
        """See the base class."""
        return int(self.accelerator_module().memory_allocated(device))

    def memory_reserved(self, device: Device = None) -> int:
        """See the base class."""
        return int(self.accelerator_module().memory_reserved(device))

    def get_device_properties(self, device: Device = None) -> Any:
        """See the base class."""
        return self.accelerator_module().get_device_properties(self.device(device))

    def autocast(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """See the base class."""
        return torch.autocast(self.device_type, *args, **kwargs)

    def manual_seed(self, seed: int) -> None:
        """See the base class."""
        self.accelerator_module().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """See the base class."""
        self.accelerator_module().manual_seed_all(seed)

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """See the base class."""
        return self.accelerator_module().get_rng_state(self.device(device))

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        """See the base class."""
        self.accelerator_module().set_rng_state(state, self.device(device))

    def initial_seed(self) -> int:
        """See the base class."""
        return int(self.accelerator_module().initial_seed())

    def supports(self, capability: str) -> bool:
        """See the base class."""
        return capability in ("pinned_memory", "streams")
