"""AgentFlow's own settings, read from attributes `agentflow_<field>` of the argument namespace.

Inputs: the namespace after slime applied the YAML of `--custom-config-path`. Invariants: every field is checked once,
before any model is called; an unknown `agentflow_*` attribute is an error that names the nearest field; the object is
frozen and hashable, so it can key the cache of clients. Leaves out: addresses and sampling of the roles (role file).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from agentic.agentflow.tools import TOOLS
from agentic.common.errors import ConfigError
from agentic.common.roles import nearest

PREFIX = "agentflow_"
TRAINABLE_ROLES = ("analysis", "next_step", "final")
TURN_WEIGHTINGS = ("paper", "token_mean", "uniform_turn")
JUDGES = ("rule_first", "rule_only")


@dataclass(frozen=True)
class AgentFlowConfig:
    """Settings of one run; defaults follow the paper where it states a value."""

    roles: str
    """Path of the role file (YAML): who answers where."""
    prompt_set: str = "standard"
    """Name of a set under `prompts/`, or the path of a directory with the same files."""
    train_roles: tuple[str, ...] = ("analysis", "next_step")
    """Which turns are trained. `next_step` alone is the paper; with `final` the policy also writes the answer."""
    turn_weighting: str = "paper"
    """`paper`: mean over tokens, then turns, then trajectories. `token_mean`: mean over all tokens of a trajectory.
    `uniform_turn`: every turn weighs 1, long trajectories count more."""
    max_steps: int = 3
    """Tool steps in training (paper: 3)."""
    eval_max_steps: int = 10
    """Tool steps in evaluation (paper: 10)."""
    tools: tuple[str, ...] = ("base_generator", "python_coder")
    """Tools the planner may choose from."""
    max_calls_per_step: int = 1
    """`tool.execute` calls accepted in one command."""
    max_result_tokens: int = 1024
    """Token budget of one result in the memory."""
    max_memory_tokens: int = 8192
    """Token budget of the rendered memory; the oldest results shrink first."""
    max_context_len: int = 32768
    """Prompt plus response tokens of one policy call."""
    max_trajectory_tokens: int = 131072
    """Prompt plus response tokens of all policy calls of a trajectory; checked before each next step."""
    trajectory_timeout_s: float = 500.0
    """Wall clock of a trajectory in seconds (paper: 500); checked before each call."""
    strip_wrapper: bool = True
    """Remove the known instruction wrapper of the DAPO data set around a problem."""
    judge: str = "rule_first"
    """`rule_first`: exact rule, then the judge where it cannot tell. `rule_only`: no judge is called."""
    max_failure_rate: float = 0.5
    """A rollout with a larger share of failed trajectories stops the run."""
    sandbox_timeout_s: float = 10.0
    """Wall clock of one program of `python_coder`."""
    sandbox_memory_mb: int = 1024
    """Address space of one program of `python_coder`."""

    @classmethod
    def from_args(cls, args: Namespace) -> AgentFlowConfig:
        """Read and check all `agentflow_*` attributes.

        Raises:
            ConfigError: unknown name, missing `agentflow_roles`, or a value of the wrong type or range.
        """
        given = {key.removeprefix(PREFIX): value for key, value in vars(args).items() if key.startswith(PREFIX)}
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(f"unknown setting {PREFIX}{name}{nearest(name, names)}")
        if not given.get("roles"):
            raise ConfigError(f"{PREFIX}roles is not set; give the path of the role file in --custom-config-path")
        defaults = {field.name: field.default for field in fields(cls) if field.name != "roles"}
        return cls(**{name: _coerce(name, value, defaults.get(name, "")) for name, value in given.items()})

    def __post_init__(self) -> None:
        _check_choice("turn_weighting", self.turn_weighting, TURN_WEIGHTINGS)
        _check_choice("judge", self.judge, JUDGES)
        for role in self.train_roles:
            _check_choice("train_roles", role, TRAINABLE_ROLES)
        for tool in self.tools:
            _check_choice("tools", tool, TOOLS)
        _check("train_roles", self.train_roles, "name at least one role", bool)
        _check("tools", self.tools, "name each tool once, and at least one", lambda v: v and len(set(v)) == len(v))
        _check("max_failure_rate", self.max_failure_rate, "must be between 0 and 1", lambda v: 0 <= v <= 1)
        for field in fields(self):
            if type(field.default) in (int, float) and field.name != "max_failure_rate":
                _check(field.name, getattr(self, field.name), "must be positive", lambda v: v > 0)

    @property
    def required_roles(self) -> tuple[str, ...]:
        """Roles that the role file must contain under these settings."""
        final = () if "final" in self.train_roles else ("generator",)
        judge = ("judge",) if self.judge == "rule_first" else ()
        return ("planner", "executor", "verifier", *self.tools, *final, *judge)


def _coerce(name: str, value: Any, default: Any) -> Any:
    """Bring a YAML value to the type of the field's default; a comma list is accepted for tuples."""
    if isinstance(default, tuple):
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)) and all(isinstance(part, str) for part in parts):
            return tuple(part.strip() for part in parts)
    elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif type(value) is type(default):
        return value
    raise ConfigError(f"{PREFIX}{name} is {value!r}; expected a {type(default).__name__} such as {default!r}")


def _check(name: str, value: Any, remedy: str, accept: Callable[[Any], Any]) -> None:
    if not accept(value):
        raise ConfigError(f"{PREFIX}{name} is {value!r}: {remedy}")


def _check_choice(name: str, value: str, choices: Any) -> None:
    _check(name, value, f"choose from {', '.join(choices)}", lambda v: v in choices)
