"""The three tools of question answering: an expert does the work of each, tool and expert together are timed.

    search             the expert writes a query, the retrieval service finds documents
    enhance_reasoning  the expert writes a program, the sandbox runs it, output and program go into the state
    answer             the expert answers, which ends the rollout

Inputs: the question, the state, the experts of this rollout, a retriever. Invariants: an expert sees the state within the
budget of its own model; a program that prints nothing changes nothing; every call leaves money and the whole wall clock of
the tool in the ledger; what an expert wrote badly is a text for the policy, what failed is an InfrastructureError.
Leaves out: which calls of a turn are carried out (`environment`), the score of an answer (`grading`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentic.common.sandbox import SandboxLimits, run_python
from agentic.toolorchestra.environment import ToolCall
from agentic.toolorchestra.experts import ExpertDesk
from agentic.toolorchestra.parsing import without_thought
from agentic.toolorchestra.prompts import PromptSet
from agentic.toolorchestra.qa.grading import answers_in_box, extract_prediction
from agentic.toolorchestra.qa.state import QAState, Tokenizer, count, expert_budgets, render_program
from agentic.toolorchestra.retrieval.client import RetrievalClient

# A search shows the policy the beginnings of what was found; experts read the state.
SHOWN_CHARS = 500
QUERY_CHARS = 390
MIN_QUERY_CHARS = 5
SANDBOX_DOLLARS_PER_S = 0.0000083
# A search in a local index costs its query at the price of an 8B model.
LOCAL_SEARCH_DOLLARS_PER_TOKEN = 0.2e-6
_QUERY = re.compile(r"(?is)<query>(.*?)</query>")
_PROGRAM = re.compile(r"(?s)```[ \t]*(?:python|py)[ \t]*\n(.*?)```", re.IGNORECASE)


class ToolText(NamedTuple):
    """What the policy is told of a tool."""

    prefix: str
    """Of the aliases that do its work."""
    description: str


TOOLS = {
    "search": ToolText("search-", "Find missing facts: the chosen model writes a query, a search returns documents."),
    "enhance_reasoning": ToolText(
        "reasoner-", "Compute or check something: the chosen model writes a Python program, which is run."
    ),
    "answer": ToolText("answer-", "Give the final answer: the chosen model answers the problem. This ends the task."),
}


def build_schemas(desk: ExpertDesk, offered: set[str] | None = None) -> list[dict[str, Any]]:
    """OpenAI schemas of the tools in this sample; tools without an expert are left out.

    `offered`: names of tools, or of aliases of theirs (the desk knows only aliases of the sample); None offers all.
    """
    schemas = []
    for name, tool in TOOLS.items():
        aliases = desk.aliases(tool.prefix)
        if aliases and (offered is None or name in offered or not offered.isdisjoint(aliases)):
            schemas.append(_schema(name, tool, aliases, desk))
    return schemas


def _schema(name: str, tool: ToolText, aliases: Sequence[str], desk: ExpertDesk) -> dict[str, Any]:
    choice = {"type": "string", "enum": list(aliases), "description": f"One of {', '.join(aliases)}."}
    parameters = {"type": "object", "properties": {"model": choice}, "required": ["model"]}
    text = f"{tool.description}\n{desk.describe(tool.prefix)}"
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def offered_names(tools: Iterable[Any] | None) -> set[str] | None:
    """Names in `metadata["tools"]`: plain names, or schemas of which the function's name counts; None when absent."""
    if tools is None:
        return None
    return {tool["function"]["name"] if isinstance(tool, Mapping) else str(tool) for tool in tools}


def extract_query(text: str, question: str) -> str:
    """The last `<query>` of the expert, the question itself when there is none of 5 characters; at most 390 characters."""
    found = _QUERY.findall(without_thought(text) or "")
    query = " ".join(found[-1].split()) if found else ""
    return (query if len(query) >= MIN_QUERY_CHARS else question)[:QUERY_CHARS]


def extract_code(text: str) -> str:
    """The last closed ```python block; empty when there is none."""
    blocks = _PROGRAM.findall(without_thought(text) or "")
    return blocks[-1].strip() if blocks else ""


def sandbox_limits(timeout_s: float, memory_mb: int) -> SandboxLimits:
    # The processor's limit lies behind the wall clock, so that a loop is told its time limit.
    return SandboxLimits(timeout_s=timeout_s, cpu_s=math.ceil(timeout_s) + 1, memory_mb=memory_mb)


@dataclass
class QATools:
    """The tools of one rollout. `prediction` is None until `answer` was executed."""

    question: str
    state: QAState
    desk: ExpertDesk
    retriever: RetrievalClient | None
    """None where `search` is not offered."""
    prompts: PromptSet
    tokenizer: Tokenizer
    topk: int
    limits: SandboxLimits
    eid: str = ""
    prediction: str | None = None

    async def run(self, call: ToolCall) -> str:
        """Carry out one checked call; the text that the policy sees. Raises InfrastructureError."""
        alias = str(call.arguments["model"])
        tool = {"search": self._search, "enhance_reasoning": self._reason, "answer": self._answer}[call.name]
        return await tool(alias)

    async def _ask(self, alias: str, prompt: str) -> str:
        state = self.state.render(expert_budgets(self.desk.model(alias)), self.tokenizer)
        messages = self.prompts.render(prompt, question=self.question, state=state)
        return (await self.desk.ask(alias, messages)).text

    async def _search(self, alias: str) -> str:
        query = extract_query(await self._ask(alias, "qa_search"), self.question)
        assert self.retriever is not None, "search is offered with a retriever only"
        start = time.perf_counter()
        hits = await self.retriever.search(query, self.topk, self.eid or None)
        local = count(query, self.tokenizer) * LOCAL_SEARCH_DOLLARS_PER_TOKEN
        self.desk.ledger.charge(alias, self.desk.fee("search", local), time.perf_counter() - start)
        new = self.state.add_documents(hit.text for hit in hits)
        if not new:
            return f"Query: {query}\nNo new documents."
        shown = (f"[{number}] {text[:SHOWN_CHARS]}" for number, text in enumerate(new, start=1))
        return "\n".join([f"Query: {query}", *shown])

    async def _reason(self, alias: str) -> str:
        program = extract_code(await self._ask(alias, "qa_reasoning"))
        if not program:
            return "The model wrote no program; nothing was run."
        start = time.perf_counter()
        result = await run_python(program, self.limits)
        dollars = result.seconds * self.desk.fee("sandbox_second", SANDBOX_DOLLARS_PER_S)
        self.desk.ledger.charge(alias, dollars, time.perf_counter() - start)
        output = result.stdout.strip()
        if not output:
            return "The program printed nothing" + (" within its time limit." if result.timed_out else ".")
        self.state.add_code(program, output)
        return render_program(program, output)

    async def _answer(self, alias: str) -> str:
        boxed = answers_in_box(alias, self.desk.model(alias))
        text = await self._ask(alias, "qa_answer_boxed" if boxed else "qa_answer_tag")
        self.prediction = extract_prediction(text, boxed)
        return self.prediction
