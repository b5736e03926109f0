"""Debug dumps of rollout samples, the check of rollout ids, and tensors for the hand-off to the trainer.

Inputs: samples (nested or flat) or train data as a dict of lists. Invariants: a dump holds plain types and tensors
only and is loaded as such, so that a dump from elsewhere cannot run code; the file appears whole or not at all.
Left out: dumps of train data (`train_data_utils`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.utils.types import Sample

_TENSOR_DTYPES = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "rollout_top_p_token_ids": torch.int32,
    "rollout_top_p_token_offsets": torch.int32,
}


def tensorize_rollout_data_for_training(rollout_data: dict[str, Any]) -> None:
    """Turns the per-sample lists of `rollout_data` into CPU tensors, in place.

    tokens int64 (T,); loss masks int32 (R,); log-probs float32 (R,); nucleus ids and offsets int32.
    """
    for key, dtype in _TENSOR_DTYPES.items():
        if rollout_data.get(key) is not None:
            rollout_data[key] = [torch.as_tensor(value, dtype=dtype, device="cpu") for value in rollout_data[key]]


def validate_rollout_id_annotated(node: Any, depth: int = 0) -> None:
    """Checks that samples cut out of one rollout (lists inside a group) share a rollout id.

    `node` is the result of a rollout function: groups, whose members are samples or, after fan-out, lists of samples.
    Raises ValueError naming the sample.
    """
    if not isinstance(node, list):
        return
    for child in node:
        validate_rollout_id_annotated(child, depth + 1)
    leaves = [child for child in node if isinstance(child, Sample)]
    if depth < 2 or not leaves:
        return
    ids = {sample.rollout_id for sample in leaves}
    if ids == {None} or len(ids) > 1 or None in ids:
        raise ValueError(
            f"the {len(leaves)} samples of one fan-out rollout (sample index {leaves[0].index}) need the same "
            f"rollout_id, got {sorted(ids, key=str)}; set it in the generate function"
        )


def validate_rollout_routed_experts_for_replay(routed_experts: list[torch.Tensor], args: Any) -> None:
    """Checks the experts an engine reported, one tensor (tokens - 1, layers, top-k) per sample.

    Raises ValueError naming the sample when one is missing, has another shape, or names an expert that does not exist.
    """
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    num_experts = getattr(args, "num_experts", None)
    for position, experts in enumerate(routed_experts):
        if experts is None:
            raise ValueError(f"sample {position}: no routed experts, but routing is to be replayed")
        tensor = torch.as_tensor(experts)
        if tensor.ndim != 3 or layers not in (None, tensor.shape[1]) or top_k not in (None, tensor.shape[2]):
            raise ValueError(
                f"sample {position}: routed experts of shape {tuple(tensor.shape)}, expected (tokens - 1, {layers}, {top_k})"
            )
        if tensor.numel() and (int(tensor.min()) < 0 or (num_experts and int(tensor.max()) >= num_experts)):
            raise ValueError(f"sample {position}: routed experts outside of 0 to {num_experts} - 1")


def save_debug_rollout_data(path_template: str | None, data: Any, *, rollout_id: int, evaluation: bool) -> None:
    """Writes `{"rollout_id", "samples": [dict, ...]}` to `path_template.format(rollout_id=...)`.

    `data` are (nested) samples, or for evaluation the result by dataset; evaluation files carry the id `eval_<id>`.
    Does nothing without a template; raises TypeError for a value that is not plain data.
    """
    if path_template is None:
        return
    name = f"eval_{rollout_id}" if evaluation else str(rollout_id)
    path = Path(path_template.format(rollout_id=name))
    leaves = _leaves([result.get("samples") or [] for result in data.values()] if evaluation else data)
    samples = [to_plain(sample.to_dict(), f"sample {sample.index}") for sample in leaves]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save({"rollout_id": rollout_id, "samples": samples}, partial)
    partial.replace(path)


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int, subsample_ratio: float | None = None
) -> list[Sample]:
    """Samples of a dump; with a ratio only that share of them, half from the front and half from the end.

    Raises FileNotFoundError naming the flag when there is no dump for this rollout.
    """
    path = Path(path_template.format(rollout_id=rollout_id))
    if not path.exists():
        raise FileNotFoundError(f"--load-debug-rollout-data: there is no {path} for rollout {rollout_id}")
    rows = torch.load(path, weights_only=True)["samples"]
    if subsample_ratio is not None:
        half = int(len(rows) * subsample_ratio) // 2
        rows = rows[:half] + rows[len(rows) - half :]
    return [Sample.from_dict(row) for row in rows]


def _leaves(value: Any) -> Iterator[Sample]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def to_plain(value: Any, where: str) -> Any:
    """Copies `value` into builtin types and tensors; `where` names it in the error."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {to_plain(key, where): to_plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        build: Callable[[Any], Any] = tuple if isinstance(value, tuple) else list
        return build(to_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    raise TypeError(f"{where}: cannot dump {type(value).__name__}; keep plain data in samples and their metadata")
