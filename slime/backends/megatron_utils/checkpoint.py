"""Training checkpoints of the Megatron back end: megatron-core's `torch_dist` format, loadable under another parallel layout.

An iteration directory (`common.checkpoint_files`, numbered by rollout) holds weights and optimizer in one distributed checkpoint:
`common.pt` with `args`, `.metadata`, `*.distcp`; a reference that changes during a run lies in `ref/`. A directory without `meta.json`
(one that `tools/convert_hf_to_torch_dist.py` wrote) gives weights only, and the run starts at its first rollout.

Left out: asynchronous saving; a change of the number of expert-parallel ranks together with optimizer states.
"""

from __future__ import annotations

import logging
import queue
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from slime.backends.common.checkpoint_files import TRACKER, Progress, find_checkpoint, restore, write_iteration
from slime.backends.megatron_utils.model import inner_optimizers
from slime.backends.megatron_utils.model_params import unwrap

logger = logging.getLogger(__name__)

# Optimizer states as one tensor per parameter, which any layout of ranks can cut anew.
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_RELEASE = "release"


@dataclass
class TrainState:
    """What a checkpoint holds. `optimizer` None: weights only. `reference` is stored only when it changes during a run."""

    model: Any
    optimizer: Any
    reference: Any = None


def is_torch_dist(folder: Path) -> bool:
    """Whether a directory is one complete distributed checkpoint."""
    return (folder / "metadata.json").is_file() and (folder / "common.pt").is_file()


def weights_dir(path: str | Path) -> Path | None:
    """The distributed checkpoint in `path`: itself, or what its tracker file names (a number or `release`). None without one."""
    folder = Path(path)
    if is_torch_dist(folder):
        return folder
    tracker = folder / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    found = folder / (_RELEASE if text == _RELEASE else f"iter_{int(text):07d}") if text else None
    return found if found is not None and is_torch_dist(found) else None


def find(args: Namespace) -> Path | None:
    """The directory to start from: an iteration to resume, or weights alone. None: start from Hugging Face weights."""
    found = find_checkpoint(args.load, args.ckpt_step)
    return found or (weights_dir(args.load) if args.load else None)


def _weights(chunk: Any) -> dict[str, Any]:
    return unwrap(chunk).sharded_state_dict()


def _optimizer(state: TrainState, loading: bool) -> dict[str, Any]:
    return state.optimizer.sharded_state_dict(_weights(state.model), is_loading=loading, metadata=_CONTENT)


def _save(content: dict[str, Any], folder: Path) -> None:
    # Results of the writing processes go through this queue. Saving is synchronous here, so a plain one does; megatron-core's
    # own lives in a process that it starts for the purpose, which a training rank would leave behind.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(content, str(folder), content_metadata=_CONTENT)


def save(args: Namespace, state: TrainState, rollout_id: int, global_step: int, micro_step: int) -> Path:
    """Write the iteration of `rollout_id` and point the tracker at it. Collective. Returns the directory."""
    progress = replace(Progress.after(rollout_id, global_step, micro_step), iteration=rollout_id)

    def write(folder: Path) -> None:
        content: dict[str, Any] = {"args": args, "iteration": rollout_id, "checkpoint_version": 3.0}
        content["model"] = _weights(state.model)
        if not args.no_save_optim:
            content["optimizer"] = _optimizer(state, loading=False)
        _save(content, folder)
        if state.reference is not None:
            (folder / "ref").mkdir(exist_ok=True)
            _save({"model": _weights(state.reference)}, folder / "ref")

    return write_iteration(Path(args.save), progress, write)


def load_weights(chunk: Any, folder: Path) -> None:
    """The weights of a distributed checkpoint into a stage, whatever layout wrote it. Collective."""
    loaded = dist_checkpointing.load({"model": _weights(chunk)}, str(folder))
    unwrap(chunk).load_state_dict(loaded["model"])


def load(folder: Path, state: TrainState) -> Progress | None:
    """Weights, optimizer, reference and random number generators of an iteration. None when it holds weights only. Collective."""
    load_weights(state.model, folder)
    if (folder / "meta.json").is_file() and _has_optimizer(folder):
        _load_optimizer(state, folder)
    else:
        logger.warning("%s holds no optimizer state; the optimizer starts fresh", folder)
        state.optimizer.reload_model_params()
    if state.reference is not None and is_torch_dist(folder / "ref"):
        load_weights(state.reference, folder / "ref")
    return restore(folder) if (folder / "meta.json").is_file() else None


def _has_optimizer(folder: Path) -> bool:
    return any(key.startswith("optimizer.") for key in dist_checkpointing.load_tensors_metadata(str(folder)))


def _load_optimizer(state: TrainState, folder: Path) -> None:
    rates = [{name: value for name, value in g.items() if name != "params"} for g in state.optimizer.param_groups]
    for part in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
        # Adam makes its moments at the first step; they must be there to be filled.
        part._init_optimizer_states_with_dummy_values()
    loaded = dist_checkpointing.load({"optimizer": _optimizer(state, loading=True)}, str(folder))
    with _own_step_counts():
        state.optimizer.load_state_dict(loaded["optimizer"])
    for values in (values for inner in inner_optimizers(state.optimizer) for values in inner.state.values()):
        if torch.is_tensor(values.get("step")):
            # All parameters were given the same tensor, which each would then count up.
            values["step"] = values["step"].clone()
    # Weight decay and betas were stored too; what the command line says now must win.
    for group, given in zip(state.optimizer.param_groups, rates, strict=True):
        group.update({name: value for name, value in given.items() if name != "step"})


@contextmanager
def _own_step_counts() -> Iterator[None]:
    """Torch's Adam (without TransformerEngine) counts its steps per parameter; megatron-core stores one count, set before this."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(parameter)
        original(self, parameter, {name: tensors.get(name, value) for name, value in own.items()})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
