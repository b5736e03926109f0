"""Flags: generation, and the hooks around it."""

from __future__ import annotations

import argparse


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--hf-checkpoint", default=None, help="Hugging Face model directory: tokenizer, config, first weights")
    add("--rollout-temperature", type=float, default=1.0, help="sampling temperature (> 0); also divides logits")
    add("--rollout-top-p", type=float, default=1.0, help="sampling top-p")
    add("--rollout-top-k", type=int, default=-1, help="sampling top-k (-1: all)")
    add("--rollout-max-context-len", type=int, default=None, help="most tokens of prompt + response")
    add("--rollout-max-prompt-len", type=int, default=None, help="drop longer prompts when loading the data")
    add("--rollout-max-response-len", type=int, default=None, help="most tokens to generate")
    add("--rollout-skip-special-tokens", action="store_true", help="leave special tokens out of response texts")
    add("--rollout-stop", nargs="+", default=None, help="stop strings")
    add("--rollout-stop-token-ids", type=int, nargs="+", default=None, help="stop token ids")
    add("--rollout-shuffle", action="store_true", help="shuffle the prompts in each epoch")
    add("--rollout-seed", type=int, default=42, help="seed of the shuffle and of deterministic sampling")
    add(
        "--rollout-max-staleness",
        type=int,
        default=None,
        help="fully asynchronous rollout: weight versions a sample may be behind the engines (default: any)",
    )
    add(
        "--rollout-external-engine-addrs",
        nargs="+",
        default=None,
        help="HOST:PORT of running engines to use instead of starting some",
    )
    add("--over-sampling-batch-size", type=int, default=None, help="prompts per fetch (default: a whole batch)")
    add("--partial-rollout", action="store_true", help="unfinished samples go back to the buffer and continue later")
    add(
        "--mask-offpolicy-in-partial-rollout",
        action="store_true",
        help="do not train on tokens generated in an earlier rollout",
    )
    _add_hook_arguments(parser)


def _add_hook_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--rollout-function-path",
        default="slime.rollout.sglang_rollout.generate_rollout",
        help="fn(args, rollout_id, data_source, evaluation=False) that makes one rollout",
    )
    add("--custom-generate-function-path", default=None, help="async fn(args, sample, sampling_params)")
    add(
        "--rollout-sample-hook-path",
        action="append",
        default=[],
        help="fn(args, sample, *, rollout_id, evaluation) on each sample before its reward (repeatable)",
    )
    add("--dynamic-sampling-filter-path", default=None, help="fn(args, group): keep this finished group?")
    add("--buffer-filter-path", default=None, help="fn(args, rollout_id, buffer, num_samples): take from the buffer")
    add("--rollout-sample-filter-path", default=None, help="fn(args, groups): mark samples with remove_sample")
    add("--rollout-all-samples-process-path", default=None, help="fn(args, all_samples, data_source)")
    add("--rollout-data-postprocess-path", default=None, help="fn(args, rollout_id, rollout_data) on training ranks")
    add("--custom-rollout-log-function-path", default=None, help="fn(rollout_id, args, samples, metrics, seconds)")
    add("--custom-eval-rollout-log-function-path", default=None, help="fn(rollout_id, args, data, metrics)")
