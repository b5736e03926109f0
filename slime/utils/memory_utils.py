"""Device memory of this process: returning what is cached, and what is in use.

Without a GPU the numbers are those of the machine's memory. Left out: moving tensors (the back end's).
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch

from slime.utils import accelerator

logger = logging.getLogger(__name__)

_GIB = 1024**3


def clear_memory(clear_host_memory: bool = False) -> None:
    """Collect garbage and return cached device memory; with `clear_host_memory` pinned host memory too."""
    gc.collect()
    accelerator.synchronize()
    accelerator.empty_cache()
    if clear_host_memory and accelerator.supports("pinned_memory"):
        torch._C._host_emptyCache()


def available_memory() -> dict[str, Any]:
    """`{"gpu": device or "cpu", "total_GB", "free_GB", "used_GB", "allocated_GB", "reserved_GB"}`, in GiB."""
    free, total = accelerator.mem_get_info()
    sizes = {"total": total, "free": free, "used": total - free}
    sizes |= {"allocated": accelerator.memory_allocated(), "reserved": accelerator.memory_reserved()}
    device = str(accelerator.current_device())
    return {"gpu": device, **{f"{name}_GB": round(size / _GIB, 2) for name, size in sizes.items()}}


def print_memory(msg: str, clear_before_print: bool = False) -> dict[str, Any]:
    """Log the numbers of `available_memory` with a text, and return them."""
    if clear_before_print:
        clear_memory()
    memory = available_memory()
    logger.info("memory %s: %s", msg, memory)
    return memory
