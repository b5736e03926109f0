"""Flags of the FSDP backend: optimizer, schedule, precision and adapters."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import reset_arg


def add_fsdp_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--optimizer", choices=["adam"], default="adam", help="AdamW")
    reset_arg(parser, "--lr", type=float, default=1e-6, help="learning rate")
    styles = ["constant", "linear", "cosine", "WSD"]
    add("--lr-decay-style", choices=styles, default="constant", help="learning-rate schedule after the warm-up")
    add("--lr-warmup-iters", type=int, default=0, help="optimizer steps of linear warm-up")
    add("--lr-decay-iters", type=int, default=None, help="optimizer step at which the decay ends (default: the last)")
    add("--lr-wsd-decay-iters", type=int, default=None, help="optimizer steps of the final decay of WSD")
    add("--min-lr", type=float, default=0.0, help="learning rate at the end of the decay")
    add("--weight-decay", type=float, default=0.0, help="decoupled weight decay of matrices")
    add("--adam-beta1", type=float, default=0.9, help="first-moment decay")
    add("--adam-beta2", type=float, default=0.95, help="second-moment decay")
    add("--adam-eps", type=float, default=1e-8, help="denominator offset")
    reset_arg(parser, "--clip-grad", type=float, default=1.0, help="gradient norm limit; <= 0: none")
    add(
        "--attn-implementation",
        default=None,
        help="attention of transformers (default: flash_attention_2 on GPU, on CPU sdpa_row_wise: torch's, for each packed row by itself)",
    )
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--train-dtype", choices=["bf16", "fp32"], default=None, help="compute type (default: bf16 on GPU, else fp32)")
    _add_lora_arguments(parser)


def _add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lora-rank", type=int, default=None, help="train low-rank adapters of this rank instead of the weights")
    add("--lora-alpha", type=float, default=None, help="adapters are scaled by this / rank (default: 2 x rank)")
    add("--lora-dropout", type=float, default=0.0, help="dropout before the adapters, in optimiser steps only")
    add("--lora-target-modules", nargs="+", default=None, help="names of linear layers (default: all of the decoder)")
