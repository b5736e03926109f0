"""From the per-rank rollout data (plain lists) to device tensors and micro-batches.

Input: the dict that the rollout manager makes for one data-parallel rank. `micro_batch_indices` lists, for all optimiser steps
one after the other, the local row numbers of each micro-batch; `num_microbatches[step]` says how many belong to a step;
`global_batch_sizes[step]` is the number of rollout executions of the step over all ranks.

Invariants: every rank has the same number of micro-batches, so collectives line up; rows keep their order.
Left out: who made the schedule, what the numbers mean for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.common.packing import PackedBatch, check_row, pack_rows

Batch = dict[str, Any]

# per-row fields and the dtype they have on the device
_ROW_TENSORS: dict[str, torch.dtype] = {
    "tokens": torch.int64,
    "loss_masks": torch.float32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "values": torch.float32,
}
_REQUIRED = (
    "tokens",
    "response_lengths",
    "loss_masks",
    "rewards",
    "rollout_mask_sums",
    "micro_batch_indices",
    "num_microbatches",
    "global_batch_sizes",
)


@dataclass(frozen=True)
class StepPlan:
    """The micro-batches (lists of local row numbers) of one optimiser step."""

    micro_batches: list[list[int]]
    global_batch_size: int


def prepare_rollout_data(rollout_data: Batch, device: torch.device) -> Batch:
    """Check the rows and move them to the device. Returns a new dict; log-probs become float32, tokens int64.

    Raises `ValueError` naming the missing key or the row that is wrong.
    """
    missing = [key for key in _REQUIRED if key not in rollout_data]
    if missing:
        raise ValueError(f"rollout data lacks {missing}; a custom convert function must return these lists")
    data = dict(rollout_data)
    for key, dtype in _ROW_TENSORS.items():
        if data.get(key) is not None:
            data[key] = [torch.as_tensor(row, dtype=dtype, device=device) for row in data[key]]
    _check_rows(data)
    data["local_total_lengths"] = [len(row) for row in data["tokens"]]
    return data


def _check_rows(data: Batch) -> None:
    lengths = data["response_lengths"]
    for i, (tokens_L, mask_R) in enumerate(zip(data["tokens"], data["loss_masks"], strict=True)):
        check_row(i, len(tokens_L), lengths[i], len(mask_R))
    for key in ("rollout_log_probs", "teacher_log_probs", "values"):
        for i, row in enumerate(data.get(key) or []):
            if len(row) != lengths[i]:
                raise ValueError(f"row {i}: {len(row)} {key} but response_length is {lengths[i]}")


def plan_steps(rollout_data: Batch) -> list[StepPlan]:
    """Cut the flat list of micro-batches into optimiser steps."""
    plans, start = [], 0
    for count, size in zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True):
        plans.append(StepPlan(rollout_data["micro_batch_indices"][start : start + count], int(size)))
        start += count
    if start != len(rollout_data["micro_batch_indices"]):
        raise ValueError(
            f"{len(rollout_data['micro_batch_indices'])} micro-batches but num_microbatches sum to {start}"
        )
    return plans


def take_rows(data: Batch, rows: list[int]) -> tuple[Batch, PackedBatch]:
    """One micro-batch: every per-row list cut down to `rows`, and its packed form.

    The batch also carries `total_lengths` (of these rows), `unconcat_tokens` and the packed `input_ids`, `position_ids`,
    which is what a custom loss function sees.
    """
    count = len(data["tokens"])
    skip = (
        "micro_batch_indices",
        "forward_micro_batches",
        "num_microbatches",
        "global_batch_sizes",
        "partition",
        "raw_reward",
        "total_lengths",
    )
    batch: Batch = {
        key: [value[i] for i in rows]
        for key, value in data.items()
        if key not in skip and isinstance(value, (list, tuple)) and len(value) == count
    }
    packed = pack_rows(batch["tokens"], batch["response_lengths"], batch["loss_masks"])
    batch["total_lengths"] = batch.pop("local_total_lengths")
    batch["unconcat_tokens"] = batch["tokens"]
    batch["input_ids"], batch["position_ids"] = packed.input_ids_1T, packed.position_ids_1T
    return batch, packed


def iter_micro_batches(data: Batch) -> Iterator[tuple[list[int], PackedBatch]]:
    """All micro-batches of the rollout, for forward-only passes: `forward_micro_batches` where the data have them."""
    for rows in data.get("forward_micro_batches") or data["micro_batch_indices"]:
        yield rows, take_rows(data, rows)[1]


def count_trained_tokens(data: Batch, plan: StepPlan) -> tuple[int, int]:
    """Of this rank in one step: trained tokens, and the same with every row counted as at least one.

    The second number is the normaliser of the per-token loss: a fully masked row adds one, as in the loss reducer's rule.
    """
    sums = [int(data["loss_masks"][i].sum()) for rows in plan.micro_batches for i in rows]
    return sum(sums), sum(max(total, 1) for total in sums)
