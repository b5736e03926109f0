"""Write the sharded policy as a Hugging Face directory.

Used for `--save-hf`, for weight sync through a disk and by nobody else. Values keep their dtype (float32 master weights stay
float32). The directory appears complete or not at all (`common.hf_files`). Left out: quantised formats.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from slime.backends.common.hf_files import copy_companion_files, replace_directory
from slime.backends.fsdp_utils.model import PolicyModel, iter_full_tensors


def gather_full_state(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Whole weights under the names of a published checkpoint, in host memory on rank 0; empty elsewhere. Collective."""
    main = dist.get_rank() == 0
    state = {}
    for name, value in iter_full_tensors(model):
        if main:
            state[name] = value.detach().to("cpu", copy=True)
    return state


def save_hf(model: PolicyModel, target: Path, companions: Path) -> None:
    """Export to `target` (safetensors, config, files of `companions`). Collective; returns when the directory is complete."""
    state = gather_full_state(model)
    if dist.get_rank() == 0:
        partial = target.with_name(target.name + ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # The names are already those of a published checkpoint.
        model.hf.save_pretrained(partial, state_dict=state, save_original_format=False)
        copy_companion_files(companions, partial)
        replace_directory(partial, target)
    dist.barrier()
