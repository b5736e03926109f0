"""A command line from a dataclass: every field is an option, and an environment variable of its name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


def dataclass_cli(func: Callable[..., Any], env_var_prefix: str = "SLIME_SCRIPT_") -> Callable[..., Any]:
    """`func(args: SomeDataclass)` as a function that typer can run.

    A field without a default is a required option. `SLIME_SCRIPT_NUM_NODES` sets `--num-nodes` unless the option is given.
    Raises TypeError when the function's only parameter is not a dataclass.
    """
    import typer

    parameters = list(inspect.signature(func).parameters)
    hints = typing.get_type_hints(func)
    config = hints.get(parameters[0]) if len(parameters) == 1 else None
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise TypeError(f"{func.__name__}: its only parameter must be annotated with a dataclass")
    kinds = typing.get_type_hints(config)
    options = []
    for field in dataclasses.fields(config):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        option = typer.Option(
            ... if default is dataclasses.MISSING else default, envvar=f"{env_var_prefix}{field.name.upper()}"
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(field.name, kind, default=option, annotation=kinds[field.name]))

    @functools.wraps(func)
    def command(**values: Any) -> Any:
        return func(config(**values))

    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command
