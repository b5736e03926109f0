"""The loop of MemAgent (arXiv 2507.02259, section 2): read chunk after chunk, rewrite the memory, answer from it.

Input: the shared agent, a question, a document. Invariants: each turn is a conversation of its own, whose prompt is made
of ids (template, question, memory, chunk) and kept exactly as it was sent; the memory is the ids that were generated,
without their stop ids, cut at the budget; no call is made before its chunk is encoded, and none waits for a later one.
Leaves out: scoring, samples, what is done after a failure (`rollout`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic.common.errors import InfrastructureError
from agentic.common.turns import TurnRecord
from agentic.memagent.agent import MemAgent


@dataclass
class Reading:
    """What came of one question."""

    turns: list[TurnRecord] = field(default_factory=list)
    """All conversations in order, or only the answer (`keep_turns`)."""
    trace: list[dict[str, Any]] = field(default_factory=list)
    """One entry a turn: role, text and sizes."""
    counters: Counter[str] = field(default_factory=Counter)
    """Nothing is cut silently: every cut, empty and cleaned memory is counted here."""
    memory: str = ""
    """The last memory as text."""
    answer: str = ""
    """Text of the answer turn, prefill included."""

    @property
    def truncated(self) -> bool:
        """Whether any turn reached its generation limit."""
        return any(entry["finish_reason"] == "length" for entry in self.trace)


class Reader:
    """One question about one document. Build a new one for every question."""

    def __init__(
        self,
        agent: MemAgent,
        question: str,
        text: str,
        sampling_params: Mapping[str, Any],
        evaluation: bool = False,
        keep_turns: bool = True,
        session_id: str | None = None,
    ) -> None:
        """Raises BadRecord for a question that is no text, ConfigError for one that is too long and is not to be cut."""
        self.agent = agent
        self.text = text
        self.sampling_params = sampling_params
        self.evaluation = evaluation
        self.keep_turns = keep_turns
        self.session_id = session_id
        self.reading = Reading()
        self.question, cut = agent.encode_question(question)
        self.memory: list[int] = list(agent.placeholder)
        self.reading.counters.update(question_tokens=len(self.question), question_tokens_cut=cut)

    async def read(self) -> Reading:
        """The whole loop; returns `reading`, which is filled as far as it got when an error is raised.

        Raises:
            InfrastructureError: a call failed after its retries, or the engine aborted it.
            ConfigError: the document is too long and is not to be cut.
        """
        # Encoding leaves the interpreter free for the other readings when it runs in a thread.
        chunks = await asyncio.to_thread(self.agent.open, self.agent.document(self.text), self.evaluation)
        self.reading.counters["context_tokens_left_out"] = chunks.skip
        for number in itertools.count():
            chunk = await asyncio.to_thread(chunks.take, number)
            if not chunk:
                break
            turn = await self._ask("memory", question=self.question, memory=self.memory, chunk=chunk)
            self._rewrite(turn)
            self.reading.counters.update(chunks=1, context_tokens_read=len(chunk))
        self.reading.memory = self._text(self.memory)
        turn = await self._ask("answer", question=self.question, memory=self.memory)
        self.reading.answer = self.agent.prefill + self._text(self._clean(turn)[0])
        return self.reading

    def _rewrite(self, turn: TurnRecord) -> None:
        """The next memory: what the turn generated, or what the settings say when that is nothing."""
        counters, config = self.reading.counters, self.agent.config
        ids, dropped = self._clean(turn)
        counters["memory_ids_dropped"] += dropped
        counters["memories_at_limit"] += turn.finish_reason == "length"
        if ids:
            self.memory = ids[: config.memory_tokens]
        else:
            counters["empty_memories"] += 1
            if config.on_empty == "placeholder":
                self.memory = list(self.agent.placeholder)
        counters["memory_tokens"] += len(self.memory)
        self.reading.trace[-1]["memory_tokens"] = len(self.memory)

    async def _ask(self, role: str, **slots: Sequence[int]) -> TurnRecord:
        config = self.agent.config
        start = time.monotonic()
        turn = await self.agent.policy.generate_ids(
            self.agent.templates[role].render(**slots),
            self._sampling(config.memory_tokens if role == "memory" else config.answer_tokens),
            role_name=role,
            trained=role == "memory" or config.train_answer,
            session_id=self.session_id,
        )
        if self.keep_turns or role == "answer":
            self.reading.turns.append(turn)
        self._record(turn, time.monotonic() - start)
        if turn.finish_reason == "abort":
            raise InfrastructureError("engine_aborted", f"during {role} turn {len(self.reading.trace)}")
        return turn

    def _sampling(self, budget: int) -> dict[str, Any]:
        """The hook's parameters with the budget of this kind of turn; the hook's own limit holds as well."""
        limit = self.sampling_params.get("max_new_tokens") or budget
        return {**self.sampling_params, "max_new_tokens": min(limit, budget)}

    def _clean(self, turn: TurnRecord) -> tuple[list[int], int]:
        return self.agent.clean(turn.response_ids, self.sampling_params.get("stop_token_ids") or ())

    def _text(self, ids: Sequence[int]) -> str:
        return self.agent.tokenizer.decode(list(ids))

    def _record(self, turn: TurnRecord, seconds: float) -> None:
        self.reading.trace.append(
            {
                "role": turn.role,
                "step": len(self.reading.trace) + 1,
                "text": turn.text,
                "finish_reason": turn.finish_reason,
                "trained": turn.trained,
                "prompt_tokens": turn.prompt_length,
                "completion_tokens": turn.response_length,
                "cached_tokens": turn.cached_tokens,
                "weight_version": turn.weight_version,
                "seconds": seconds,
            }
        )
