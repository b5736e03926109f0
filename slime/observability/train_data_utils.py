"""Dumps of the train data of a rollout (`--save-debug-train-data`): one file with the shares of all ranks.

Input: each rank's share as it stands after advantages were computed. Invariants: `format_version` 2; plain types and
tensors on the host only; the file appears whole or not at all, written by rank 0 alone. Left out: reading it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.observability.rollout_data_utils import to_plain

FORMAT_VERSION = 2
# Per-token fields of the response, which context parallelism cuts.
_CP_FIELDS = (
    *("log_probs", "ref_log_probs", "old_log_probs", "teacher_log_probs", "rollout_log_probs", "values"),
    *("advantages", "returns", "kl", "opd_reverse_kl"),
)


def restore_context_parallel_fields_to_cpu(
    rollout_data: dict[str, Any],
    gather_tensor: Callable[[torch.Tensor, int, int], torch.Tensor],
    *,
    keep_restored: bool,
) -> dict[str, Any] | None:
    """A copy of the data in which per-token fields cover the whole response, on the host.

    `gather_tensor(local, total_length, response_length)` joins the parts of all context-parallel ranks; every rank must
    call this. A tensor that is complete already is not gathered. With `keep_restored` False the result is dropped (None):
    the rank only takes part.
    """
    restored = dict(rollout_data)
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    for name in _CP_FIELDS:
        column = rollout_data.get(name)
        if column is None:
            continue
        whole = [
            _whole(part, total, length, gather_tensor) for part, (total, length) in zip(column, lengths, strict=True)
        ]
        restored[name] = whole if keep_restored else None
    return to_plain(restored, "train data") if keep_restored else None


def _whole(part: Any, total: int, length: int, gather_tensor: Callable[..., torch.Tensor]) -> torch.Tensor:
    tensor = torch.as_tensor(part)
    gathered = tensor if tensor.numel() == length else gather_tensor(tensor, total, length)
    return gathered.detach().cpu()


def save_debug_train_data(args: Any, *, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Gathers the shares of all ranks on rank 0 and writes them to `args.save_debug_train_data`. Collective.

    Does nothing without the flag. The file holds `{"format_version", "rollout_id", "shards": [data of rank 0, ...]}`.
    """
    template = getattr(args, "save_debug_train_data", None)
    if not template:
        return
    import torch.distributed as dist

    share = to_plain(rollout_data, "train data")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shards: list[Any] = [share]
    if world_size > 1:
        shards = [None] * world_size
        dist.gather_object(share, shards if rank == 0 else None, dst=0)
    if rank == 0:
        _write(Path(template.format(rollout_id=rollout_id, rank=rank)), rollout_id, shards)


def _write(path: Path, rollout_id: int, shards: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save({"format_version": FORMAT_VERSION, "rollout_id": rollout_id, "shards": shards}, partial)
    partial.replace(path)
