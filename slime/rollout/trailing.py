"""Rollouts beyond the last whole optimiser step of a batch: carried into the next batch, padded, or dropped.

Input: the train data of one rollout id, batch after batch. Output: the rows to train on now. `--trailing-rollouts` decides:
* `carry` (default): they wait, with their rewards and log-probs as they are, and lead the next batch;
* `pad`: they are trained now, in a step that `conversion.pad_to_global_batch` fills with masked rollouts;
* `drop`: they are left out, as upstream does.

Invariants: with `carry` and `pad` every rollout is trained exactly once; with `carry` at most one batch late. What does not fill a
single step, and what is left when the run ends, is padded in both. Rows of one rollout stay together and in order.
Left out: reward normalisation, which is done before, while a prompt's group is still whole.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from slime.observability.rollout_data_utils import to_plain
from slime.rollout.conversion import TrainData, unused_ids, with_rollouts
from slime.rollout.data_source import checkpoint_root
from slime.utils.dp_schedule import group_by_rollout

logger = logging.getLogger(__name__)

# Zeros stand for these in a row that trains nothing; in any other row they are needed.
_PER_TOKEN = ("rollout_log_probs", "teacher_log_probs")


class TrailingRollouts:
    """What waits between two batches. `args` needs `trailing_rollouts` and `global_batch_size`."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self._held: TrainData = {}

    def __len__(self) -> int:
        """Rollouts that wait."""
        return _count(self._held)

    def take(self, data: TrainData, last: bool) -> tuple[TrainData, dict[str, int]]:
        """The rows to train on now, and counts for the log (empty when there is nothing to tell). `data` stays as it is.

        `last`: no batch follows, so that nothing may wait. Raises ValueError when `drop` leaves nothing to train on, or
        when rows that waited lack values that the new ones have.
        """
        waited = len(self)
        batch = join(self._held, with_rollouts(data)) if self._held else with_rollouts(data)
        self._held = {}
        extra = _count(batch) % self.args.global_batch_size
        whole = _count(batch) - extra
        mode = self.args.trailing_rollouts
        if not extra or mode == "pad" or (mode == "carry" and (last or not whole)):
            return batch, {"rollout/carried_in": waited} if waited else {}
        if not whole:
            raise ValueError(
                f"--trailing-rollouts drop: {extra} rollouts do not fill one step of --global-batch-size "
                f"{self.args.global_batch_size}, so nothing is left to train on; lower it, or use carry"
            )
        batch, rest = _cut(batch, whole)
        if mode == "drop":
            return batch, {"rollout/dropped_rollouts": extra}
        self._held = rest
        return batch, {"rollout/carried_in": waited, "rollout/carried_out": extra}

    def save(self, rollout_id: int) -> None:
        """Write what waits beside the checkpoint of `rollout_id`; the file appears whole or not at all."""
        path = _state_path(Path(self.args.save), rollout_id)
        if not self._held:
            path.unlink(missing_ok=True)  # left by an earlier run in the same directory
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(to_plain(self._held, "carried rollouts"), partial)
        partial.replace(path)

    def load(self, rollout_id: int | None) -> None:
        """Take up what waited at the checkpoint of `rollout_id`, if anything did."""
        if self.args.load is None:
            return
        path = _state_path(checkpoint_root(self.args.load), rollout_id)
        if path.exists():
            # Plain types only: a checkpoint directory may come from elsewhere and must not run code.
            self._held = torch.load(path, weights_only=True)
            logger.info("%s: %d rollouts are carried over", path, len(self))


def _state_path(root: Path, rollout_id: int | None) -> Path:
    return root / "rollout" / f"carried_rollouts_{rollout_id}.pt"


def _count(data: TrainData) -> int:
    return len(set(data.get("rollout_ids", ())))


def _cut(data: TrainData, count: int) -> tuple[TrainData, TrainData]:
    """The rows of the first `count` rollouts, and the others."""
    first = {row for rows in group_by_rollout(data["rollout_ids"])[:count] for row in rows}
    numbers = range(len(data["rollout_ids"]))
    chosen = [row for row in numbers if row in first], [row for row in numbers if row not in first]
    head, tail = ({key: [column[row] for row in rows] for key, column in data.items()} for rows in chosen)
    return head, tail


def join(older: TrainData, newer: TrainData) -> TrainData:
    """Rows of both, the older ones first, with ids of their own: ids are only unique within a batch."""
    renamed = dict(zip(dict.fromkeys(older["rollout_ids"]), unused_ids(newer["rollout_ids"]), strict=False))
    older = {**older, "rollout_ids": [renamed[rollout] for rollout in older["rollout_ids"]]}
    keys = dict.fromkeys((*older, *newer))
    return {key: [*_column(older, key), *_column(newer, key)] for key in keys}


def _column(data: TrainData, key: str) -> list[Any]:
    """A column that only the other side has is None here, or zeros where it holds one value per response token."""
    if key in data:
        return data[key]
    if key not in _PER_TOKEN:
        return [None] * len(data["tokens"])
    if any(any(mask) for mask in data["loss_masks"]):
        raise ValueError(
            f"carried and new rollouts differ: only one of them has {key}; the rollout function must be consistent"
        )
    return [[0.0] * length for length in data["response_lengths"]]
