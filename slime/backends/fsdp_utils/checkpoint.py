"""Training checkpoints of the FSDP back end: torch's distributed format, resumable on another number of ranks.

Layout of an iteration (`common.checkpoint_files`, numbered `rollout_id + 1`): `{model,optimizer,lr_scheduler}/`, three DCP directories.
In `model/` the keys are `model_state.model.<Hugging Face name>`; with `--lora-rank` the adapters alone, which lie once more in `adapter/`,
a folder that peft loads. Left out: asynchronous writing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from slime.backends.common.checkpoint_files import Progress, restore, write_iteration
from slime.backends.fsdp_utils.distributed import whole_tensor
from slime.backends.fsdp_utils.model import PolicyModel, reshard, sharded_state

logger = logging.getLogger(__name__)

ADAPTER = "adapter"


@dataclass
class TrainState:
    """What a checkpoint holds. `optimizer` None: weights only. `reference` is stored only when it changes during a run."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer | None
    reference: PolicyModel | None = None


def _write_parts(folder: Path, state: TrainState, progress: Progress) -> None:
    dcp.save({"model_state": {"model": sharded_state(state.model)}}, checkpoint_id=folder / "model")
    if state.optimizer is not None:
        reshard(state.model)
        optimizer = get_optimizer_state_dict(state.model, state.optimizer)
        dcp.save({"optim_state": {"optim": optimizer}}, checkpoint_id=folder / "optimizer")
        scheduler = {"last_step": torch.tensor(progress.global_step)}
        dcp.save({"scheduler_state": scheduler}, checkpoint_id=folder / "lr_scheduler")
    if state.reference is not None:
        dcp.save({"model_state": {"model": sharded_state(state.reference)}}, checkpoint_id=folder / "ref")
    if state.model.adapter is not None:
        whole = {name: whole_tensor(value).cpu() for name, value in sharded_state(state.model).items()}
        if dist.get_rank() == 0:
            state.model.adapter.save(folder / ADAPTER, whole)


def save(root: Path, state: TrainState, progress: Progress) -> Path:
    """Write one iteration and point the tracker at it. Collective. Returns the directory."""
    return write_iteration(root, progress, lambda folder: _write_parts(folder, state, progress))


def _load_model(model: PolicyModel, folder: Path) -> None:
    # the tensors are loaded in place, into the shards
    dcp.load({"model_state": {"model": sharded_state(model)}}, checkpoint_id=folder)


def _load_optimizer(state: TrainState, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    if not (folder / ".metadata").is_file():
        logger.warning(
            "%s has no optimizer state (saved with --no-save-optim?); the optimizer starts fresh", folder.parent
        )
        return
    reshard(state.model)
    flags = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    values = {"optim_state": {"optim": get_optimizer_state_dict(state.model, optimizer)}}
    dcp.load(values, checkpoint_id=folder)
    set_optimizer_state_dict(state.model, optimizer, values["optim_state"]["optim"])
    # Weight decay and betas were stored too; what the command line says now must win, as it does for the learning rate.
    for group, given in zip(optimizer.param_groups, flags, strict=True):
        group.update(given)


def load(folder: Path, state: TrainState) -> Progress:
    """Load one iteration into model, optimizer and random number generators, on any number of ranks. Collective.

    Raises `ValueError` when the checkpoint holds adapters and the model has none, or the other way round.
    """
    if (folder / ADAPTER).is_dir() != (state.model.adapter is not None):
        how = "without" if state.model.adapter else "with"
        raise ValueError(f"--load {folder}: saved {how} --lora-rank; resume it the same way")
    _load_model(state.model, folder / "model")
    if state.reference is not None and (folder / "ref" / ".metadata").is_file():
        _load_model(state.reference, folder / "ref")
    if state.optimizer is not None:
        _load_optimizer(state, state.optimizer, folder / "optimizer")
    return restore(folder)
