"""Hooks of the runs that `benchmarks/gpu/run.py` starts: a reward with a spread, and the distance of trainer and engine."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch


async def even_tokens(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """Share of even token ids in the response: needs no judge, and differs within a group, so that weights move."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)


def engine_distance(
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """KL(engine || trainer) per sampled token, nats, by the estimator r - 1 - log r (Schulman's k3); corrects nothing."""
    log_ratio_S = torch.cat(train_log_probs).detach() - torch.cat(rollout_log_probs)
    return pg_loss, loss_masks, {"engine_kl": torch.expm1(log_ratio_S) - log_ratio_S}
