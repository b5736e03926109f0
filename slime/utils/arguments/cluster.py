"""Flags: how many processes train and generate, and where. Without a GPU one "GPU" means one rank or one engine."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import reset_arg


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--actor-num-nodes", type=int, default=1, help="nodes for the training actor")
    add("--actor-num-gpus-per-node", type=int, default=8, help="training ranks (GPUs) on each of these nodes")
    add("--rollout-num-gpus", type=int, default=None, help="GPUs for engines; with --colocate default: the actor's")
    add("--rollout-num-gpus-per-engine", type=int, default=1, help="GPUs of one engine (tensor x pipeline parallel)")
    add("--num-gpus-per-node", type=int, default=8, help="GPUs of one machine, as the engines see it")
    add("--colocate", action="store_true", help="train and generate on the same GPUs, in turns")
    add(
        "--offload-rollout",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="release the engines' GPU memory while training (default: with --colocate on GPUs)",
    )
    add(
        "--offload-train",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="move the training state off the GPU while the engines generate",
    )
    add("--offload", action="store_true", help="short for --offload-train --offload-rollout")
    reset_arg(
        parser,
        "--distributed-backend",
        default=None,
        help="torch.distributed backend (default: nccl on GPU, gloo on CPU)",
    )
    reset_arg(parser, "--distributed-timeout-minutes", type=int, default=10, help="limit of one collective operation")
