"""Training checkpoints: torch's distributed format, resumable on another number of ranks.

Layout: `{save}/iter_{rollout_id + 1:07d}/{model,optimizer,lr_scheduler}/` (three DCP directories), `rng.pt`, `meta.json`, and
`{save}/latest_checkpointed_iteration.txt` with the number. In `model/` the keys are `model_state.model.<Hugging Face name>`.

Invariants: an iteration directory is complete or does not carry its final name (it is written as `*.tmp` and renamed); the tracker is
replaced last. A process killed at any moment leaves the previous checkpoint valid and in use. All ranks see one file system.

Left out: dataset position (the data source saves it beside), asynchronous writing.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from slime.backends.fsdp_utils.hf_export import replace_directory
from slime.backends.fsdp_utils.model import PolicyModel, reshard, sharded_state

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Progress:
    """Where a run stands; the content of `meta.json`. `micro_step` counts forward-backward passes of one rank."""

    iteration: int
    rollout_id: int
    next_rollout_id: int
    global_step: int
    micro_step: int
    world_size: int
    timestamp: float

    @classmethod
    def after(cls, rollout_id: int, global_step: int, micro_step: int) -> Progress:
        """State after training on `rollout_id`."""
        following = rollout_id + 1
        return cls(following, rollout_id, following, global_step, micro_step, dist.get_world_size(), time.time())


@dataclass
class TrainState:
    """What a checkpoint holds. `optimizer` None: weights only. `reference` is stored only when it changes during a run."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer | None
    reference: PolicyModel | None = None


def iteration_dir(root: Path, iteration: int) -> Path:
    """Directory of one saved iteration."""
    return root / f"iter_{iteration:07d}"


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a small file in one step: readers see the old or the new content."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# ---- random number generators ----


def _rng_state() -> dict[str, Any]:
    version, keys, position, has_gauss, gauss = np.random.get_state()  # type: ignore[misc]
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            version,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    version, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((version, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


# ---- saving ----


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


def save(root: Path, state: TrainState, progress: Progress) -> Path:
    """Write one iteration and point the tracker at it. Collective. Returns the directory."""
    target = iteration_dir(root, progress.iteration)
    partial = target.with_name(target.name + ".tmp")
    main = dist.get_rank() == 0
    if main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _write_parts(partial, state, progress)
    dist.barrier()
    if main:
        torch.save(_rng_state(), partial / "rng.pt")
        write_text_atomically(partial / "meta.json", json.dumps(asdict(progress), indent=2) + "\n")
        replace_directory(partial, target)
        write_text_atomically(root / TRACKER, f"{progress.iteration}\n")
    dist.barrier()
    return target


# ---- finding and loading ----


def _is_complete(folder: Path) -> bool:
    return (folder / "meta.json").is_file() and (folder / "model" / ".metadata").is_file()


def _from_tracker(root: Path) -> Path | None:
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    return iteration_dir(root, int(text)) if text.isdigit() else None


def find_checkpoint(load: str | None, step: int | None = None) -> Path | None:
    """The complete iteration directory to resume from, or None (then a run starts from Hugging Face weights).

    `load` is a checkpoint root or one `iter_*` directory. Without `step` the tracker decides; when its iteration is not complete,
    the newest complete one below it is used, with a warning. Raises `FileNotFoundError` when an explicit `step` is missing.
    """
    if not load:
        return None
    root = Path(load)
    if re.fullmatch(r"iter_\d+", root.name) and _is_complete(root):
        return root
    if step is not None:
        chosen = iteration_dir(root, step)
        if not _is_complete(chosen):
            raise FileNotFoundError(
                f"--ckpt-step {step}: {chosen} is not a complete checkpoint; drop the flag to use the latest"
            )
        return chosen
    tracked = _from_tracker(root)
    if tracked is None:
        return None
    return tracked if _is_complete(tracked) else _newest_complete(root, tracked)


def _newest_complete(root: Path, tracked: Path) -> Path | None:
    found = sorted(p for p in root.glob("iter_*") if re.fullmatch(r"iter_\d+", p.name) and _is_complete(p))
    # What is above the tracked one was left by an earlier run in the same directory.
    found = [p for p in found if p.name < tracked.name]
    chosen = found[-1] if found else None
    logger.warning("%s is not a complete checkpoint; using %s", tracked, chosen or "Hugging Face weights")
    return chosen


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
    """Load one iteration into model, optimizer and random number generators, on any number of ranks. Collective."""
    _load_model(state.model, folder / "model")
    if state.reference is not None and (folder / "ref" / ".metadata").is_file():
        _load_model(state.reference, folder / "ref")
    if state.optimizer is not None:
        _load_optimizer(state, state.optimizer, folder / "optimizer")
    if (folder / "rng.pt").is_file():
        _set_rng_state(torch.load(folder / "rng.pt", weights_only=True))
    progress = Progress(**json.loads((folder / "meta.json").read_text()))
    logger.info(
        "resumed from %s: next rollout %d, optimiser step %d", folder, progress.next_rollout_id, progress.global_step
    )
    return progress
