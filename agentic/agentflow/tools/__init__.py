"""The table of tools. Planner's list, executor's metadata and name resolution all come from it.

Inputs: the names chosen in the configuration. Invariants: a name that is not in the chosen set resolves to nothing;
no tool is ever substituted for another. Leaves out: searching tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agentic.agentflow.parsing import normalize_tool_name
from agentic.agentflow.prompts import PromptSet
from agentic.agentflow.tools.base import Tool, ToolResult, ToolSpec, execute
from agentic.agentflow.tools.base_generator import BaseGenerator
from agentic.agentflow.tools.python_coder import PythonCoder
from agentic.common.clients import FrozenClient
from agentic.common.sandbox import SandboxLimits

__all__ = ["TOOLS", "Tool", "ToolResult", "ToolSpec", "Toolbox", "execute"]

TOOLS: dict[str, ToolSpec] = {spec.name: spec for spec in (BaseGenerator.spec, PythonCoder.spec)}


class Toolbox:
    """The tools of one run, in the order of the configuration."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}
        self._names = {
            normalize_tool_name(name): tool for tool in tools for name in (tool.spec.name, *tool.spec.aliases)
        }

    @classmethod
    def build(
        cls, names: Sequence[str], clients: Mapping[str, FrozenClient], prompts: PromptSet, limits: SandboxLimits
    ) -> Toolbox:
        """The named tools (keys of `TOOLS`), each with the client of the role of the same name."""
        makers: dict[str, Callable[[FrozenClient], Tool]] = {
            "base_generator": lambda client: BaseGenerator(client, prompts),
            "python_coder": lambda client: PythonCoder(client, prompts, limits),
        }
        return cls([makers[name](clients[name]) for name in names])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def resolve(self, name: str) -> Tool | None:
        """The tool with this name or alias; None when there is none."""
        return self._names.get(normalize_tool_name(name))

    def describe(self) -> str:
        """Metadata of all tools, for planner and verifier."""
        return "\n".join(tool.spec.describe() for tool in self._tools.values())
