"""Settings that belong to a hook, checked together with the flags.

A module named by `--custom-generate-function-path` (or by the same key of an evaluation set) may define
`validate_args(args)`, which raises ValueError or FileNotFoundError with one clear sentence. It runs after all flags were
checked and before anything is started, so it must be quick and must not need an engine; a hook without it is not checked.
Left out: a hook that is not found here. Ray's workers search the working directory as well, so whether it is missing is
decided by the rollout manager (`ROLLOUT_HOOKS`), also before any server starts.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

from slime.utils.misc import load_function

# Attributes with the path of a function that the rollout manager will call.
ROLLOUT_HOOKS = (
    "custom_generate_function_path",
    "custom_rm_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)


def validate_hooks(args: Namespace) -> None:
    """Call `validate_args(args)` of every generate hook's module that has one; nothing is generated without engines.

    Raises ValueError or FileNotFoundError, as the hook does, and ValueError when its module fails to import.
    """
    if args.debug_train_only:
        return
    paths = [args.custom_generate_function_path, *(d.custom_generate_function_path for d in args.eval_datasets)]
    for module in dict.fromkeys(_module_of(path) for path in paths if path):
        check: Any = getattr(module, "validate_args", None)
        if check is not None:
            check(args)


def _module_of(path: str) -> ModuleType | None:
    try:
        return sys.modules[load_function(path).__module__]
    except ImportError as error:
        raise ValueError(f"cannot import the module of {path}: {error}") from error
    except ValueError:
        return None
