"""Flags: training runtime, checkpoints and the way weights reach the engines."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import json_object, reset_arg


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--train-backend", choices=["megatron", "fsdp"], default="megatron", help="training backend")
    add("--train-env-vars", type=json_object, default={}, help="JSON object: more environment variables for trainers")
    add("--log-probs-chunk-size", type=int, default=-1, help="rows per log-prob chunk; <= 0 means 1024")
    add("--only-train-params-name-list", nargs="*", default=None, help="regexes of the only parameters to train")
    add("--freeze-params-name-list", nargs="*", default=None, help="regexes of parameters to freeze")
    reset_arg(parser, "--seed", type=int, default=1234, help="training seed, and base of the engines' seeds")
    reset_arg(
        parser, "--custom-config-path", default=None, help="YAML mapping; every key becomes an attribute of args"
    )
    _add_checkpoint_arguments(parser)
    _add_weight_sync_arguments(parser)


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ref-load", default=None, help="directory of the reference model")
    reset_arg(parser, "--load", default=None, help="checkpoint directory to resume from")
    reset_arg(parser, "--ckpt-step", type=int, default=None, help="iteration inside --load (default: the latest)")
    reset_arg(parser, "--save", default=None, help="checkpoint output directory")
    reset_arg(parser, "--save-interval", type=int, default=None, help="rollouts between saves")
    reset_arg(parser, "--no-save-optim", action="store_true", help="leave the optimizer out of checkpoints")
    parser.add_argument("--save-hf", default=None, help="path with {rollout_id}: also export a Hugging Face model")


def _add_weight_sync_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--update-weight-transport",
        choices=["nccl", "disk"],
        default="nccl",
        help="collective broadcast (over gloo on CPU), or a directory that the engines reload",
    )
    add("--update-weight-disk-dir", default=None, help="shared directory for --update-weight-transport disk")
    add("--update-weight-disk-keep-files", action="store_true", help="keep the directories of earlier disk syncs")
    add("--update-weight-mode", choices=["full", "delta"], default="full", help="disk: everything, or what changed")
    add(
        "--update-weight-delta-encoding",
        choices=["xor", "overwrite"],
        default="xor",
        help="old xor new, or new values",
    )
    add(
        "--update-weight-delta-checksum",
        choices=["xxh3-128", "blake3", "adler32"],
        default="xxh3-128",
        help="digest of every changed tensor, checked where it is applied",
    )
    add(
        "--update-weight-local-checkpoint-dir",
        default=None,
        help="delta: directory on each host for a copy of the model",
    )
    add("--update-weights-interval", type=int, default=1, help="train_async.py: rollouts between two weight syncs")
    add("--update-weight-buffer-size", type=int, default=512 * 1024**2, help="bytes per weight-sync bucket")
    add("--custom-update-weight-post-write-path", default=None, help="hook: fn(args, version_dir, rollout_engines)")
