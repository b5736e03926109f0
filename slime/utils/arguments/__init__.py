"""The command line: one module per flag group, `validate` for what must hold between flags.

`parse_args()` is the entry point of every program. Configuration errors (ValueError, FileNotFoundError, AssertionError) end the
process with one line `error: ...` on stderr and exit code 2, before any model loads or server starts.
Every registered flag is read somewhere; a flag that the chosen backend cannot honour is refused, naming the backend that can.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from slime.utils.arguments.algo import add_algo_arguments
from slime.utils.arguments.cluster import add_cluster_arguments
from slime.utils.arguments.data import add_data_arguments
from slime.utils.arguments.debug import add_debug_arguments
from slime.utils.arguments.eval import add_eval_arguments
from slime.utils.arguments.fault_tolerance import add_fault_tolerance_arguments
from slime.utils.arguments.fsdp import add_fsdp_arguments
from slime.utils.arguments.hooks import validate_hooks
from slime.utils.arguments.logging import add_logging_arguments
from slime.utils.arguments.megatron import add_megatron_arguments
from slime.utils.arguments.offpolicy import add_distillation_arguments, add_offpolicy_arguments
from slime.utils.arguments.parser import SlimeArgumentParser, reset_arg
from slime.utils.arguments.reward import add_reward_arguments
from slime.utils.arguments.roles import parse_megatron_role_args
from slime.utils.arguments.rollout import add_rollout_arguments
from slime.utils.arguments.rollout_buffer import add_buffer_arguments
from slime.utils.arguments.train import add_train_arguments
from slime.utils.arguments.unavailable import add_unavailable_arguments
from slime.utils.arguments.validate import slime_validate_args, validate_command_line

__all__ = [
    "get_slime_extra_args_provider",
    "parse_args",
    "parse_megatron_role_args",
    "reset_arg",
    "slime_validate_args",
]

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

FLAG_GROUPS = (
    add_cluster_arguments,
    add_fault_tolerance_arguments,
    add_train_arguments,
    add_rollout_arguments,
    add_data_arguments,
    add_eval_arguments,
    add_algo_arguments,
    add_offpolicy_arguments,
    add_distillation_arguments,
    add_fsdp_arguments,
    add_megatron_arguments,
    add_reward_arguments,
    add_buffer_arguments,
    add_logging_arguments,
    add_debug_arguments,
    add_unavailable_arguments,
)


def get_slime_extra_args_provider(add_custom_arguments: ArgumentsProvider | None = None) -> ArgumentsProvider:
    """A function that registers custom arguments first and all of slime's own after them, and returns the parser."""

    def add_slime_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        for add_group in FLAG_GROUPS:
            add_group(parser)
        return parser

    return add_slime_arguments


def parse_args(
    add_custom_arguments: ArgumentsProvider | None = None,
    argv: Sequence[str] | None = None,
    use_gpu: bool | None = None,
) -> Namespace:
    """Parse and validate the command line (or `argv`). Prints one line and exits with 2 when it cannot be used.

    `use_gpu`: read it for a machine with or without GPUs (default: this one).
    """
    # The engine's flags belong to its backend; importing it here keeps this package importable without one.
    from slime.backends.sglang_utils.arguments import add_sglang_arguments, needs_all_flags, validate_sglang_args

    parser = SlimeArgumentParser(description="Reinforcement-learning post-training")
    get_slime_extra_args_provider(add_custom_arguments)(parser)
    add_sglang_arguments(parser, all_flags=needs_all_flags(sys.argv[1:] if argv is None else argv))
    args = parser.parse_strictly(argv)
    args.use_gpu = use_gpu
    try:
        validate_command_line(args)
        validate_sglang_args(args)
        validate_hooks(args)
    except (ValueError, FileNotFoundError, AssertionError) as error:
        parser.error(str(error))
    return args
