"""What must hold between flags, and the attributes derived from them.

`slime_validate_args` has the rules of the public interface. `validate_command_line`, which programs use, has them too and refuses in
addition what could not run or would have no effect: it needs the model's directory and reads all data files once. Both change `args`
in place and raise ValueError, FileNotFoundError or AssertionError with one clear sentence.
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
from slime.utils.arguments.parser import FlagError
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
    """Check `args` by the rules of the public interface and fill in what follows from other flags; touches no model and no data."""
    _prepare(args)
    _check_temperature(args)
    _check_backend(args)
    _check_release_train(args)
    _check_checkpoints(args)
    _resolve_load(args)
    _resolve_replay(args)
    resolve_debug_modes(args, strict=False)
    resolve_placement(args, strict=False)
    _resolve_lengths(args)
    _resolve_batches(args)
    resolve_algorithm(args, strict=False)
    _resolve_critic_placement(args)
    _resolve_eval(args)


def validate_command_line(args: Namespace) -> None:
    """As `slime_validate_args`, and refuse what this version cannot run. Afterwards all batch sizes are set."""
    _prepare(args)
    _check_temperature(args)
    _check_ranges(args)
    _check_backend(args)
    _check_supported(args)
    _check_model(args)
    _check_checkpoints(args)
    refuse_unavailable(args)
    resolve_debug_modes(args)
    check_profiler(args)
    resolve_placement(args)
    _check_response_length(args)
    _resolve_lengths(args)
    _check_batches(args)
    _resolve_batches(args)
    if args.balance_by_flops:
        set_model_shape(args)
    resolve_algorithm(args)
    _resolve_eval(args)
    _check_eval_data(args)
    _check_prompt_data(args)


def _prepare(args: Namespace) -> None:
    if getattr(args, "use_gpu", None) is None:
        args.use_gpu = torch.cuda.is_available()
    _apply_custom_config(args)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _apply_custom_config(args: Namespace) -> None:
    """Set every key of `--custom-config-path` on `args`; first of all, so that its values are checked as well."""
    if not getattr(args, "custom_config_path", None):
        return
    for key, value in _load_yaml_mapping(args.custom_config_path, "--custom-config-path").items():
        name = str(key).replace("-", "_")
        if not name.isidentifier():
            raise FlagError(f"--custom-config-path {args.custom_config_path}: key {key!r} cannot be an attribute")
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
        raise FlagError(f"{flag} {path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise FlagError(f"{flag} {path}: must hold a mapping from names to values")
    return data


def _like(current: Any, value: Any, where: str) -> Any:
    """A text for a number becomes that number: YAML reads `1e-5` as text."""
    if isinstance(value, str) and isinstance(current, (int, float)) and not isinstance(current, bool):
        try:
            return type(current)(value)
        except ValueError as error:
            raise FlagError(f"{where} {value!r}: must be a number") from error
    return value


def _check_temperature(args: Namespace) -> None:
    value = _number(args, "rollout_temperature")
    if value is not None and value <= 0:
        raise FlagError(f"--rollout-temperature {value}: must be greater than 0")


def _check_ranges(args: Namespace) -> None:
    for name, least in _MINIMA.items():
        value = _number(args, name)
        if value is not None and value < least:
            raise FlagError(f"{_flag(name)} {value}: must be at least {least}")
    if (dual := _number(args, "eps_clip_c")) is not None and dual <= 1:
        raise FlagError(f"--eps-clip-c {dual}: must be greater than 1")
    for name in ("rollout_top_p", "eval_top_p", "load_debug_rollout_data_subsample"):
        value = _number(args, name)
        if value is not None and not 0 < value <= 1:
            raise FlagError(f"{_flag(name)} {value}: must be greater than 0 and at most 1")


def _number(args: Namespace, name: str) -> float | None:
    """A numeric flag; the command line checks its type, but a value from `--custom-config-path` can be anything."""
    value = getattr(args, name, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise FlagError(f"{_flag(name)} {value!r}: must be a number")
    return value


def _check_backend(args: Namespace) -> None:
    if args.only_train_params_name_list and args.freeze_params_name_list:
        raise FlagError("--only-train-params-name-list and --freeze-params-name-list exclude each other: give one")
    if args.update_weight_transport == "disk" and not args.update_weight_disk_dir:
        raise FlagError("--update-weight-transport disk: needs --update-weight-disk-dir")
    if args.update_weight_mode == "delta":
        _check_delta(args)


def _check_release_train(args: Namespace) -> None:
    """Sets `save_interval`: released trainers come back from what they saved."""
    if not args.release_train:
        return
    if args.train_backend != "megatron" or args.advantage_estimator == "ppo" or args.keep_old_actor:
        raise FlagError("--release-train: needs --train-backend megatron, no critic and no --keep-old-actor")
    if args.update_weight_mode != "full" or args.update_weight_transport != "disk":
        raise FlagError("--release-train: needs --update-weight-mode full and --update-weight-transport disk")
    if not args.save:
        raise FlagError("--release-train: needs --save, from which the trainers come back")
    args.save_interval = args.save_interval or 1


def _check_supported(args: Namespace) -> None:
    """What the backend cannot do is known to the backend."""
    if args.log_probs_chunk_size <= 0:
        args.log_probs_chunk_size = 1024
    if args.debug_rollout_only:
        return
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
        raise FlagError(f"{flag}: needs --update-weight-transport disk")
    if args.colocate:
        raise FlagError(f"{flag}: not together with --colocate; weights need not pass through a disk there")
    if args.rollout_external_engine_addrs:
        raise FlagError(f"{flag}: not with --rollout-external-engine-addrs, whose hosts are not ours; use mode full")
    if not args.update_weight_local_checkpoint_dir:
        raise FlagError(f"{flag}: needs --update-weight-local-checkpoint-dir, a directory on the host of each engine")
    if args.update_weight_delta_checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        raise FlagError("--update-weight-delta-checksum blake3: pip install blake3, or use xxh3-128")


def _check_model(args: Namespace) -> None:
    if not args.hf_checkpoint:
        raise FlagError("--hf-checkpoint: needed, the directory of the model to train and serve")
    _check_model_dir("--hf-checkpoint", args.hf_checkpoint)
    if (args.kl_coef != 0 or args.use_kl_loss) and args.ref_load:
        _check_reference_dir(args)


def _check_checkpoints(args: Namespace) -> None:
    if args.kl_coef != 0 or args.use_kl_loss:
        if not args.ref_load:
            raise FileNotFoundError(
                f"--ref-load: needed for the KL; the starting model would be --ref-load {args.hf_checkpoint}"
            )
        if not Path(args.ref_load).exists():
            raise FileNotFoundError(f"--ref-load {args.ref_load}: no such directory")
    if args.save_interval is not None and not (args.save or args.save_hf):
        raise FlagError(f"--save-interval {args.save_interval}: needs --save, the directory to save to")
    if args.save_interval is None and (args.save or args.save_hf):
        logger.warning("--save %s: no checkpoint will be written without --save-interval", args.save or args.save_hf)


def _resolve_load(args: Namespace) -> None:
    """Without a checkpoint in `--load` training starts anew, from `--ref-load` unless `--load` is a Hugging Face directory.

    Left to the back ends by `validate_command_line`: they know which checkpoints they can read.
    """
    if args.load and (Path(args.load) / "latest_checkpointed_iteration.txt").is_file():
        return
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if not (args.load and (Path(args.load) / "config.json").is_file()):
        args.load = args.ref_load
        if args.ref_ckpt_step is not None:
            args.ckpt_step = args.ref_ckpt_step
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def _resolve_replay(args: Namespace) -> None:
    if args.enable_mtp_training and not args.mtp_num_layers:
        raise FlagError("--enable-mtp-training: needs --mtp-num-layers")
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True


def _resolve_critic_placement(args: Namespace) -> None:
    """Sets the critic's ranks, which are the actor's; the two take turns on them. What is offloaded needs no second copy."""
    if args.use_critic:
        args.critic_num_nodes, args.critic_num_gpus_per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
        args.offload_train = True
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = args.disable_param_buffers_cpu_backup = True


def _check_reference_dir(args: Namespace) -> None:
    if args.train_backend == "megatron" and (Path(args.ref_load) / "latest_checkpointed_iteration.txt").is_file():
        return
    _check_model_dir("--ref-load", args.ref_load)


def _check_model_dir(flag: str, path: str) -> None:
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{flag} {path}: no such directory")
    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(f"{flag} {path}: holds no config.json, so it is no Hugging Face model directory")


def _check_response_length(args: Namespace) -> None:
    generates = not args.debug_train_only and args.rollout_function_path == _DEFAULT_ROLLOUT
    if generates and args.rollout_max_response_len is None:
        raise FlagError("--rollout-max-response-len: needed, the most tokens to generate for a prompt")


def _resolve_lengths(args: Namespace) -> None:
    context = args.rollout_max_context_len
    if args.eval_max_context_len is None:
        args.eval_max_context_len = context
    if context is None:
        return
    if args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = context - 1
    if args.rollout_max_prompt_len > context - 1:
        raise FlagError(
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len}: must be at most "
            f"--rollout-max-context-len - 1 = {context - 1}"
        )


def _check_batches(args: Namespace) -> None:
    """Sets `global_batch_size`: without a flag a rollout is one optimiser step."""
    num_rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.num_steps_per_rollout or 1
    if num_rollouts % steps:
        raise FlagError(
            f"--num-steps-per-rollout {steps}: must divide --rollout-batch-size x --n-samples-per-prompt = {num_rollouts}"
        )
    if args.global_batch_size is None:
        args.global_batch_size = num_rollouts // steps
    if args.log_probs_max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        raise FlagError("--log-probs-max-tokens-per-gpu: needs --use-dynamic-batch-size and --max-tokens-per-gpu")
    if args.num_rollout is None and args.num_epoch is not None and not args.prompt_data:
        raise FlagError(f"--num-epoch {args.num_epoch}: needs the data set of --prompt-data; or give --num-rollout")


def _resolve_batches(args: Namespace) -> None:
    _resolve_global_batch(args)
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise FlagError(
            f"--over-sampling-batch-size {args.over_sampling_batch_size}: must be at least "
            f"--rollout-batch-size {args.rollout_batch_size}"
        )
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        raise FlagError("--use-dynamic-batch-size: needs --max-tokens-per-gpu")
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.balance_by_flops:
        if not args.use_dynamic_batch_size:
            raise FlagError("--balance-by-flops: needs --use-dynamic-batch-size and --max-tokens-per-gpu")
        args.balance_data = True
    _check_run_length(args)


def _resolve_global_batch(args: Namespace) -> None:
    num_rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        steps = args.num_steps_per_rollout
        derived = num_rollouts // steps
        if args.global_batch_size not in (None, derived):
            raise FlagError(
                f"--global-batch-size {args.global_batch_size}: --num-steps-per-rollout {steps} makes it {derived}; give one"
            )
        args.global_batch_size = derived
    given = args.global_batch_size
    if given is not None and given > num_rollouts and args.rollout_function_path == _DEFAULT_ROLLOUT:
        raise FlagError(
            f"--global-batch-size {given}: a rollout has only --rollout-batch-size x "
            f"--n-samples-per-prompt = {num_rollouts}"
        )


def _check_run_length(args: Namespace) -> None:
    if args.num_rollout is not None:
        return
    if args.num_epoch is None:
        raise FlagError("--num-rollout: needed (or --num-epoch)")
    if not args.rollout_global_dataset:
        raise FlagError(f"--num-epoch {args.num_epoch}: needs the data set of --prompt-data; or give --num-rollout")


def _resolve_eval(args: Namespace) -> None:
    if args.eval_config:
        raw, defaults = _read_eval_config(args.eval_config)
    else:
        raw, defaults = _pair_up(args.eval_prompt_data), {}
    args.eval_datasets = build_eval_dataset_configs(args, raw, defaults)
    flat = [text for dataset in args.eval_datasets for text in (dataset.name, dataset.path)]
    args.eval_prompt_data = flat or None
    if args.eval_interval is not None and not args.eval_datasets:
        raise FlagError(f"--eval-interval {args.eval_interval}: needs --eval-prompt-data or --eval-config")
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path


def _check_eval_data(args: Namespace) -> None:
    if args.eval_function_path != _DEFAULT_ROLLOUT:
        return
    if args.eval_datasets and args.group_rm:
        raise FlagError("--group-rm: not available for evaluation; use --eval-function-path or leave evaluation out")
    for dataset in args.eval_datasets:
        input_key, label_key = dataset.input_key or args.input_key, dataset.label_key or args.label_key
        _check_records(f"eval dataset '{dataset.name}'", dataset.path, input_key, label_key)


def _read_eval_config(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    config = _load_yaml_mapping(path, "--eval-config").get("eval")
    if not isinstance(config, dict):
        raise FlagError(f"--eval-config {path}: needs a mapping 'eval' with 'datasets'")
    unknown = sorted(set(config) - {"defaults", "datasets"})
    if unknown:
        raise FlagError(f"--eval-config {path}: unknown key 'eval.{unknown[0]}'; known: defaults, datasets")
    datasets = ensure_dataset_list(config.get("datasets"))
    if not datasets:
        raise FlagError(f"--eval-config {path}: eval.datasets is empty")
    return datasets, config.get("defaults") or {}


def _pair_up(values: list[str] | None) -> list[dict[str, Any]]:
    values = values or []
    if len(values) == 1:
        values = [_SINGLE_EVAL_DATASET_NAME, *values]
    if len(values) % 2:
        raise FlagError(f"--eval-prompt-data {' '.join(values)}: give pairs NAME FILE, {len(values)} values are odd")
    return [{"name": name, "path": path} for name, path in zip(values[::2], values[1::2], strict=True)]


def _check_prompt_data(args: Namespace) -> None:
    """Read the prompts once now: the data source does it too, but in another process and after a long start."""
    if args.multimodal_keys:
        raise FlagError("--multimodal-keys: not available in this version, which loads text prompts only")
    if args.rollout_global_dataset and args.prompt_data and args.data_source_path.startswith(_OWN_DATA_SOURCES):
        _check_records("--prompt-data", args.prompt_data, args.input_key, args.label_key)


def _check_records(what: str, path: str, key: str, label_key: str | None) -> None:
    try:
        count = check_prompt_file(path, key, label_key)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what}: {error}") from error
    except ValueError as error:
        raise FlagError(f"{what}: {error}") from error
    logger.info("%s %s: %d prompts", what, path, count)
