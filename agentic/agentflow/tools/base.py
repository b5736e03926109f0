"""What a tool is: its description for the planner, and one asynchronous call.

Inputs: keyword arguments that were read from the executor's command (plain literals). Invariants: a wrong argument or a
failing program is a `ToolResult` with `ok=False` and a text the planner can act on; only infrastructure failures are
exceptions (`InfrastructureError`), and they end the trajectory. Leaves out: parsing of commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolSpec:
    """The one description of a tool from which all prompts and the name resolution are made."""

    name: str
    aliases: tuple[str, ...]
    description: str
    parameters: Mapping[str, str]
    """Name -> meaning of each parameter. All are required, all are text."""
    limitation: str
    best_practice: str

    def describe(self) -> str:
        """The metadata as shown to planner, executor and verifier."""
        parameters = [f"  - {name} (text): {meaning}" for name, meaning in self.parameters.items()]
        lines = [f"{self.name}: {self.description}", "  Parameters:", *("  " + line for line in parameters)]
        return "\n".join([*lines, f"  Limits: {self.limitation}", f"  Best practice: {self.best_practice}"])

    def argument_error(self, kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments, naming the right ones; None when they fit."""
        wrong = sorted(set(kwargs) ^ set(self.parameters))
        not_text = [name for name, value in kwargs.items() if not isinstance(value, str)]
        empty = [name for name, value in kwargs.items() if isinstance(value, str) and not value.strip()]
        for problem, names in (("unknown or missing", wrong), ("not text", not_text), ("empty", empty)):
            if names:
                return f"{self.name}: {problem} parameter {', '.join(names)}; it takes {', '.join(self.parameters)}"
        return None


@dataclass(frozen=True)
class ToolResult:
    """What came back. `text` goes into the memory; `meta` (plain json types) only into the trace."""

    ok: bool
    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class Tool(Protocol):
    """A tool with its description. Built once per process, shared by all trajectories: `run` must keep no state."""

    @property
    def spec(self) -> ToolSpec: ...

    async def run(self, query: str) -> ToolResult: ...


async def execute(tool: Tool, kwargs: Mapping[str, Any]) -> ToolResult:
    """Run the tool if the arguments fit.

    Raises:
        InfrastructureError: a service that the tool needs failed.
    """
    error = tool.spec.argument_error(kwargs)
    if error is not None:
        return ToolResult(False, f"Error: {error}", {"error": "arguments"})
    return await tool.run(**kwargs)
