"""Flags: rewards, and the conversion of rewarded samples to train data."""

from __future__ import annotations

import argparse


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--rm-type", default=None, help="built-in reward")
    add("--reward-key", default=None, help="entry to use when the reward is a dict")
    add("--eval-reward-key", default=None, help="same for evaluation (default: --reward-key)")
    add("--group-rm", action="store_true", help="compute the reward of a whole group at once")
    add("--rm-url", default=None, help="address of the remote reward")
    add("--custom-rm-path", default=None, help="async fn(args, sample) (or a list of samples, when batched)")
    add("--custom-reward-post-process-path", default=None, help="fn(args, samples) -> (raw rewards, rewards)")
    add(
        "--custom-convert-samples-to-train-data-path",
        default=None,
        help="fn(args, samples) -> dict of equally long lists",
    )
