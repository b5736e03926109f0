"""The critic of PPO on megatron-core: the policy's stages with one number per token instead of logits, trained on the returns.

The same rules as in the other back ends: V is the value of the state before a token, read at the position that predicts it; the head
starts at 0, so the first advantages are the returns. Left out: export as a Hugging Face model.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common import loss
from slime.backends.common.batches import Batch
from slime.backends.common.trainer import Rows, timed
from slime.backends.megatron_utils.trainer import MegatronTrainer


class MegatronCriticTrainer(MegatronTrainer):
    """One rank of the critic."""

    role = "critic"
    metric_room = "critic"

    def _prepare_targets(self, rollout_id: int, data: Batch, num_steps: int, perf: dict[str, float]) -> None:
        with timed(perf, "values_time"):
            data["values"] = self._response_values(data)
        self.values = [row.cpu() for row in data["values"]]
        self._finish_targets(rollout_id, data)

    @torch.no_grad()
    def _response_values(self, data: Batch) -> Rows:
        """Value of every response token of every row, [R_i]. Collective."""
        from slime.backends.megatron_utils.log_probs import values

        whole = {**data, "loss_masks": [torch.ones_like(mask_R) for mask_R in data["loss_masks"]]}

        def compute(stage: Any, hidden: torch.Tensor, batch: Any) -> tuple[Rows]:
            return (values(stage, hidden, batch),)

        return self._forward_rows(self.model, whole, compute, columns=1)[0]

    def _micro_batch_loss(self, batch: Batch, stage_batch: Any, hidden: torch.Tensor) -> loss.LossOutput:
        from slime.backends.megatron_utils.log_probs import values
        from slime.backends.megatron_utils.model_params import unwrap

        rows = values(unwrap(self.model), hidden, stage_batch)
        return loss.value_loss(self.args, batch, rows, loss.make_reducer(self.args, batch))
