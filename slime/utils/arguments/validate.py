"""What must hold between flags, and the attributes derived from them.

`slime_validate_args` changes `args` in place and raises ValueError or FileNotFoundError with one clear sentence.
After it, `args.use_gpu`, `args.eval_datasets` and all batch sizes are set.
Leaves out: flags of the engines (`slime/backends/sglang_utils/arguments.py`) and of the algorithm (`validate_algo`).
"""

from __future__ import annotations

import importlib.util
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import yaml

from slime.utils.arguments.model_shape import set_model_shape
from slime.utils.arguments.unavailable import refuse_unavailable
from slime.utils.arguments.validate_algo import resolve_algorithm
from slime.utils.arguments.validate_cluster import check_profiler, resolve_debug_modes, resolve_placement
from slime.utils.data import check_prompt_file
from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list

logger = logging.getLogger(__name__)

_DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
_OWN_DATA_SOURCES = "slime.rollout.data_source."
_SINGLE_EVAL_DATASET_NAME = "aime"

# Attribute -> least value; None (unset) is always allowed.
_MINIMA: dict[str, int] = {
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 1,
    "global_batch_size": 1,
    "num_steps_per_rollout": 1,
    "micro_batch_size": 1,
    "max_tokens_per_gpu": 1,
    "log_probs_max_tokens_per_gpu": 1,
    "over_sampling_batch_size": 1,
    "rollout_max_response_len": 1,
    "rollout_max_prompt_len": 1,
    "rollout_max_context_len": 2,
    "n_samples_per_eval_prompt": 1,
    "eval_max_response_len": 1,
    "eval_max_prompt_len": 1,
    "eval_max_context_len": 2,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 0,
    "rollout_num_gpus_per_engine": 1,
    "num_gpus_per_node": 1,
    "rollout_max_staleness": 0,
    "update_weights_interval": 1,
    "rollout_health_check_interval": 0,
    "rollout_health_check_timeout": 0,
    "rollout_health_check_first_wait": 0,
    "num_rollout": 0,
    "num_epoch": 1,
    "start_rollout_id": 0,
    "save_interval": 1,
    "eval_interval": 1,
    "ref_update_interval": 1,
    "memory_snapshot_num_steps": 1,
    "distributed_timeout_minutes": 1,
    "update_weight_buffer_size": 1,
    "lora_rank": 1,
    "lr": 0,
    "min_lr": 0,
    "eps_clip": 0,
    "eps_clip_high": 0,
}


def slime_validate_args(args: Namespace) -> None:
    """Check `args`, fill in what follows from other flags, and read all data files once."""
    if getattr(args, "use_gpu", None) is None:
        args.use_gpu = torch.cuda.is_available()
    _apply_custom_config(args)
    _check_ranges(args)
    _check_backend(args)
    _check_checkpoints(args)
    refuse_unavailable(args)
    resolve_debug_modes(args)
    check_profiler(args)
    resolve_placement(args)
    _resolve_lengths(args)
    _resolve_batches(args)
    resolve_algorithm(args)
    _resolve_eval(args)
    _check_prompt_data(args)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _apply_custom_config(args: Namespace) -> None:
    """Set every key of `--custom-config-path` on `args`; first of all, so that its values are checked as well."""
    if not args.custom_config_path:
        return
    for key, value in _load_yaml_mapping(args.custom_config_path, "--custom-config-path").items():
        name = str(key).replace("-", "_")
        if not name.isidentifier():
            raise ValueError(f"--custom-config-path {args.custom_config_path}: key {key!r} cannot be an attribute")
        if hasattr(args, name):
            value = _like(getattr(args, name), value, f"{args.custom_config_path}: {key}")
            logger.info("%s sets %s: %r -> %r", args.custom_config_path, name, getattr(args, name), value)
        setattr(args, name, value)


def _load_yaml_mapping(path: str, flag: str) -> dict[Any, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{flag} {path}: no such file")
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} {path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{flag} {path}: must hold a mapping from names to values")
    return data


def _like(current: Any, value: Any, where: str) -> Any:
    """A text for a number becomes that number: YAML reads `1e-5` as text."""
    if isinstance(value, str) and isinstance(current, (int, float)) and not isinstance(current, bool):
        try:
            return type(current)(value)
        except ValueError as error:
            raise ValueError(f"{where} {value!r}: must be a number") from error
    return value


def _check_ranges(args: Namespace) -> None:
    for name, least in _MINIMA.items():
        value = _number(args, name)
        if value is not None and value < least:
            raise ValueError(f"{_flag(name)} {value}: must be at least {least}")
    for name, bound in (("rollout_temperature", 0), ("eps_clip_c", 1)):
        value = _number(args, name)
        if value is not None and value <= bound:
            raise ValueError(f"{_flag(name)} {value}: must be greater than {bound}")
    for name in ("rollout_top_p", "eval_top_p", "load_debug_rollout_data_subsample"):
        value = _number(args, name)
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{_flag(name)} {value}: must be greater than 0 and at most 1")


def _number(args: Namespace, name: str) -> float | None:
    """A numeric flag; the command line checks its type, but a value from `--custom-config-path` can be anything."""
    value = getattr(args, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"{_flag(name)} {value!r}: must be a number")
    return value


def _check_backend(args: Namespace) -> None:
    if args.only_train_params_name_list and args.freeze_params_name_list:
        raise ValueError("--only-train-params-name-list and --freeze-params-name-list exclude each other: give one")
    if args.update_weight_transport == "disk" and not args.update_weight_disk_dir:
        raise ValueError("--update-weight-transport disk: needs --update-weight-disk-dir")
    if args.update_weight_mode == "delta":
        _check_delta(args)
    if args.log_probs_chunk_size <= 0:
        args.log_probs_chunk_size = 1024
    if not args.debug_rollout_only:
        _check_supported(args)


def _check_supported(args: Namespace) -> None:
    """What the backend cannot do is known to the backend."""
    if args.train_backend == "megatron":
        from slime.backends.megatron_utils import capabilities as megatron

        megatron.check_supported(args)
        _check_model_dir("--hf-checkpoint", args.hf_checkpoint or "")
        megatron.check_model(args)
        return
    from slime.backends.fsdp_utils.capabilities import check_supported

    check_supported(args)


def _check_delta(args: Namespace) -> None:
    flag = "--update-weight-mode delta"
    if args.update_weight_transport != "disk":
        raise ValueError(f"{flag}: needs --update-weight-transport disk")
    if args.colocate:
        raise ValueError(f"{flag}: not together with --colocate; weights need not pass through a disk there")
    if args.rollout_external_engine_addrs:
        raise ValueError(f"{flag}: not with --rollout-external-engine-addrs, whose hosts are not ours; use mode full")
    if not args.update_weight_local_checkpoint_dir:
        raise ValueError(f"{flag}: needs --update-weight-local-checkpoint-dir, a directory on the host of each engine")
    if args.update_weight_delta_checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        raise ValueError("--update-weight-delta-checksum blake3: pip install blake3, or use xxh3-128")


def _check_checkpoints(args: Namespace) -> None:
    if not args.hf_checkpoint:
        raise ValueError("--hf-checkpoint: needed, the directory of the model to train and serve")
    _check_model_dir("--hf-checkpoint", args.hf_checkpoint)
    if args.kl_coef != 0 or args.use_kl_loss:
        if not args.ref_load:
            raise FileNotFoundError(
                f"--ref-load: needed for the KL; the starting model would be --ref-load {args.hf_checkpoint}"
            )
        _check_reference_dir(args)
    if args.save_interval is not None and not (args.save or args.save_hf):
        raise ValueError(f"--save-interval {args.save_interval}: needs --save, the directory to save to")
    if args.save_interval is None and (args.save or args.save_hf):
        logger.warning("--save %s: no checkpoint will be written without --save-interval", args.save or args.save_hf)


def _check_reference_dir(args: Namespace) -> None:
    if args.train_backend == "megatron" and (Path(args.ref_load) / "latest_checkpointed_iteration.txt").is_file():
        return
    _check_model_dir("--ref-load", args.ref_load)


def _check_model_dir(flag: str, path: str) -> None:
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{flag} {path}: no such directory")
    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"{flag} {path}: holds no config.json, so it is no Hugging Face model directory")


def _resolve_lengths(args: Namespace) -> None:
    generates = not args.debug_train_only and args.rollout_function_path == _DEFAULT_ROLLOUT
    if generates and args.rollout_max_response_len is None:
        raise ValueError("--rollout-max-response-len: needed, the most tokens to generate for a prompt")
    context = args.rollout_max_context_len
    if args.eval_max_context_len is None:
        args.eval_max_context_len = context
    if context is None:
        return
    if args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = context - 1
    if args.rollout_max_prompt_len > context - 1:
        raise ValueError(
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len}: must be at most "
            f"--rollout-max-context-len - 1 = {context - 1}"
        )


def _resolve_batches(args: Namespace) -> None:
    num_rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.num_steps_per_rollout or 1
    if num_rollouts % steps:
        raise ValueError(
            f"--num-steps-per-rollout {steps}: must divide --rollout-batch-size x --n-samples-per-prompt = {num_rollouts}"
        )
    derived = num_rollouts // steps
    if args.global_batch_size is None:
        args.global_batch_size = derived
    elif args.num_steps_per_rollout is not None and args.global_batch_size != derived:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: --num-steps-per-rollout {steps} makes it {derived}; give one"
        )
    if args.global_batch_size > num_rollouts and args.rollout_function_path == _DEFAULT_ROLLOUT:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: a rollout has only --rollout-batch-size x "
            f"--n-samples-per-prompt = {num_rollouts}"
        )
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError(
            f"--over-sampling-batch-size {args.over_sampling_batch_size}: must be at least "
            f"--rollout-batch-size {args.rollout_batch_size}"
        )
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        raise ValueError("--use-dynamic-batch-size: needs --max-tokens-per-gpu")
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    elif not args.use_dynamic_batch_size:
        raise ValueError("--log-probs-max-tokens-per-gpu: needs --use-dynamic-batch-size and --max-tokens-per-gpu")
    if args.balance_by_flops:
        if not args.use_dynamic_batch_size:
            raise ValueError("--balance-by-flops: needs --use-dynamic-batch-size and --max-tokens-per-gpu")
        args.balance_data = True
        set_model_shape(args)
    _check_run_length(args)


def _check_run_length(args: Namespace) -> None:
    if args.num_rollout is not None:
        return
    if args.num_epoch is None:
        raise ValueError("--num-rollout: needed (or --num-epoch)")
    if not (args.rollout_global_dataset and args.prompt_data):
        raise ValueError(f"--num-epoch {args.num_epoch}: needs the data set of --prompt-data; or give --num-rollout")


def _resolve_eval(args: Namespace) -> None:
    if args.eval_config:
        raw, defaults = _read_eval_config(args.eval_config)
    else:
        raw, defaults = _pair_up(args.eval_prompt_data), {}
    args.eval_datasets = build_eval_dataset_configs(args, raw, defaults)
    flat = [text for dataset in args.eval_datasets for text in (dataset.name, dataset.path)]
    args.eval_prompt_data = flat or None
    if args.eval_interval is not None and not args.eval_datasets:
        raise ValueError(f"--eval-interval {args.eval_interval}: needs --eval-prompt-data or --eval-config")
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_function_path != _DEFAULT_ROLLOUT:
        return
    if args.eval_datasets and args.group_rm:
        raise ValueError("--group-rm: not available for evaluation; use --eval-function-path or leave evaluation out")
    for dataset in args.eval_datasets:
        input_key, label_key = dataset.input_key or args.input_key, dataset.label_key or args.label_key
        _check_records(f"eval dataset '{dataset.name}'", dataset.path, input_key, label_key)


def _read_eval_config(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    config = _load_yaml_mapping(path, "--eval-config").get("eval")
    if not isinstance(config, dict):
        raise ValueError(f"--eval-config {path}: needs a mapping 'eval' with 'datasets'")
    unknown = sorted(set(config) - {"defaults", "datasets"})
    if unknown:
        raise ValueError(f"--eval-config {path}: unknown key 'eval.{unknown[0]}'; known: defaults, datasets")
    datasets = ensure_dataset_list(config.get("datasets"))
    if not datasets:
        raise ValueError(f"--eval-config {path}: eval.datasets is empty")
    return datasets, config.get("defaults") or {}


def _pair_up(values: list[str] | None) -> list[dict[str, Any]]:
    values = values or []
    if len(values) == 1:
        values = [_SINGLE_EVAL_DATASET_NAME, *values]
    if len(values) % 2:
        raise ValueError(f"--eval-prompt-data {' '.join(values)}: give pairs NAME FILE, {len(values)} values are odd")
    return [{"name": name, "path": path} for name, path in zip(values[::2], values[1::2], strict=True)]


def _check_prompt_data(args: Namespace) -> None:
    """Read the prompts once now: the data source does it too, but in another process and after a long start."""
    if args.multimodal_keys:
        raise ValueError("--multimodal-keys: not available in this version, which loads text prompts only")
    if args.rollout_global_dataset and args.prompt_data and args.data_source_path.startswith(_OWN_DATA_SOURCES):
        _check_records("--prompt-data", args.prompt_data, args.input_key, args.label_key)


def _check_records(what: str, path: str, key: str, label_key: str | None) -> None:
    try:
        count = check_prompt_file(path, key, label_key)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    logger.info("%s %s: %d prompts", what, path, count)
