"""Flags: running one half of the system alone, and recording rollouts."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import reset_arg


def add_debug_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--debug-rollout-only", action="store_true", help="generate without training")
    add("--debug-train-only", action="store_true", help="train without engines")
    add("--save-debug-rollout-data", default=None, help="path with {rollout_id}: write the samples of each rollout")
    add("--load-debug-rollout-data", default=None, help="such a path: train on recorded samples, without engines")
    add(
        "--load-forge-rollout-data", default=None, help="recording that slime.rollout.forge_load replays, with engines"
    )
    add("--save-debug-train-data", default=None, help="path with {rollout_id}: write the train data of each rollout")
    add("--dump-details", default=None, help="directory: write rollouts and train data of every rollout below it")
    add(
        "--check-weight-update-equal",
        action="store_true",
        help="fail when the first sync changes the engines' weights; on a GPU only",
    )
    add("--load-debug-rollout-data-subsample", type=float, default=None, help="fraction of the recording to use")
    _add_profile_arguments(parser)


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add, targets = parser.add_argument, ["train_overall", "train_actor", "train_log_probs"]
    reset_arg(parser, "--use-pytorch-profiler", action="store_true", help="record where the training ranks' time goes")
    add(
        "--profile-target",
        nargs="+",
        choices=targets,
        default=targets[:1],
        help="what is recorded: all of a rollout's training, or single passes",
    )
    reset_arg(parser, "--profile-step-start", type=int, default=10, help="rollouts trained before the record starts")
    reset_arg(parser, "--profile-step-end", type=int, default=12, help="rollouts trained when it ends")
    reset_arg(parser, "--record-memory-history", action="store_true", help="record the training ranks' memory")
    add(
        "--memory-recorder", choices=["torch", "memray"], default="torch", help="torch: GPU memory; memray: the host's"
    )
    add("--memory-snapshot-num-steps", type=int, default=None, help="rollouts after which the memory is written")
    add("--memory-snapshot-dir", default=".", help="directory for profiles and memory snapshots")
