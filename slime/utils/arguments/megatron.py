"""Flags of the Megatron backend: how ranks are divided, recomputation, hooks, and the sizes of the model.

The sizes come from `config.json` of `--hf-checkpoint`; those that are given (the scripts in `scripts/models` do, under megatron-core's
names) must agree with it (`megatron_utils.capabilities`). Optimizer, schedule and precision are those of the FSDP backend's flags.
"""

from __future__ import annotations

import argparse

_SIZES: dict[str, type] = {
    "num-layers": int,
    "hidden-size": int,
    "ffn-hidden-size": int,
    "num-attention-heads": int,
    "num-query-groups": int,
    "kv-channels": int,
    "vocab-size": int,
    "norm-epsilon": float,
    "rotary-base": float,
    "rope-scaling-factor": float,
    "num-experts": int,
    "moe-router-topk": int,
    "moe-ffn-hidden-size": int,
}
_SWITCHES = {
    "group-query-attention": "every known model has it",
    "disable-bias-linear": "every known model has it",
    "swiglu": "every known model has it",
    "use-rotary-position-embeddings": "every known model has it",
    "add-qkv-bias": "Qwen2, Qwen2.5",
    "qk-layernorm": "Qwen3",
    "use-rope-scaling": "Llama 3.1 and later",
    "untie-embeddings-and-output-weights": "larger models",
}


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the flags of this group."""
    _add_parallel_arguments(parser)
    _add_recompute_arguments(parser)
    _add_hook_arguments(parser)
    _add_size_arguments(parser)


def _add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share every matrix")
    add("--pipeline-model-parallel-size", type=int, default=1, help="stages of layers")
    add("--context-parallel-size", type=int, default=1, help="ranks that share every sequence")
    add("--expert-model-parallel-size", type=int, default=1, help="ranks that share the experts of a layer")
    add("--expert-tensor-parallel-size", type=int, default=None, help="ranks that share an expert (default: tensor's)")
    add("--sequence-parallel", action="store_true", help="tensor-parallel ranks share tokens outside of matrices")
    add("--decoder-first-pipeline-num-layers", type=int, default=None, help="layers of the first stage, if uneven")
    add("--decoder-last-pipeline-num-layers", type=int, default=None, help="layers of the last stage, if uneven")
    add("--make-vocab-size-divisible-by", type=int, default=128, help="pad the vocabulary, per tensor-parallel rank")
    add("--data-pad-size-multiplier", type=int, default=128, help="pad a rank's packed tokens to a multiple of this")


def _add_recompute_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--recompute-granularity",
        choices=["full", "selective"],
        default=None,
        help="recompute layers, or parts of them",
    )
    add("--recompute-method", choices=["uniform", "block"], default=None, help="which layers, with full granularity")
    add(
        "--recompute-num-layers",
        type=int,
        default=None,
        help="layers of a recomputed unit (uniform), or how many (block)",
    )
    add("--recompute-modules", nargs="*", default=None, help="parts to recompute with selective granularity")


def _add_hook_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--custom-model-provider-path", default=None, help="hook: fn(pre_process, post_process) -> Megatron model")
    add("--custom-megatron-init-path", default=None, help="hook: fn(args), after the process groups are made")
    add("--custom-megatron-before-log-prob-hook-path", default=None, help="hook: fn(args, model, store_prefix)")
    add(
        "--custom-megatron-before-train-step-hook-path",
        default=None,
        help="hook: fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
    )


def _add_size_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, kind in _SIZES.items():
        add(f"--{name}", type=kind, default=None, help="checked against --hf-checkpoint, where it comes from")
    for name, models in _SWITCHES.items():
        add(f"--{name}", action="store_true", help=f"checked against --hf-checkpoint ({models})")
    add("--normalization", choices=["RMSNorm"], default="RMSNorm", help="every known model has it")


def refuse_sizes(args: argparse.Namespace, role: str = "actor") -> None:
    """Raise ValueError naming the first of the size flags that was given; for the FSDP backend, which does not look at them."""
    for flag in (*_SIZES, *_SWITCHES):
        value = getattr(args, flag.replace("-", "_"), None)
        of_its_own = role == "critic" and flag == "untie-embeddings-and-output-weights"  # the critic's head is
        if value not in (None, False) and not of_its_own:
            raise ValueError(
                f"--{flag}={value} is not available with --train-backend fsdp, only with megatron; remove it"
            )
