"""`--sglang-config`: which models the engines of a run serve, in which groups, on how many GPUs.

    sglang:
      - name: actor                 # the first model has the default router
        model_path: MODEL           # default: --hf-checkpoint
        update_weights: true        # default: model_path is --hf-checkpoint
        num_gpus_per_engine: 1      # default: --rollout-num-gpus-per-engine
        server_groups:
          - {worker_type: regular, num_gpus: 2, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: OTHER_MODEL
        server_groups: [{worker_type: regular, num_gpus: 1}]

Invariants: after `resolve` every model has a path and every group a GPU count per engine; all groups of a model serve the
same weights; unknown keys are errors. Left out: starting anything (`slime/ray`).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

logger = logging.getLogger(__name__)

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder", "encoder")
_MODEL_KEYS = ("name", "model_path", "num_gpus_per_engine", "server_groups", "engine_groups", "update_weights")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclass
class ServerGroupConfig:
    """Equal engines of one model. `placeholder` reserves its GPUs without an engine.

    `overrides`: server options (names as of SGLang, with underscores) that win over the command line.
    Raises AssertionError for an unknown worker type or no GPUs.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.worker_type in WORKER_TYPES, f"worker_type {self.worker_type!r}: use one of {WORKER_TYPES}"
        assert self.num_gpus > 0, f"num_gpus {self.num_gpus} of a {self.worker_type} group: must be greater than 0"
        dashed = [name for name in self.overrides if "-" in name]
        if dashed:
            logger.warning("overrides: names with dashes are read with underscores: %s", dashed)
        self.overrides = {name.replace("-", "_"): value for name, value in self.overrides.items()}


@dataclass
class ModelConfig:
    """One model behind its own router."""

    name: str
    model_path: str | None = None
    num_gpus_per_engine: int | None = None
    server_groups: list[ServerGroupConfig] = field(default_factory=list)
    update_weights: bool | None = None

    def resolve(self, args: Namespace) -> None:
        """Fills what was left out from `args`. Raises AssertionError when groups of the model disagree."""
        default = self.num_gpus_per_engine or args.rollout_num_gpus_per_engine
        paths = {str(group.overrides["model_path"]) for group in self.server_groups if "model_path" in group.overrides}
        if self.model_path is None:
            self.model_path = next(iter(sorted(paths)), args.hf_checkpoint)
        paths.add(str(self.model_path))
        assert (
            len(paths) == 1
        ), f"model {self.name!r}: all server groups must share one model_path, got {sorted(paths)}"
        if self.update_weights is None:
            self.update_weights = str(self.model_path) == str(args.hf_checkpoint)
        self.num_gpus_per_engine = default
        for group in self.server_groups:
            group.num_gpus_per_engine = group.num_gpus_per_engine or default
            assert group.worker_type == "placeholder" or group.num_gpus % group.num_gpus_per_engine == 0, (
                f"model {self.name!r}: num_gpus {group.num_gpus} is not a multiple of num_gpus_per_engine "
                f"{group.num_gpus_per_engine}"
            )
            group.overrides.setdefault("model_path", self.model_path)

    @property
    def has_pd_disaggregation(self) -> bool:
        """Whether prefill and decode run in engines of their own."""
        return any(group.worker_type in ("prefill", "decode") for group in self.server_groups)

    @property
    def has_encoder_disaggregation(self) -> bool:
        """Whether media are encoded in engines of their own."""
        return any(group.worker_type == "encoder" for group in self.server_groups)

    @property
    def total_num_gpus(self) -> int:
        """GPUs of all groups, placeholders included."""
        return sum(group.num_gpus for group in self.server_groups)


@dataclass
class SglangConfig:
    """All models of a run; the first one has the default router."""

    models: list[ModelConfig]

    @staticmethod
    def from_yaml(path: str) -> SglangConfig:
        """Reads the file. Raises FileNotFoundError, ValueError for broken YAML or unknown keys, AssertionError for the rest."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"--sglang-config {path}: no such file")
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"--sglang-config {path}: not valid YAML: {error}") from error
        assert isinstance(data, dict) and "sglang" in data, f"--sglang-config {path}: needs the top key 'sglang'"
        models = [_model(entry, f"--sglang-config {path}") for entry in data["sglang"] or []]
        assert models, f"--sglang-config {path}: 'sglang' lists no model"
        names = [model.name for model in models]
        assert len(set(names)) == len(names), f"--sglang-config {path}: a model name is used twice: {names}"
        return SglangConfig(models)

    @staticmethod
    def from_prefill_num_servers(args: Namespace) -> SglangConfig:
        """One model: `--prefill-num-servers` prefill engines, all other GPUs decode. Raises AssertionError without both."""
        per_engine = args.rollout_num_gpus_per_engine
        prefill = args.prefill_num_servers * per_engine
        decode = args.rollout_num_gpus - prefill
        assert prefill > 0, f"--prefill-num-servers {args.prefill_num_servers}: must be greater than 0"
        assert decode > 0, (
            f"--prefill-num-servers {args.prefill_num_servers}: takes {prefill} of --rollout-num-gpus "
            f"{args.rollout_num_gpus} GPUs, none is left for decode"
        )
        groups = [ServerGroupConfig("prefill", prefill), ServerGroupConfig("decode", decode)]
        return SglangConfig([ModelConfig("default", server_groups=groups)])

    @property
    def has_pd_disaggregation(self) -> bool:
        """Whether any model has prefill or decode groups."""
        return any(model.has_pd_disaggregation for model in self.models)

    @property
    def total_num_gpus(self) -> int:
        """GPUs of all models."""
        return sum(model.total_num_gpus for model in self.models)


def resolve_sglang_config(args: Namespace) -> SglangConfig:
    """The models of this run, from `--sglang-config`, `--prefill-num-servers` or the plain flags, all resolved.

    Raises AssertionError when the GPUs of a config file are not `--rollout-num-gpus`.
    """
    if getattr(args, "sglang_config", None):
        config = SglangConfig.from_yaml(args.sglang_config)
        assert config.total_num_gpus == args.rollout_num_gpus, (
            f"--sglang-config {args.sglang_config}: its groups have {config.total_num_gpus} GPUs, "
            f"--rollout-num-gpus is {args.rollout_num_gpus}"
        )
    elif getattr(args, "prefill_num_servers", None):
        config = SglangConfig.from_prefill_num_servers(args)
    else:
        groups = [ServerGroupConfig("regular", args.rollout_num_gpus)] if args.rollout_num_gpus else []
        config = SglangConfig([ModelConfig("default", server_groups=groups)])
    for model in config.models:
        model.resolve(args)
    return config


def _model(entry: Any, where: str) -> ModelConfig:
    if not isinstance(entry, dict) or "name" not in entry:
        raise ValueError(f"{where}: each model is a mapping with a 'name', got {entry!r:.80}")
    where = f"{where}, model {entry['name']!r}"
    _check_keys(entry, _MODEL_KEYS, where)
    groups = entry.get("server_groups") or entry.get("engine_groups")
    assert groups, f"{where}: needs 'server_groups'"
    return ModelConfig(
        name=str(entry["name"]),
        model_path=entry.get("model_path"),
        num_gpus_per_engine=entry.get("num_gpus_per_engine"),
        server_groups=[_group(group, where) for group in groups],
        update_weights=entry.get("update_weights"),
    )


def _group(entry: Any, where: str) -> ServerGroupConfig:
    if not isinstance(entry, dict) or "worker_type" not in entry or "num_gpus" not in entry:
        raise ValueError(f"{where}: a server group needs 'worker_type' and 'num_gpus', got {entry!r:.80}")
    _check_keys(entry, _GROUP_KEYS, where)
    return ServerGroupConfig(
        worker_type=entry["worker_type"],
        num_gpus=entry["num_gpus"],
        num_gpus_per_engine=entry.get("num_gpus_per_engine"),
        overrides=dict(entry.get("overrides") or {}),
    )


def _check_keys(entry: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
