"""The policy as the engines had it (`--keep-old-actor`): old log-probs of the weights that generated a rollout.

Input: the sharded policy, and the version after each weight sync. Of the last `KEPT` syncs this rank's shards of the trained weights
are held in host memory. When a loop generates ahead of training (`train_async.py`), the policy has moved since; with `train.py` both
are the same. Invariants: the policy is unchanged after `at`, whatever happens inside. Left out: batches of several versions at once,
which the engine's own log-probs describe better (`--use-rollout-logprobs`); rollouts older than what is held take the oldest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.model import PolicyModel, reshard
from slime.utils.tensor_backper import TensorBackuper

# A loop that generates one rollout ahead needs the sync before the last.
KEPT = 2
_CURRENT = "current"


class OldActor:
    """Copies of one model's trained weights, by version of the sync."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self._store = TensorBackuper.create(self._shards, None)
        self._tags: dict[int, str] = {}

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        reshard(self._model)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()

    def remember(self, version: int) -> None:
        """Store the weights that the engines have from now on, in place of the oldest ones when `KEPT` are held."""
        tag = self._tags.pop(min(self._tags)) if len(self._tags) == KEPT else str(len(self._tags))
        self._store.backup(tag)
        self._tags[version] = tag

    @contextmanager
    def at(self, version: int | None) -> Iterator[None]:
        """Inside, the policy has the weights of `version` (None: of the last sync). For passes without gradients."""
        if not self._tags:  # nothing was sent yet, so the weights are those of the start
            yield
            return
        known = sorted(self._tags)
        chosen = max((v for v in known if version is None or v <= version), default=known[0])
        self._store.backup(_CURRENT)
        self._store.restore(self._tags[chosen])
        try:
            yield
        finally:
            self._store.restore(_CURRENT)
