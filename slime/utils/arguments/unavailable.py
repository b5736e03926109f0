"""Flags of the public interface that nothing in this version can honour: known, so that they are refused with a reason.

Input: the table below. Invariant: such a flag either has its default or is an error that says what would have it.
A flag leaves the table when its feature arrives. Left out: flags that exist but exclude each other (`validate`).
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

_MEGATRON = "--train-backend megatron does not have it in this version"

# Flag -> (type, default, choices, several values, why not). Type bool is a switch.
_FLAGS: dict[str, tuple[type, Any, tuple[str, ...], bool, str]] = {
    "--qwen-gdn-backend": (str, "fla", ("fla", "flashqla"), False, _MEGATRON),
    "--release-train": (bool, False, (), False, _MEGATRON),
    "--recompute-loss-function": (bool, False, (), False, _MEGATRON),
    "--freeze-indexer": (bool, False, (), False, _MEGATRON),
    "--allgather-cp": (bool, False, (), False, _MEGATRON),
    "--model-name": (str, None, (), False, _MEGATRON),
    "--rollout-data-transport": (str, "object-store", ("object-store", "nixl"), False, "only object-store is there"),
    "--async-save": (bool, False, (), False, _MEGATRON),
    "--use-stateless-adam": (bool, False, (), False, _MEGATRON),
    "--use-routing-replay": (bool, False, (), False, _MEGATRON),
    "--use-rollout-routing-replay": (bool, False, (), False, _MEGATRON),
    "--ref-ckpt-step": (int, None, (), False, "--ref-load names a model directory here; give that of the iteration"),
    "--http-proxy": (str, None, (), False, "engines are asked directly, never through a proxy"),
    "--use-distributed-post": (bool, False, (), False, "one process posts; use more engines' own concurrency"),
    "--megatron-deepgemm-forward-layers": (int, None, (), True, _MEGATRON),
    "--megatron-deepgemm-forward-modules": (str, None, (), True, _MEGATRON),
    "--megatron-deepgemm-moe-forward-layers": (int, None, (), True, _MEGATRON),
    "--megatron-deepgemm-moe-forward-modules": (str, None, (), True, _MEGATRON),
    "--mtp-num-layers": (int, None, (), False, _MEGATRON),
    "--mtp-loss-scaling-factor": (float, 0.2, (), False, _MEGATRON),
    "--enable-mtp-training": (bool, False, (), False, _MEGATRON),
    "--ci-test": (bool, False, (), False, "its assertions are tests here (scripts/test.sh)"),
    "--ci-disable-kl-checker": (bool, False, (), False, "see --ci-test"),
    "--ci-train-rollout-logprob-abs-diff-threshold": (float, 0.1, (), False, "see --ci-test"),
    "--ci-save-grad-norm": (str, None, (), False, "see --ci-test"),
    "--ci-load-grad-norm": (str, None, (), False, "see --ci-test"),
    "--padded-vocab-size": (int, None, (), False, _MEGATRON),
}
# Attributes of the flags above, for whoever asks which ones nothing reads.
UNAVAILABLE = frozenset(flag.removeprefix("--").replace("-", "_") for flag in _FLAGS)


def add_unavailable_arguments(parser: argparse.ArgumentParser) -> None:
    """Register those flags that nobody has registered yet."""
    for flag, (kind, default, choices, several, why) in _FLAGS.items():
        if flag in parser._option_string_actions:
            continue
        text = f"not available: {why}"
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            nargs = "+" if several else None
            parser.add_argument(flag, type=kind, default=default, choices=choices or None, nargs=nargs, help=text)


def refuse_unavailable(args: Namespace) -> None:
    """Raise ValueError naming the first of these flags that is not at its default, and why it is refused."""
    for flag, (_, default, _, _, why) in _FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), default)
        if value != default:
            raise ValueError(f"{flag} {value}: not available: {why}")
