"""Stand-ins for question answering: experts and a retriever that are scripted, a tokenizer that counts words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from agentic.common.clients import Completion
from agentic.common.ledger import CostLedger
from agentic.toolorchestra.experts import ExpertReply

MODELS = {"search-1": "gpt-5", "search-2": "Qwen/Qwen3-32B", "reasoner-1": "coder", "answer-1": "gpt-5"}
MODELS |= {"answer-4": "Qwen/Qwen3-32B", "answer-math-1": "Qwen/Qwen2.5-Math-72B-Instruct"}


class WordTokenizer:
    """A word is a token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(range(len(text.split())))


class ScriptedDesk:
    """Answers with `script(alias, prompt)`; 1 dollar and 1 second a call."""

    def __init__(self, script: Callable[[str, str], str], models: Mapping[str, str] = MODELS) -> None:
        self.script, self.models = script, dict(models)
        self.ledger = CostLedger()
        self.asked: list[tuple[str, str]] = []
        self.fees: dict[str, float] = {}

    def aliases(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(alias for alias in self.models if alias.startswith(prefix))

    def describe(self, prefix: str) -> str:
        return "\n".join(f"{alias}: $1.25 in, $10 out, 96 s" for alias in self.aliases(prefix))

    def model(self, alias: str) -> str:
        return self.models[alias]

    def fee(self, name: str, default: float) -> float:
        return self.fees.get(name, default)

    async def ask(self, alias: str, messages: Sequence[Mapping[str, Any]], *_: Any, **__: Any) -> ExpertReply:
        prompt = str(messages[-1]["content"])
        self.asked.append((alias, prompt))
        self.ledger.record(alias, 10, 5, 1.0, 1.0)
        return ExpertReply(self.script(alias, prompt), (), 10, 5, 1.0)


class ListRetriever:
    """Gives the documents of a list, and keeps what it was asked for."""

    def __init__(self, *documents: str) -> None:
        self.documents = documents
        self.queries: list[tuple[str, int, str | None]] = []

    async def search(self, query: str, topk: int, eid: str | None) -> list[Any]:
        self.queries.append((query, topk, eid))
        return [SimpleNamespace(text=text) for text in self.documents[:topk]]


class CountingJudge:
    """A judge with one verdict."""

    def __init__(self, verdict: str = "VERDICT: True") -> None:
        self.verdict, self.calls = verdict, 0

    async def complete(self, messages: Any) -> Completion:
        self.calls += 1
        return Completion(self.verdict, "stop", 1, 1, 0.0)
