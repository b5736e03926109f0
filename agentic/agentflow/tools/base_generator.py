"""The general tool: a frozen language model that answers one self-contained query.

Inputs: the query. Invariants: one call of role `base_generator`. Leaves out: retrieval, and any check of the answer.
"""

from __future__ import annotations

from typing import ClassVar

from agentic.agentflow.prompts import PromptSet
from agentic.agentflow.tools.base import Kit, ToolResult, ToolSpec
from agentic.common.clients import FrozenClient


class BaseGenerator:
    """Answers from the model's own knowledge."""

    spec: ClassVar[ToolSpec] = ToolSpec(
        name="base_generator",
        aliases=("generalist solution generator", "generator", "base generator"),
        description="answers one self-contained question or instruction from a language model's own knowledge",
        parameters={"query": "the complete question or instruction, with all data it refers to"},
        limitation="cannot look anything up or compute exactly; its statements may be wrong",
        best_practice="use it for general reasoning and common knowledge, and verify important results with another tool",
        needs_role=True,
    )

    def __init__(self, client: FrozenClient, prompts: PromptSet) -> None:
        self._client = client
        self._prompts = prompts

    @classmethod
    def build(cls, kit: Kit) -> BaseGenerator:
        return cls(kit.clients["base_generator"], kit.prompts)

    async def run(self, query: str) -> ToolResult:
        """The model's text, stripped. An empty reply is a failed call."""
        reply = await self._client.complete(self._prompts.render("base_generator", query=query))
        text = reply.text.strip()
        meta = {"completion_tokens": reply.completion_tokens, "prompt_tokens": reply.prompt_tokens}
        return ToolResult(bool(text), text or "Error: the model gave an empty reply", meta)
