"""Finds tools. Planner's list, executor's metadata and name resolution all come from the toolbox that is built here.

Inputs: the names chosen in the configuration. A tool is the one class of a module that has a `spec` and a class method
`build(kit)`; a name without a dot is a module of this package, a name with one is any module that can be imported.
Invariants: a name that is not in the chosen set resolves to nothing; no tool is ever substituted for another; names and
aliases are unique. Leaves out: tools of MCP servers (`mcp_tools`), which come with a description of their own.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentic.agentflow.parsing import normalize_tool_name
from agentic.agentflow.tools.base import Kit, Tool, ToolResult, ToolSpec, WebSettings, execute
from agentic.common.errors import ConfigError

__all__ = [
    "Kit",
    "Tool",
    "ToolResult",
    "ToolSpec",
    "Toolbox",
    "WebSettings",
    "available_tools",
    "execute",
    "tool_class",
]


@lru_cache(maxsize=1)
def available_tools() -> tuple[str, ...]:
    """Names of the tools in this package."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(name for name in modules if _tool_classes(f"{__name__}.{name}"))


def tool_class(name: str) -> Any:
    """The class behind a name of the configuration.

    Raises:
        ConfigError: there is no such module, or it does not hold exactly one tool.
    """
    if "." not in name and name not in available_tools():
        choices = ", ".join(available_tools())
        raise ConfigError(f"unknown tool {name!r}: choose from {choices}, or give a module's dotted name")
    path = name if "." in name else f"{__name__}.{name}"
    try:
        classes = _tool_classes(path)
    except ModuleNotFoundError as error:
        raise ConfigError(f"tool {name!r}: {error}; give a module that can be imported") from error
    if len(classes) != 1:
        raise ConfigError(f"tool {name!r}: the module has {len(classes)} classes with a `spec`, must be 1")
    return classes[0]


def _tool_classes(path: str) -> list[Any]:
    module = importlib.import_module(path)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == path]
    return [value for value in own if isinstance(getattr(value, "spec", None), ToolSpec)]


class Toolbox:
    """The tools of one run, in the order of the configuration."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises ConfigError when two tools share a name or alias."""
        self._tools = {tool.spec.name: tool for tool in tools}
        self._names: dict[str, Tool] = {}
        for tool in tools:
            for key in {normalize_tool_name(name) for name in (tool.spec.name, *tool.spec.aliases)}:
                if key in self._names:
                    other = self._names[key].spec.name
                    raise ConfigError(f"tools {other!r} and {tool.spec.name!r} share the name {key!r}; rename one")
                self._names[key] = tool

    @classmethod
    def build(cls, names: Sequence[str], kit: Kit, more: Sequence[Tool] = ()) -> Toolbox:
        """The named tools, and `more` that were built elsewhere."""
        return cls([*(tool_class(name).build(kit) for name in names), *more])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def resolve(self, name: str) -> Tool | None:
        """The tool with this name or alias; None when there is none."""
        return self._names.get(normalize_tool_name(name))

    def describe(self) -> str:
        """Metadata of all tools, for planner and verifier."""
        return "\n".join(tool.spec.describe() for tool in self._tools.values())
