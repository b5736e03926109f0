"""Corrections for data that another policy than the trainer's generated: truncated importance sampling and IcePop.

The engine and the trainer compute slightly different log-probs for the same weights, and asynchronous data come from older
weights. Both functions have the shape of the hook `--custom-tis-function-path`, so that a user's function can replace either:

    fn(args=, pg_loss=, train_log_probs=, rollout_log_probs=, loss_masks=, total_lengths=, response_lengths=)
        -> (pg_loss, loss_masks, metrics)

`pg_loss` is [S], all samples of the micro-batch one after the other; log-probs and masks are lists of [R_i]. The masks returned
rebuild the numerator of the loss, its denominators stay those of the original masks; metrics are tensors [S] per token.

Invariants: weights carry no gradient; nothing here looks at another sample. Left out: sequence-level rejection recipes (write
them as the hook).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

Correction = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """Truncated importance sampling: every token is weighted with clamp(w, `tis_clip_low`, `tis_clip`), w = pi_old / pi_rollout.

    (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".)
    """
    low, high = args.tis_clip_low, args.tis_clip
    return _weigh(pg_loss, train_log_probs, rollout_log_probs, loss_masks, lambda w: w.clamp(low, high))


def icepop_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> Correction:
    """IcePop: w inside [`tis_clip_low`, `tis_clip`], 0 outside: a token the two engines disagree about is not trained.

    (Ling team 2025, "Every step evolves".) Select it with `--custom-tis-function-path` and this function's path.
    """
    low, high = args.tis_clip_low, args.tis_clip
    inside = lambda w: torch.where((w >= low) & (w <= high), w, torch.zeros_like(w))  # noqa: E731
    return _weigh(pg_loss, train_log_probs, rollout_log_probs, loss_masks, inside)


def _weigh(
    pg_loss_S: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    limit: Callable[[torch.Tensor], torch.Tensor],
) -> Correction:
    ratio_S = torch.exp(torch.cat(train_log_probs).detach() - torch.cat(rollout_log_probs).detach())
    weight_S = limit(ratio_S)
    metrics = {
        "tis": ratio_S,
        "tis_clipfrac": (weight_S != ratio_S).float(),
        "tis_abs": (ratio_S - 1.0).abs(),
    }
    return pg_loss_S * weight_S, loss_masks, metrics
