"""Flags: data of another policy than the trainer's (engine, older weights), and distillation from a teacher."""

from __future__ import annotations

import argparse


def add_offpolicy_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--use-rollout-logprobs", action="store_true", help="the engine's log-probs are the old log-probs")
    add(
        "--keep-old-actor",
        action="store_true",
        help="the old log-probs are those of the weights that the engines had, of which copies are held on the host",
    )
    add("--use-tis", action="store_true", help="weight tokens with trainer / engine probability, truncated")
    add("--tis-clip", type=float, default=2.0, help="upper bound of that weight")
    add("--tis-clip-low", type=float, default=0.0, help="lower bound of that weight")
    add(
        "--custom-tis-function-path",
        default=None,
        help="replaces the truncation, for instance slime.utils.importance_sampling.icepop_function",
    )
    add("--get-mismatch-metrics", action="store_true", help="call --custom-tis-function-path without --use-tis")
    add("--use-opsm", action="store_true", help="drop tokens with A < 0 of sequences that left the old policy")
    add("--opsm-delta", type=float, default=1e-4, help="mean of old - new log-prob from which a sequence is dropped")


def add_distillation_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--use-opd", action="store_true", help="on-policy distillation: subtract the KL to a teacher from advantages")
    add("--opd-type", choices=["sglang", "megatron"], default=None, help="teacher: an engine, or a checkpoint")
    add("--opd-kl-coef", type=float, default=1.0, help="weight of that KL")
    add("--opd-teacher-load", default=None, help="teacher checkpoint of --opd-type megatron (megatron backend only)")
    add("--opd-teacher-ckpt-step", type=int, default=None, help="iteration inside --opd-teacher-load")
