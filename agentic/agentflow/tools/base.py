"""What a tool is: its description for the planner, and one asynchronous call.

Inputs: keyword arguments that were read from the executor's command (plain literals). Invariants: a wrong argument or a
failing program is a `ToolResult` with `ok=False` and a text the planner can act on; only infrastructure failures are
exceptions (`InfrastructureError`), and they end the trajectory. Leaves out: parsing of commands, the choice of tools.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentic.agentflow.prompts import PromptSet
from agentic.common.clients import FrozenClient
from agentic.common.sandbox import SandboxLimits


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
    needs_role: bool = False
    """A frozen role with the tool's name must be in the role file."""

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


@dataclass(frozen=True)
class WebSettings:
    """How the search tools reach the web; all from the settings of the run, so that nothing is reached by default."""

    search_url: str = ""
    search_fields: tuple[str, ...] = ()
    wikipedia_url: str = ""
    blocked_domains: tuple[str, ...] = ()
    private_addresses: bool = False
    timeout_s: float = 10.0
    max_bytes: int = 1_000_000


@dataclass(frozen=True)
class Kit:
    """What a tool may be built from."""

    clients: Mapping[str, FrozenClient]
    """Frozen roles by name."""
    prompts: PromptSet
    limits: SandboxLimits
    web: WebSettings = WebSettings()


class Tool(Protocol):
    """A tool with its description. Built once per process, shared by all trajectories: `run` must keep no state."""

    @property
    def spec(self) -> ToolSpec: ...

    @property
    def run(self) -> Callable[..., Awaitable[ToolResult]]:
        """Takes the parameters of the description as keywords."""


async def execute(tool: Tool, kwargs: Mapping[str, Any]) -> ToolResult:
    """Run the tool if the arguments fit.

    Raises:
        InfrastructureError: a service that the tool needs failed.
    """
    error = tool.spec.argument_error(kwargs)
    if error is not None:
        return ToolResult(False, f"Error: {error}", {"error": "arguments"})
    return await tool.run(**kwargs)
