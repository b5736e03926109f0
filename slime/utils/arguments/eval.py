"""Flags: evaluation. Unset ones take the rollout's value."""

from __future__ import annotations

import argparse

from slime.utils.arguments.parser import reset_arg


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    add = parser.add_argument
    add("--eval-function-path", default=None, help="like --rollout-function-path, called with evaluation=True")
    reset_arg(parser, "--eval-interval", type=int, default=None, help="rollouts between evaluations (default: never)")
    add("--eval-prompt-data", nargs="+", default=None, help="pairs: NAME FILE [NAME FILE ...]")
    add("--eval-config", default=None, help="YAML file with eval: {defaults, datasets}; beats --eval-prompt-data")
    add("--skip-eval-before-train", action="store_true", help="do not evaluate before the first rollout")
    add("--eval-input-key", default=None, help="field of the prompt")
    add("--eval-label-key", default=None, help="field of the label")
    add("--eval-tool-key", default=None, help="field of the tools")
    add("--n-samples-per-eval-prompt", type=int, default=1, help="samples per evaluation prompt")
    add("--eval-temperature", type=float, default=None, help="sampling temperature (0: greedy)")
    add("--eval-top-p", type=float, default=None, help="sampling top-p")
    add("--eval-top-k", type=int, default=None, help="sampling top-k")
    add("--eval-max-response-len", type=int, default=None, help="most tokens to generate")
    add("--eval-max-prompt-len", type=int, default=None, help="drop longer evaluation prompts")
    add("--eval-min-new-tokens", type=int, default=None, help="least tokens to generate")
    add("--eval-max-context-len", type=int, default=None, help="most tokens of prompt + response")
