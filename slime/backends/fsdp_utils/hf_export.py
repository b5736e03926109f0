"""Write the sharded policy as a Hugging Face directory, and replace directories atomically.

Used for `--save-hf`, for weight sync through a disk and by nobody else. Values keep their dtype (float32 master weights stay
float32). Files that are not weights (tokenizer, chat template, generation config) are copied from the model it came from, so the
exported directory tokenises exactly like the original.

Invariant: the target directory either does not exist, or is complete: it is written beside itself and renamed.
Left out: quantised formats.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.model import PolicyModel, iter_full_tensors

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def gather_full_state(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Whole state dict in host memory on rank 0, empty elsewhere. Collective."""
    main = dist.get_rank() == 0
    state = {}
    for name, value in iter_full_tensors(model):
        if main:
            state[name] = value.detach().to("cpu", copy=True)
    return state


def _is_companion(path: Path) -> bool:
    weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
    return path.is_file() and not weights and path.name != "config.json"


def copy_companion_files(source: Path, target: Path) -> None:
    """Copy tokenizer and other non-weight files."""
    for path in sorted(source.iterdir()):
        if _is_companion(path):
            shutil.copyfile(path, target / path.name)


def replace_directory(finished: Path, target: Path) -> None:
    """Move a finished directory to its final name; an older one there is removed only after the move."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(finished, target)
    shutil.rmtree(old, ignore_errors=True)


def save_hf(model: PolicyModel, target: Path, companions: Path) -> None:
    """Export to `target` (safetensors, config, files of `companions`). Collective; returns when the directory is complete."""
    state = gather_full_state(model)
    if dist.get_rank() == 0:
        partial = target.with_name(target.name + ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.hf.save_pretrained(partial, state_dict=state)
        copy_companion_files(companions, partial)
        replace_directory(partial, target)
    dist.barrier()
