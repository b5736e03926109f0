"""The critic of PPO: the policy's architecture with one number per token instead of logits, trained on the returns.

Input: the same rollout data as the actor's, for the same ranks. Per rollout: values of every response token (also of those that
are not trained: advantages run through tool outputs), returns by generalised advantage estimation, then optimiser steps on the clipped
squared error. The values from before the first step are what the actor's advantages are made of (`values`).

Invariants: V is the value of the state before a token, read at the position that predicts it; the head starts at 0, so the first
advantages are the returns; everything about ranks, schedule and checkpoints is the trainer's.
Left out: a value head on the policy itself, and export as a Hugging Face model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from slime.backends.common import loss
from slime.backends.common.batches import Batch, iter_micro_batches, take_rows
from slime.backends.common.packing import PackedBatch
from slime.backends.common.trainer import timed
from slime.backends.fsdp_utils.model import PolicyModel, load_trainable_hf, reshard, shard
from slime.backends.fsdp_utils.trainer import FSDPTrainer


class ValueModel(PolicyModel):
    """The body of a causal LM with a linear head of one output. `forward` gives values_N in float32 at the selected tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(cast(PreTrainedModel, hf.base_model))
        self.value_head = nn.Linear(hf.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def model_state(self) -> dict[str, torch.Tensor]:
        """Body and head, under the names of this module."""
        return self.state_dict()

    def forward(self, packed: PackedBatch, *_: Any, **__: Any) -> torch.Tensor:
        """See the class. No temperature: it belongs to sampling."""
        hidden_ND = self._hidden(packed)[0].index_select(0, packed.select_N)
        return self.value_head(hidden_ND).squeeze(-1).float()


class CriticTrainer(FSDPTrainer):
    """One rank of the critic."""

    role = "critic"
    metric_room = "critic"

    def _build_model(self, weights: Path) -> ValueModel:
        model = ValueModel(load_trainable_hf(self.args, weights))
        shard(self.args, model, self.context)
        return model.train()

    def _prepare_targets(self, rollout_id: int, data: Batch, num_steps: int, perf: dict[str, float]) -> None:
        with timed(perf, "values_time"):
            data["values"] = self._response_values(data)
        self.values = [row.cpu() for row in data["values"]]
        self._finish_targets(rollout_id, data)

    @torch.no_grad()
    def _response_values(self, data: Batch) -> list[torch.Tensor]:
        """Value of every response token of every row, [R_i]. Collective."""
        whole = {**data, "loss_masks": [torch.ones_like(mask_R) for mask_R in data["loss_masks"]]}
        values = [torch.zeros_like(mask_R) for mask_R in data["loss_masks"]]
        for rows, packed in iter_micro_batches(whole):
            for i, value_R in zip(rows, packed.scatter(self.model(packed)), strict=True):
                values[i] = value_R
        reshard(self.model)
        return values

    def _micro_batch_loss(self, data: Batch, rows: list[int]) -> loss.LossOutput:
        batch, packed = take_rows(data, rows)
        values = packed.scatter(self.model(packed))
        return loss.value_loss(self.args, batch, values, loss.make_reducer(self.args, batch))
