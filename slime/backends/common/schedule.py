"""Learning rate of an optimiser step.

It is a pure function of the number of finished optimiser steps, so a resumed run needs that number and nothing else, and cannot
apply the schedule twice. Left out: weight decay schedules.
"""

from __future__ import annotations

import math
from argparse import Namespace

import torch


def planned_steps(args: Namespace) -> int | None:
    """Optimiser steps of the whole run as the flags announce it; None when they do not say."""
    if not args.num_rollout or not args.global_batch_size:
        return None
    rollouts, size = args.rollout_batch_size * args.n_samples_per_prompt, args.global_batch_size
    if args.trailing_rollouts == "drop":
        return args.num_rollout * (rollouts // size)
    if args.trailing_rollouts == "carry" and rollouts >= size:
        return -(-args.num_rollout * rollouts // size)
    # Rounded up: a last step that is not full is padded.
    return args.num_rollout * -(-rollouts // size)


def learning_rate(args: Namespace, step: int) -> float:
    """Learning rate of optimiser step `step` (0 is the first).

    Warm-up is linear over `lr_warmup_iters` steps and ends at `lr`. Afterwards `lr_decay_style`: constant; linear or cosine down to
    `min_lr` at `lr_decay_iters`; WSD stays at `lr` and falls linearly over the last `lr_wsd_decay_iters` of `lr_decay_iters`.
    Raises `ValueError` when a decay has no known end.
    """
    warmup = args.lr_warmup_iters or 0
    if step < warmup:
        return args.lr * (step + 1) / warmup
    if args.lr_decay_style == "constant":
        return args.lr
    end = args.lr_decay_iters or planned_steps(args)
    if end is None:
        raise ValueError(f"--lr-decay-style {args.lr_decay_style} needs --lr-decay-iters (or --num-rollout)")
    start = warmup if args.lr_decay_style != "WSD" else max(end - _wsd_decay_iters(args), warmup)
    progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    if args.lr_decay_style == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return args.lr + (args.min_lr - args.lr) * progress


def _wsd_decay_iters(args: Namespace) -> int:
    if not args.lr_wsd_decay_iters:
        raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the number of optimiser steps of the decay")
    return args.lr_wsd_decay_iters


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Write the learning rate into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def check_gradient_norm(value: float) -> float:
    """The norm itself. Raises `FloatingPointError` when it is not finite, because the step would destroy the weights."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"gradient norm is {value}; lower --lr or check rewards and log-probs of this rollout"
        )
    return value
