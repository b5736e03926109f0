"""AdamW and gradient clipping for sharded (DTensor) parameters.

Left out: other optimisers, loss scaling (master weights and gradients are float32, so none is needed), the learning rate
(`common.schedule`).
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slime.backends.common.schedule import check_gradient_norm


def build_optimizer(args: Namespace, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients; vectors (norms, biases) get no weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            "no parameter is left to train; check --only-train-params-name-list / --freeze-params-name-list"
        )
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, betas=betas, eps=args.adam_eps)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to `max_norm` (<= 0: leave them) and return the total 2-norm over all ranks before scaling.

    All ranks must call it. Raises `FloatingPointError` when the norm is not finite.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    value = check_gradient_norm(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return value
