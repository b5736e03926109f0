"""Evaluation data sets: one resolved `EvalDatasetConfig` per set.

A field takes the first value that is set of: the data set's own entry, `defaults` of the config file, the
`--eval-*` flag, the `--rollout-*` (or data) flag. Unknown keys are errors with the nearest known name.
Leaves out: running the evaluation (`slime/rollout/sglang_rollout.py`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class EvalDatasetConfig:
    """How one data set is read, sampled and scored. None leaves the choice to the engine."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    # Of the public interface, for services that are not part of this version: refused when set.
    app_service: str | None = None
    eval_task_timeout: int | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    remote_environment: dict[str, Any] | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Everything that decides which samples the loaded data set holds."""
        kwargs = json.dumps(self.apply_chat_template_kwargs, sort_keys=True)
        keys = (self.input_key, self.label_key, self.tool_key, self.metadata_key)
        return (self.name, self.path, *keys, self.apply_chat_template, kwargs)

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """A copy of the sample's metadata with the overrides and `rm_type` of this data set put in."""
        metadata = {**(sample_metadata or {}), **self.metadata_overrides}
        if self.rm_type is not None:
            metadata["rm_type"] = self.rm_type
        return metadata


_UNAVAILABLE = (
    "app_service",
    "eval_task_timeout",
    "min_eval_samples",
    "eval_early_stop_remaining",
    "eval_early_stop_idle_timeout",
    "message_processor",
    "reward_model",
    "remote_environment",
)
_NAMES = tuple(f.name for f in fields(EvalDatasetConfig))
_DEFAULT_NAMES = tuple(name for name in _NAMES if name not in ("name", "path"))

# Field -> attributes of the parsed flags, in order of precedence.
_ARGS_SOURCES: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}


def pick_from_args(args: Any, attrs: tuple[str, ...]) -> Any:
    """The first of the attributes that exists on `args` and is not None, else None."""
    return next((value for name in attrs if (value := getattr(args, name, None)) is not None), None)


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Bring the `datasets` part of a config file (list of entries, or mapping name -> entry) into list form.

    Raises ValueError for any other shape.
    """
    if config is None:
        return []
    if isinstance(config, Mapping):
        entries = [{"name": str(name), **_mapping(entry, f"dataset '{name}'")} for name, entry in config.items()]
    elif isinstance(config, Sequence) and not isinstance(config, str):  # also OmegaConf's lists
        entries = [dict(_mapping(entry, f"dataset number {i}")) for i, entry in enumerate(config)]
    else:
        raise ValueError(f"eval datasets must be a list or a mapping from name to entry, got {type(config).__name__}")
    return entries


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[dict[str, Any]], defaults: dict[str, Any]
) -> list[EvalDatasetConfig]:
    """Resolve raw data set entries against `defaults` and the flags. Raises ValueError for bad or double entries."""
    defaults = defaults or {}
    _check_keys(defaults, _DEFAULT_NAMES, "eval.defaults")
    configs: list[EvalDatasetConfig] = []
    for entry in raw_config:
        where = f"eval dataset '{entry.get('name', '?')}'"
        _check_keys(entry, _NAMES, where)
        missing = [key for key in ("name", "path") if not entry.get(key)]
        if missing:
            raise ValueError(f"{where}: '{missing[0]}' is missing")
        if entry["name"] in {config.name for config in configs}:
            raise ValueError(f"{where}: the name is used twice; metrics would overwrite each other")
        configs.append(_resolve(args, entry, defaults, where))
    return configs


def _resolve(args: Any, entry: dict[str, Any], defaults: dict[str, Any], where: str) -> EvalDatasetConfig:
    values = {name: pick_from_args(args, attrs) for name, attrs in _ARGS_SOURCES.items()}
    for layer in (defaults, entry):
        values.update({key: value for key, value in layer.items() if value is not None})
    config = EvalDatasetConfig(**values)
    if config.multimodal_keys:
        raise ValueError(f"{where}: multimodal_keys: not available in this version, which loads text prompts only")
    given = [name for name in _UNAVAILABLE if getattr(config, name) is not None]
    if given:
        raise ValueError(f"{where}: {given[0]}: not available in this version; leave it out")
    if config.temperature is not None and config.temperature < 0:
        raise ValueError(f"{where}: temperature {config.temperature}: must not be negative")
    for name in ("n_samples_per_eval_prompt", "max_response_len"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{where}: {name} {value}: must be at least 1")
    return config


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, got {value!r:.80}")
    return value


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
            raise ValueError(f"{where}: unknown key '{key}'; {hint}")
