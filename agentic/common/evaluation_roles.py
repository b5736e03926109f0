"""The role tables of an evaluation: the evaluated policy as a role like any other, and arms that differ in it only.

Inputs: role tables of `roles`, the name of the policy's role. Invariants: the policy is sampled as the evaluation says,
whatever its role file says; between two arms only the server and model of the policy may differ, neither frozen roles nor
prices nor sampling; models are identified by what lies on disk, once per process. Leaves out: clients, arms.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.evaluation_provenance import model_fingerprint
from agentic.common.roles import POLICY, Role, RoleTable

logger = logging.getLogger(__name__)

NO_ROUTER = f"http://{POLICY}"
"""Address of `url: policy`, which means the router of a training run; there is none in an evaluation."""
# What a role is, for the comparison of role files: not where it runs and how patient its client is.
IDENTITY = (
    "name",
    "api",
    "tokenizer",
    "model",
    "temperature",
    "top_p",
    "max_new_tokens",
    "stop",
    "price_in",
    "price_out",
)


def evaluate_role(table: RoleTable, name: str, sampling: Mapping[str, Any]) -> None:
    """Make the policy's role a normal one with this sampling, in place.

    Raises ConfigError when it has no address of its own or cannot return token ids.
    """
    policy = table[name]
    if policy.url == NO_ROUTER:
        raise ConfigError(f"{table.source}: roles.{name}: `url: policy` is for training; give `server: NAME` or a url")
    if policy.api != "generate":
        raise ConfigError(f"{table.source}: roles.{name}: needs `api: generate`, which returns token ids")
    table.roles[name] = replace(policy, **sampling, trained=False)


def check_same_world(before: RoleTable, after: RoleTable, policy: str) -> None:
    """Only the policy may differ between the untrained and the trained arm. Raises ConfigError naming what does."""
    if set(before.roles) != set(after.roles):
        raise ConfigError(f"{before.source} and {after.source}: the roles differ; only the {policy} may")
    for role in before:
        names = [name for name in IDENTITY if role.name != policy or name not in ("model", "tokenizer")]
        for name in names:
            if getattr(role, name) != getattr(after[role.name], name):
                raise ConfigError(
                    f"{after.source}: roles.{role.name}.{name} differs from {before.source}; only the "
                    f"{policy}'s server may, or the arms are not comparable"
                )
    if before[policy].url == after[policy].url:
        raise ConfigError(
            f"{after.source}: roles.{policy}: same address as in {before.source}; the trained model needs its own"
        )


@lru_cache(maxsize=64)
def _fingerprint(model: str) -> str:
    return json.dumps(model_fingerprint(model))


def model_of(role: Role) -> dict[str, Any]:
    """Identity of the role's model; empty for a service without one."""
    return {} if role.api == "service" else json.loads(_fingerprint(str(role.model or role.tokenizer)))


def frozen_roles(table: RoleTable, policy: str) -> dict[str, dict[str, Any]]:
    """What must stay the same of every role but the policy, for the protocol."""
    return {
        role.name: {**{key: getattr(role, key) for key in IDENTITY}, "model": model_of(role)}
        for role in table
        if role.name != policy
    }


def check_served(role: Role, info: Mapping[str, Any]) -> None:
    """Warn when the engine (`evaluation_provenance.engine_info`) serves another model than the role file says."""
    served = info.get("model_path")
    if served and role.model and Path(str(served)).name != Path(role.model).name:
        logger.warning("%s: %s serves %s, the role file says %s", role.name, role.url, served, role.model)
