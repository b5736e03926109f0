"""Arguments of one training role: the actor's and the critic's differ where a YAML file says so.

    megatron:                      # the name of the section is part of the public format; every backend reads it
      - {name: default, role: critic, overrides: {lr: 1e-5, load: DIR, save: DIR}}

`--megatron-config-path` names the file; a role without an entry inherits everything. `num_nodes` and `num_gpus_per_node` are ignored:
both roles share the actor's ranks. Left out: roles of other models (each engine model has its own file).
"""

from __future__ import annotations

import re
from argparse import Namespace
from copy import copy
from pathlib import Path
from typing import Any

import yaml

ROLES = ("actor", "critic")
_IGNORED = ("num_nodes", "num_gpus_per_node")
# The critic learns returns of the task's reward: what shapes the policy's advantages is not its business.
_CRITIC_DEFAULTS: dict[str, Any] = {
    "kl_coef": 0.0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "normalize_advantages": False,
    "ref_update_interval": None,
    "save_hf": None,
    "untie_embeddings_and_output_weights": True,  # its head has one output
    "disable_param_buffers_cpu_backup": False,
}


def parse_megatron_role_args(base_args: Namespace, megatron_config_path: str | None, role: str) -> Namespace:
    """A copy of `base_args` as `role` needs it.

    The critic's checkpoints go to (and come from) the folder `critic` inside the actor's, unless overridden.
    Raises FileNotFoundError or ValueError for a file that cannot be used, AssertionError for two entries of one role.
    """
    args = copy(base_args)
    if role == "critic":
        vars(args).update(_CRITIC_DEFAULTS)
        args.save = str(Path(args.save) / "critic") if args.save else None
        args.load = _critic_folder(args.load) if args.load else None
    overrides = _read_overrides(megatron_config_path, role) if megatron_config_path else {}
    for name, value in overrides.items():
        if name not in _IGNORED:
            setattr(args, name, _like(getattr(base_args, name, None), name, value))
    return args


def _critic_folder(load: str) -> str:
    """`RUN` -> `RUN/critic`, and `RUN/iter_0000003` -> `RUN/critic/iter_0000003`."""
    path = Path(load)
    return str(path.parent / "critic" / path.name if re.fullmatch(r"iter_\d+", path.name) else path / "critic")


def _read_overrides(path: str, role: str) -> dict[str, Any]:
    where = f"--megatron-config-path {path}"
    if not Path(path).is_file():
        raise FileNotFoundError(f"{where}: no such file")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {error}") from error
    entries = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{where}: needs a list 'megatron' of entries with 'role' and 'overrides'")
    unknown = [entry.get("role") for entry in entries if entry.get("role") not in ROLES]
    if unknown:
        raise ValueError(f"{where}: unknown role {unknown[0]!r}; use one of {', '.join(ROLES)}")
    chosen = [entry for entry in entries if entry["role"] == role]
    assert len(chosen) <= 1, f"{where}: {len(chosen)} entries for the role {role}; give one"
    return dict(chosen[0].get("overrides") or chosen[0].get("args") or {}) if chosen else {}


def _like(known: Any, name: str, value: Any) -> Any:
    """`value` as the type of the attribute it replaces: YAML reads 1e-5 as text."""
    if not isinstance(value, str) or isinstance(known, bool) or not isinstance(known, (int, float)):
        return value
    try:
        return type(known)(value)
    except ValueError as error:
        raise ValueError(f"--megatron-config-path: {name}: {value!r} is not a number") from error
