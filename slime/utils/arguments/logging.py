"""Flags: where metrics go."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import reset_arg


def add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--metrics-jsonl", default=None, help="append every metrics line to this file")
    add("--log-passrate", action="store_true", help="log pass@k")
    add("--log-multi-turn", action="store_true", help="log turns and tokens per turn (metadata round_number)")
    add("--log-correct-samples", action="store_true", help="log the lengths of samples with reward 1 apart")
    add("--log-reward-category", default=None, help="key of a reward dict whose values are counted in the log")
    add("--use-tensorboard", action="store_true", help="write TensorBoard files")
    add("--tb-project-name", default=None, help="TensorBoard directory (default: $TENSORBOARD_DIR)")
    add("--tb-experiment-name", default=None, help="name of the run in TensorBoard")
    _add_wandb_arguments(parser)


def _add_wandb_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--use-wandb", action="store_true", help="log to Weights & Biases")
    add("--wandb-mode", choices=["online", "offline", "disabled"], default=None, help="overrides $WANDB_MODE")
    add("--wandb-dir", default=None, help="local directory of its files")
    add("--wandb-key", default=None, help="API key")
    add("--wandb-host", default=None, help="server")
    add("--wandb-team", default=None, help="entity")
    add("--wandb-group", default=None, help="group of runs")
    reset_arg(parser, "--wandb-project", default=None, help="project")
    add("--wandb-run-id", default=None, help="run to continue")
    add(
        "--disable-wandb-random-suffix",
        dest="wandb_random_suffix",
        action="store_false",
        help="no random suffix in the run's name",
    )
    add("--wandb-always-use-train-step", action="store_true", help="training step as x-axis everywhere")
