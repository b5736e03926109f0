"""The number format of the forward and backward pass."""

from __future__ import annotations

from argparse import Namespace

import torch


def train_dtype(args: Namespace) -> torch.dtype:
    """dtype of the forward and backward pass: the flag, else bf16 on a GPU and fp32 on the CPU."""
    name = args.train_dtype or ("bf16" if args.use_gpu else "fp32")
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
