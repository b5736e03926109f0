"""Flags: the rollout buffer service (`slime_plugins/rollout_buffer`)."""

from __future__ import annotations

import argparse


def add_buffer_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--rollout-buffer-url", default=None, help="address of the rollout buffer service")
    add("--fetch-trajectory-retry-times", type=int, default=-1, help="empty answers of it to accept in a row; -1: any")
    add("--min-batch-collection-ratio", type=float, default=1.0, help="share of a batch that is enough to go on")
    add("--rollout-task-type", default="math", help="TASK_TYPE of its generator")
