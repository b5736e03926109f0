"""Debug modes, dumps, and how many processes train and generate: what must hold between these flags.

The functions change `args` in place and raise ValueError, or AssertionError for two debug modes at once. With `strict` they also
refuse what could not run or would have no effect.
"""

from __future__ import annotations

import importlib.util
import logging
from argparse import Namespace

from slime.utils.arguments.parser import FlagError

logger = logging.getLogger(__name__)

_FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_MAX_RANKS_PER_NODE = 8


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def resolve_debug_modes(args: Namespace, strict: bool = True) -> None:
    """Which half of the system runs, and where dumps go."""
    if args.dump_details:
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"
    if args.load_debug_rollout_data:
        args.debug_train_only = True
    assert not (
        args.debug_rollout_only and args.debug_train_only
    ), "--debug-rollout-only and --debug-train-only (implied by --load-debug-rollout-data) exclude each other"
    if strict:
        _check_dumps(args)
    if args.save_debug_train_data and args.save_debug_train_data == args.save_debug_rollout_data:
        raise FlagError(
            f"--save-debug-train-data {args.save_debug_train_data}: same path as --save-debug-rollout-data"
        )


def _check_dumps(args: Namespace) -> None:
    if args.load_debug_rollout_data_subsample is not None and not args.load_debug_rollout_data:
        raise FlagError("--load-debug-rollout-data-subsample: needs --load-debug-rollout-data")
    for name in ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data"):
        template = getattr(args, name)
        if template and "{rollout_id}" not in template:
            raise FlagError(f"{_flag(name)} {template}: must contain {{rollout_id}}, one path per rollout")


def check_profiler(args: Namespace) -> None:
    """Flags of the profiler have an effect, and the recorder works here."""
    if not args.use_pytorch_profiler and args.profile_target != ["train_overall"]:
        raise FlagError(f"--profile-target {' '.join(args.profile_target)}: needs --use-pytorch-profiler")
    if "train_overall" in args.profile_target and len(args.profile_target) > 1:
        raise FlagError(
            "--profile-target train_overall: covers the others, and profiles cannot overlap; give it alone"
        )
    if args.use_pytorch_profiler and not 0 <= args.profile_step_start < args.profile_step_end:
        raise FlagError(
            f"--profile-step-start {args.profile_step_start}: must be at least 0 and less than "
            f"--profile-step-end {args.profile_step_end}"
        )
    if not args.record_memory_history:
        if args.memory_snapshot_num_steps is not None:
            raise FlagError("--memory-snapshot-num-steps: needs --record-memory-history")
        return
    if args.memory_snapshot_num_steps is None:
        raise FlagError("--record-memory-history: needs --memory-snapshot-num-steps, when to write it")
    if args.memory_recorder == "torch" and not args.use_gpu:
        raise FlagError(
            "--memory-recorder torch: records GPU memory and there is no GPU; use --memory-recorder memray"
        )
    if args.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise FlagError("--memory-recorder memray: needs the package memray (pip install memray)")


def resolve_placement(args: Namespace, strict: bool = True) -> None:
    """Number of engines and ranks, and who leaves the GPU while the other works."""
    args.rollout_external = args.rollout_external_engine_addrs is not None
    if vars(args).pop("offload", False):
        args.offload_train = args.offload_rollout = True
    if args.rollout_external:
        _ask_external_engines(args)
    _resolve_engine_count(args)
    if strict:
        _check_engine_count(args)
    if args.debug_rollout_only:
        _resolve_rollout_only(args)
    if args.debug_rollout_only or (strict and args.debug_train_only):
        args.colocate = args.offload_rollout = args.offload_train = False
    _resolve_offload(args, strict)
    if strict:
        _check_weight_comparison(args)
        _check_asynchronous(args)


def _resolve_offload(args: Namespace, strict: bool) -> None:
    if args.colocate and args.release_train:
        args.offload_train, args.offload_rollout = False, True
    if args.offload_rollout is None:
        # Without a GPU both sides live in the same memory and there is nothing to release.
        args.offload_rollout = args.colocate and (args.use_gpu or not strict)
    if args.offload_train is None and not strict:
        args.offload_train = args.colocate
    args.offload_train = bool(args.offload_train)


def _check_weight_comparison(args: Namespace) -> None:
    if args.check_weight_update_equal and not args.use_gpu:
        raise FlagError(
            "--check-weight-update-equal: the engine compares weights on a GPU only; leave it out on a CPU"
        )


def _ask_external_engines(args: Namespace) -> None:
    for name in ("colocate", "use_fault_tolerance", "sglang_config", "prefill_num_servers"):
        if getattr(args, name, None):
            raise FlagError(f"--rollout-external-engine-addrs: cannot be used with {_flag(name)}")
    if args.debug_train_only:
        return
    # Engines are asked through their backend; see the note on upward imports in the package.
    from slime.backends.sglang_utils.external import apply_external_engine_info_to_args

    apply_external_engine_info_to_args(args)


def _resolve_engine_count(args: Namespace) -> None:
    if args.debug_train_only:
        args.rollout_num_gpus = args.rollout_num_gpus or 0
    elif args.rollout_num_gpus is None and args.colocate:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node


def _check_engine_count(args: Namespace) -> None:
    if args.rollout_num_gpus is None:
        raise FlagError("--rollout-num-gpus: needed (GPUs for engines, or engines on CPU) unless --colocate is set")
    if not args.rollout_external and args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        raise FlagError(
            f"--rollout-num-gpus {args.rollout_num_gpus}: must be a multiple of "
            f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine}"
        )


def _resolve_rollout_only(args: Namespace) -> None:
    """The engines get all GPUs."""
    if args.rollout_external:
        return
    if args.rollout_num_gpus == 0:
        args.actor_num_nodes = args.actor_num_gpus_per_node = 0
        return
    args.actor_num_gpus_per_node = min(_MAX_RANKS_PER_NODE, args.rollout_num_gpus)
    args.actor_num_nodes = args.rollout_num_gpus // args.actor_num_gpus_per_node


def _check_asynchronous(args: Namespace) -> None:
    if args.rollout_max_staleness is not None and args.rollout_function_path != _FULLY_ASYNC:
        raise FlagError(
            f"--rollout-max-staleness {args.rollout_max_staleness}: needs --rollout-function-path {_FULLY_ASYNC}"
        )
    evaluates = args.eval_prompt_data or args.eval_config
    if args.rollout_function_path == _FULLY_ASYNC and evaluates and args.eval_function_path in (None, _FULLY_ASYNC):
        raise FlagError(
            f"--rollout-function-path {_FULLY_ASYNC}: it cannot evaluate; add --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout"
        )
    if args.load_forge_rollout_data and "forge_load" not in args.rollout_function_path:
        raise FlagError(
            "--load-forge-rollout-data: needs --rollout-function-path slime.rollout.forge_load.generate_rollout"
        )
