"""Flags: running one half of the system alone, and recording rollouts."""

from __future__ import annotations

import argparse


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
        help="fail when the first sync changes the engines' weights",
    )
    add("--load-debug-rollout-data-subsample", type=float, default=None, help="fraction of the recording to use")
