"""Moore Threads GPUs: `torch.musa`, which the package torch_musa adds to torch when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from slime.utils.accelerator.torch_accelerator import TorchAccelerator


def is_musa_environment() -> bool:
    """Whether torch_musa is installed; nothing is imported."""
    return importlib.util.find_spec("torch_musa") is not None


def musa_module() -> Any:
    """`torch.musa`. Raises RuntimeError when torch_musa is not installed."""
    if not is_musa_environment():
        raise RuntimeError("torch.musa comes with the package torch_musa, which is not installed")
    importlib.import_module("torch_musa")
    return torch.musa  # type: ignore[attr-defined]


def is_musa_available() -> bool:
    """Whether this process can use such a GPU."""
    return is_musa_environment() and bool(musa_module().is_available())


class MUSAAccelerator(TorchAccelerator):
    """`torch.musa` with MCCL."""

    name = "musa"
    device_type = "musa"
    communication_backend_name = "mccl"

    def accelerator_module(self) -> Any:
        """See the base class."""
        return musa_module()

    def is_available(self) -> bool:
        """See the base class."""
        return is_musa_available()

    @property
    def visible_devices_env(self) -> str:
        """See the base class."""
        return "MUSA_VISIBLE_DEVICES"

    def post_import_torch(self) -> None:
        """See the base class: importing torch_musa is what makes `torch.musa`."""
        musa_module()
