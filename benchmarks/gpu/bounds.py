"""Figures with the bounds they must keep, and the machine that they are judged on.

Invariants: a figure whose bound makes sense on a GPU only is reported but not judged elsewhere; a target is reported as met
or missed and fails nothing; a GPU of unknown peak has no MFU, never a guessed one.
"""

from __future__ import annotations

import math
import platform
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

# Dense bf16, tensor cores, FLOP/s, from the vendor's data sheets; the first name that the device's name contains counts.
PEAK_BF16 = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}


@dataclass(frozen=True)
class Bound:
    """A figure, the least or most it may be, an aim, and where these come from. `source` is shown to the reader."""

    name: str
    value: float | None
    source: str
    at_least: float | None = None
    at_most: float | None = None
    target: str = ""
    gpu_only: bool = True

    def verdict(self, on_gpu: bool) -> bool | None:
        """None where it is not judged: no limit, no peak known, or a bound of GPUs on a CPU."""
        if self.value is None or (self.gpu_only and not on_gpu) or self.at_least is self.at_most is None:
            return None
        low, high = self.at_least, self.at_most
        inside = (low is None or self.value >= low) and (high is None or self.value <= high)
        return inside and math.isfinite(self.value)

    def as_json(self, on_gpu: bool) -> dict[str, Any]:
        shown = {key: value for key, value in vars(self).items() if value not in (None, "") and key != "gpu_only"}
        return {"value": None, **shown, "ok": self.verdict(on_gpu)}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    return {
        "gpus": [gpu.name for gpu in gpus],
        "gpu_bytes": [gpu.total_memory for gpu in gpus],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_flops() -> float | None:
    """Of one GPU, dense bf16; None on a CPU and for a GPU that is not in the table."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)


def copy_rate(gigabytes: float = 1.0, times: int = 10) -> float | None:
    """Bytes per second of a copy inside one GPU, best of `times`; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, source.numel() / (start.elapsed_time(end) / 1e3))
    return best


def used_gpu_bytes() -> list[int]:
    """Memory in use on each GPU now, by all processes; empty without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) * 2**20 for line in answer.stdout.split()]
