"""Flags: prompt data, and how rollouts are cut into batches."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import json_object, reset_arg


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--num-rollout", type=int, default=None, help="rollouts (each followed by training); 0: evaluate only")
    add("--num-epoch", type=int, default=None, help="instead of --num-rollout: passes over the prompts")
    add("--start-rollout-id", type=int, default=None, help="first rollout id (default: from the checkpoint, else 0)")
    add(
        "--disable-rollout-global-dataset",
        dest="rollout_global_dataset",
        action="store_false",
        help="the rollout function manages its own data",
    )
    add(
        "--data-source-path",
        default="slime.rollout.data_source.RolloutDataSourceWithBuffer",
        help="class that serves prompt groups",
    )
    add("--prompt-data", default=None, help=".jsonl or .parquet file; FILE@[a:b] takes a slice of it")
    add("--apply-chat-template", action="store_true", help="render prompts with the tokenizer's chat template")
    add("--apply-chat-template-kwargs", type=json_object, default={}, help="JSON object: more template arguments")
    add("--input-key", default="input", help="field of the prompt")
    add("--label-key", default=None, help="field of the label")
    add("--multimodal-keys", type=json_object, default=None, help="refused: this version loads text prompts only")
    add("--metadata-key", default="metadata", help="field of the metadata")
    add("--tool-key", default="tools", help="field of the tools")
    add(
        "--loss-mask-type",
        choices=["qwen", "qwen3", "qwen3_5", "distill_qwen"],
        default="qwen",
        help="how supervised conversations are masked",
    )
    text = "train the first token of the next turn too: for models that stop with it (GLM)"
    add("--train-boundary-token", action="store_true", help=text)
    _add_batch_arguments(parser)


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rollout-batch-size", type=int, required=True, help="prompts per rollout")
    add("--n-samples-per-prompt", type=int, default=1, help="samples per prompt")
    reset_arg(
        parser,
        "--global-batch-size",
        type=int,
        default=None,
        help="rollout executions per optimizer step (default: one step per rollout)",
    )
    add("--num-steps-per-rollout", type=int, default=None, help="instead of --global-batch-size")
    add(
        "--trailing-rollouts",
        choices=["carry", "pad", "drop"],
        default="carry",
        help="rollouts that fill no whole step: lead the next rollout's data, train in a padded step, or leave out",
    )
    reset_arg(parser, "--micro-batch-size", type=int, default=1, help="samples per micro-batch")
    add("--balance-data", action="store_true", help="balance the work of the data-parallel ranks")
    add("--balance-by-flops", action="store_true", help="the same by FLOPs, for micro-batches as well as ranks")
    add("--use-dynamic-batch-size", action="store_true", help="pack micro-batches up to --max-tokens-per-gpu")
    add("--max-tokens-per-gpu", type=int, default=None, help="token budget of a micro-batch")
    add(
        "--log-probs-max-tokens-per-gpu",
        type=int,
        default=None,
        help="the same for passes without gradients (default: --max-tokens-per-gpu)",
    )
