"""Checkpoint directories as every back end lays them out, so that a run can be killed at any moment.

`{save}/iter_{number:07d}/` holds what the back end writes, `rng.pt` and `meta.json`; `{save}/latest_checkpointed_iteration.txt`
holds the number of the newest one.

Invariants: an iteration directory is complete or does not carry its final name (it is written as `*.tmp` and renamed); the tracker is
replaced last. A process killed at any moment leaves the previous checkpoint valid and in use. All ranks see one file system.

Left out: the tensors (the back end's), and the dataset position (the data source saves it beside).
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.backends.common.hf_files import replace_directory
from slime.utils import accelerator

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


def rng_state() -> dict[str, Any]:
    """State of the generators of torch, Python and numpy in this process."""
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
    kind = accelerator.device_type()
    if kind != "cpu":
        state[kind] = accelerator.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    version, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((version, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    kind = accelerator.device_type()
    if kind != "cpu" and kind in state:
        accelerator.set_rng_state(state[kind])


# ---- saving ----


def write_iteration(root: Path, progress: Progress, write_parts: Callable[[Path], None]) -> Path:
    """Let the back end write its part, then finish the iteration and point the tracker at it. Collective. Returns the directory."""
    target = iteration_dir(root, progress.iteration)
    partial = target.with_name(target.name + ".tmp")
    main = dist.get_rank() == 0
    if main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    write_parts(partial)
    dist.barrier()
    if main:
        torch.save(rng_state(), partial / "rng.pt")
        write_text_atomically(partial / "meta.json", json.dumps(asdict(progress), indent=2) + "\n")
        replace_directory(partial, target)
        write_text_atomically(root / TRACKER, f"{progress.iteration}\n")
    dist.barrier()
    return target


# ---- finding and loading ----


def _is_complete(folder: Path) -> bool:
    return (folder / "meta.json").is_file()


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


def restore(folder: Path) -> Progress:
    """Set the random number generators of this process and return where the run stood."""
    if (folder / "rng.pt").is_file():
        set_rng_state(torch.load(folder / "rng.pt", weights_only=True))
    progress = Progress(**json.loads((folder / "meta.json").read_text()))
    logger.info(
        "resumed from %s: next rollout %d, optimiser step %d", folder, progress.next_rollout_id, progress.global_step
    )
    return progress
