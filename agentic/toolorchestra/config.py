"""ToolOrchestra's own settings, read from attributes `orchestra_<field>` of the argument namespace.

Inputs: the namespace after slime applied the YAML of `--custom-config-path`. Invariants: every field is checked once,
before any model is called; an unknown `orchestra_*` attribute is an error that names the nearest field; the object is
frozen and hashable, so it can key the cache of clients. Leaves out: addresses and sampling of the roles (role file).
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.settings import Settings

PREFIX = "orchestra_"
SETTINGS = Settings(PREFIX)
CHOICES = {
    "layout": ("stream", "turns"),
    "reward": ("outcome", "preference"),
    "user": ("llm", "scripted"),
}
MAY_BE_ZERO = ("min_group_std", "max_failure_rate")


@dataclass(frozen=True)
class OrchestraConfig:
    """Settings of one run; defaults follow the paper where it states a value."""

    roles: str
    """Path of the role file (YAML): who answers where."""
    prompt_set: str = "standard"
    """Name of a set under `prompts/`, or the path of a directory with the same files."""
    layout: str = "stream"
    """`stream`: one row per rollout, tool results masked. `turns`: one row per turn, its prompt rebuilt (the paper's)."""
    reward: str = "preference"
    """`outcome`: equation 1 alone. `preference`: equation 2 (counts, money and time, weighted by the sample)."""
    aliases: str = ""
    """Experts offered where a sample has no mapping: a YAML file, or the mapping itself; see `experts`."""
    max_turns: int = 50
    """Turns of the policy in one rollout (paper: 50)."""
    max_format_errors: int = 3
    """So many malformed turns in a row end the rollout with outcome 0."""
    max_calls_per_turn: int = 5
    """Tool calls carried out in one turn; further ones are ignored."""
    max_tool_tokens: int = 1500
    """Token budget of one tool result or user message in the policy's context."""
    max_context_len: int = 32768
    """Prompt plus response tokens of a rollout (`stream`) or of a turn (`turns`)."""
    max_new_tokens: int = 8192
    """Generation limit of one turn."""
    episode_timeout_s: float = 1800.0
    """Wall clock of a rollout in seconds; no call begins or goes on after it."""
    tau2_max_steps: int = 40
    """Messages of a tau2 simulation in training."""
    tau2_eval_max_steps: int = 200
    """Messages of a tau2 simulation in evaluation."""
    tau2_max_errors: int = 10
    """Tool errors that end a tau2 simulation."""
    tau2_workers: int = 2
    """Processes that run tau2's official evaluators, which evaluation uses and training does not."""
    user: str = "llm"
    """Who plays the customer of tau2: the role `user`, or a scripted one that needs no model."""
    retrieval_topk: int = 30
    """Documents asked for in one search."""
    min_group_std: float = 0.1
    """Groups whose rewards deviate less are dropped (homogeneity filter)."""
    advantage_clip: float = 3.0
    """Advantages are clipped to plus and minus this."""
    max_failure_rate: float = 0.5
    """A rollout with a larger share of failed episodes stops the run."""
    sandbox_timeout_s: float = 60.0
    """Wall clock of one program written by a reasoner."""
    sandbox_memory_mb: int = 1024
    """Address space of one program written by a reasoner."""

    @classmethod
    def from_args(cls, args: Namespace) -> OrchestraConfig:
        """Read and check all `orchestra_*` attributes.

        Raises:
            ConfigError: unknown name, missing `orchestra_roles`, or a value of the wrong type or range.
        """
        defaults = {field.name: "" if field.name == "roles" else field.default for field in fields(cls)}
        given = SETTINGS.read(_with_inline_aliases(args), defaults)
        if not given.get("roles"):
            raise ConfigError(f"{PREFIX}roles is not set; give the path of the role file in --custom-config-path")
        return cls(**given)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            SETTINGS.check_choice(name, getattr(self, name), choices)
        for field in fields(self):
            if type(field.default) in (int, float):
                value, zero = getattr(self, field.name), field.name in MAY_BE_ZERO
                remedy = "must not be negative" if zero else "must be positive"
                SETTINGS.check(field.name, value, remedy, value >= 0 if zero else value > 0)
        SETTINGS.check("max_failure_rate", self.max_failure_rate, "must be at most 1", self.max_failure_rate <= 1)


def _with_inline_aliases(args: Namespace) -> Namespace:
    """A mapping written directly into the settings becomes its JSON text: the config stays hashable."""
    name = PREFIX + "aliases"
    value: Any = getattr(args, name, None)
    if not isinstance(value, Mapping):
        return args
    return Namespace(**{**vars(args), name: json.dumps(value, sort_keys=True)})
