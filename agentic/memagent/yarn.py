"""YaRN in a model's configuration: whether it is there, and how it gets there (`tools/yarn_config.py` writes the directory).

Only the direct baseline needs it. The memory agent never does: its window is the model's own, and `eval` refuses it.
Left out: weights (YaRN as used here needs no training), files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentic.common.errors import ConfigError

CONFIG = "config.json"
SCALING_KEYS = ("rope_scaling", "rope_parameters")


def read_config(model: Path) -> dict[str, Any]:
    """The model's configuration. Raises FileNotFoundError or ConfigError."""
    path = model / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; name a model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold an object")
    return config


def uses_yarn(config: Mapping[str, Any]) -> bool:
    """Whether the configuration scales its positions by YaRN."""
    entries = [config.get(key) or {} for key in SCALING_KEYS]
    return any("yarn" in (entry.get("rope_type"), entry.get("type")) for entry in entries)


def with_yarn(config: Mapping[str, Any], factor: float, original: int) -> dict[str, Any]:
    """The configuration with YaRN and a window of `factor * original` tokens.

    Raises ConfigError when it is scaled already, or `original` is longer than the model's own window.
    """
    if uses_yarn(config):
        raise ConfigError("the model's configuration has YaRN already; start from the original model")
    window = config.get("max_position_embeddings")
    if isinstance(window, int) and original > window:
        raise ConfigError(
            f"--original {original}: the model's own window is {window} tokens (max_position_embeddings)"
        )
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    kept = config.get(key) or {}
    scaling = {**kept, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if key == "rope_scaling":
        scaling["type"] = "yarn"  # the name that older readers look for
    return {**config, key: scaling, "max_position_embeddings": int(factor * original)}
