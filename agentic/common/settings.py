"""A method's settings from attributes `<prefix><field>` of the argument namespace (the YAML of `--custom-config-path`).

Inputs: the namespace, the method's prefix and the defaults of its fields. Invariants: an unknown name is an error that
names the nearest field; a value has the type of its field's default; every message carries the full name.
Leaves out: what the fields mean and which values fit together (each method's frozen dataclass).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.roles import nearest


@dataclass(frozen=True)
class Settings:
    """Reader and checks for the settings of one prefix."""

    prefix: str

    def read(self, args: Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The given settings, brought to the types of `defaults`.

        Raises:
            ConfigError: unknown name, or a value of the wrong type.
        """
        given = {k.removeprefix(self.prefix): value for k, value in vars(args).items() if k.startswith(self.prefix)}
        for name in given:
            if name not in defaults:
                raise ConfigError(f"unknown setting {self.prefix}{name}{nearest(name, list(defaults))}")
        return {name: self._coerce(name, value, defaults[name]) for name, value in given.items()}

    def check(self, name: str, value: Any, remedy: str, accepted: Any) -> None:
        """Raises ConfigError with name, value and remedy unless `accepted`."""
        if not accepted:
            raise ConfigError(f"{self.prefix}{name} is {value!r}: {remedy}")

    def check_choice(self, name: str, value: Any, choices: Collection[str]) -> None:
        """Raises ConfigError with the choices when the value is none of them."""
        self.check(name, value, f"choose from {', '.join(choices)}", value in choices)

    def _coerce(self, name: str, value: Any, default: Any) -> Any:
        """A comma list is accepted for a tuple of names, a whole number for a float."""
        if isinstance(default, tuple):
            parts = value.split(",") if isinstance(value, str) else value
            if isinstance(parts, (list, tuple)) and all(isinstance(part, str) for part in parts):
                return tuple(part.strip() for part in parts)
        elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif type(value) is type(default):
            return value
        kind = type(default).__name__
        raise ConfigError(f"{self.prefix}{name} is {value!r}; expected a {kind} such as {default!r}")
