"""Flags: engines that die are found and started again."""

from __future__ import annotations

import argparse


def add_fault_tolerance_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add(
        "--use-fault-tolerance",
        action="store_true",
        help="find dead engines and start them again before a weight sync",
    )
    add("--rollout-health-check-interval", type=float, default=30.0, help="seconds between two checks of an engine")
    add(
        "--rollout-health-check-timeout", type=float, default=30.0, help="seconds after which an engine counts as dead"
    )
    add("--rollout-health-check-first-wait", type=float, default=0, help="seconds of grace before the first check")
