"""The device of this process behind one set of functions, so that training code names no vendor.

The accelerator is chosen at the first call: the available one of the highest priority (GPU kinds before the CPU, which is always
there). A program may set its own (`set_accelerator`) or register another kind (`register_accelerator`).
Left out: a device for some tensors and another for others; a process has one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from slime.utils.accelerator.base import Accelerator, Device
from slime.utils.accelerator.cpu import CPUAccelerator
from slime.utils.accelerator.cuda import CUDAAccelerator
from slime.utils.accelerator.musa import MUSAAccelerator, is_musa_available, is_musa_environment

__all__ = ["Accelerator", "is_musa_available", "is_musa_environment"]


@dataclass(frozen=True)
class _Kind:
    factory: Callable[[], Accelerator]
    is_available: Callable[[], bool]
    priority: int
    communication_backends: tuple[str, ...]


_kinds: dict[str, _Kind] = {}
_current: Accelerator | None = None


def register_accelerator(
    name: str,
    factory: Callable[[], Accelerator],
    is_available: Callable[[], bool] | None = None,
    priority: int = 0,
    communication_backends: tuple[str, ...] = (),
) -> None:
    """Make a kind of device known; a name that exists is replaced.

    Args:
        is_available: quick test for it; the default asks an instance.
        priority: the highest available one is chosen.
        communication_backends: back ends of torch.distributed that only work on it.
    """
    _kinds[name] = _Kind(factory, is_available or (lambda: factory().is_available()), priority, communication_backends)


def get_accelerator() -> Accelerator:
    """The accelerator of this process, chosen now if it was not before. Raises RuntimeError when none is available."""
    chosen = _current or initialize_accelerator()
    if chosen is None:
        raise RuntimeError(f"none of the accelerators is available: {', '.join(sorted(_kinds))}")
    return chosen


def initialize_accelerator() -> Accelerator | None:
    """Choose the accelerator and prepare torch for it. Returns the chosen one, None when no kind is available."""
    global _current
    if _current is None:
        for kind in sorted(_kinds.values(), key=lambda kind: -kind.priority):
            if kind.is_available():
                set_accelerator(kind.factory())
                break
    return _current


def set_accelerator(accelerator: Accelerator) -> None:
    """Use this one from now on."""
    global _current
    accelerator.post_import_torch()
    _current = accelerator


def reset_accelerator() -> None:
    """Forget the choice; the next call chooses again."""
    global _current
    _current = None


def is_accelerator_backend(backend: str) -> bool:
    """Whether a back end of torch.distributed (`nccl`, or `cpu:gloo,cuda:nccl`) moves tensors between accelerators."""
    own = {name for kind in _kinds.values() for name in kind.communication_backends}
    return any(part.rpartition(":")[2] in own for part in backend.lower().split(","))


def device_type() -> str:
    """`type` of its `torch.device`."""
    return get_accelerator().device_type


def accelerator_module() -> Any:
    """The module of torch that drives it."""
    return get_accelerator().accelerator_module()


def device(index: Device = None) -> torch.device:
    """The device of that index; None: the current one."""
    return get_accelerator().device(index)


def device_name(index: Device = None) -> str:
    """The device as text."""
    return get_accelerator().device_name(index)


def set_device(index: int | str | torch.device) -> None:
    """Make it the current device of this process."""
    get_accelerator().set_device(index)


def current_device() -> int | str:
    """Index of the current device, `cpu` on a CPU."""
    return get_accelerator().current_device()


def device_count() -> int:
    """How many devices this process sees."""
    return get_accelerator().device_count()


def synchronize(device_arg: Device = None) -> None:
    """Wait for everything queued on the device."""
    get_accelerator().synchronize(device_arg)


def current_stream(device_arg: Device = None) -> Any:
    """The stream that new work goes to."""
    return get_accelerator().current_stream(device_arg)


def default_stream(device_arg: Device = None) -> Any:
    """The stream that work goes to when nobody chose one."""
    return get_accelerator().default_stream(device_arg)


def stream(stream_arg: Any) -> AbstractContextManager[Any]:
    """Context in which new work goes to the stream."""
    return get_accelerator().stream(stream_arg)


def new_stream(*args: Any, **kwargs: Any) -> Any:
    """A new stream; arguments as for the stream class of torch."""
    return get_accelerator().Stream(*args, **kwargs)


def new_event(*args: Any, **kwargs: Any) -> Any:
    """A new event; arguments as for the event class of torch."""
    return get_accelerator().Event(*args, **kwargs)


def empty_cache() -> None:
    """Give cached, unused memory back."""
    get_accelerator().empty_cache()


def ipc_collect() -> None:
    """Release memory that other processes have let go of."""
    get_accelerator().ipc_collect()


def set_allocator_expandable_segments() -> bool:
    """Let the allocator grow its segments; False where it cannot."""
    return get_accelerator().set_allocator_expandable_segments()


def mem_get_info(device_arg: Device = None) -> tuple[int, int]:
    """(free, total) bytes of the device."""
    return get_accelerator().mem_get_info(device_arg)


def memory_allocated(device_arg: Device = None) -> int:
    """Bytes that tensors of this process use."""
    return get_accelerator().memory_allocated(device_arg)


def memory_reserved(device_arg: Device = None) -> int:
    """Bytes that this process holds, cached blocks included."""
    return get_accelerator().memory_reserved(device_arg)


def get_device_properties(device_arg: Device = None) -> Any:
    """Name, total memory and so on."""
    return get_accelerator().get_device_properties(device_arg)


def memory_module() -> Any:
    """The module with memory snapshots, None where there is none."""
    return get_accelerator().memory_module()


def attach_oom_observer(callback: Callable[..., None]) -> bool:
    """Call back when memory runs out; False where that cannot be noticed."""
    return get_accelerator().attach_oom_observer(callback)


def supports(capability: str) -> bool:
    """Whether the device has a capability; the names are those of `Accelerator.supports`."""
    return get_accelerator().supports(capability)


def autocast(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """`torch.autocast` of this device."""
    return get_accelerator().autocast(*args, **kwargs)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    get_accelerator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device."""
    get_accelerator().manual_seed_all(seed)


def get_rng_state(device_arg: Device = None) -> torch.Tensor:
    """State of the device's random generator."""
    return get_accelerator().get_rng_state(device_arg)


def set_rng_state(state: torch.Tensor, device_arg: Device = None) -> None:
    """Restore what `get_rng_state` returned."""
    get_accelerator().set_rng_state(state, device_arg)


def initial_seed() -> int:
    """The seed that was set."""
    return get_accelerator().initial_seed()


def distributed_device_id(index: Device = None) -> torch.device | None:
    """What `init_process_group(device_id=)` is to get."""
    return get_accelerator().distributed_device_id(index)


def post_import_torch() -> None:
    """What must happen once after torch was imported."""
    get_accelerator().post_import_torch()


def process_group_backend(default: str = "nccl") -> str:
    """Back end for collectives: `default` if the device can use it, else its own."""
    return get_accelerator().communication_backend(default)


def weight_update_backend(default: str = "nccl") -> str:
    """Back end of the group that sends weights to the engines."""
    return get_accelerator().weight_update_backend(default)


def visible_devices_env_key() -> str:
    """Environment variable that lists the devices a process may see."""
    return get_accelerator().visible_devices_env


def resolve_visible_device_id(physical_device_id: int | float | str) -> int:
    """Index, within this process, of a device of the machine. Raises ValueError when it is hidden."""
    return get_accelerator().resolve_visible_device_id(physical_device_id)


register_accelerator("cuda", CUDAAccelerator, priority=100, communication_backends=("nccl",))
register_accelerator("musa", MUSAAccelerator, is_musa_available, priority=200, communication_backends=("mccl",))
register_accelerator("cpu", CPUAccelerator, priority=-100)
