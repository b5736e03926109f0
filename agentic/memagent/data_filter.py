"""Closed-book filter: leaves out questions that a model answers without any document.

Inputs: questions, OpenAI chat endpoints. Every endpoint is asked `tries` times; a question is known when any reply is right.
Invariants: every reply is one line of a result file, so a stopped filter goes on where it was; a question is only kept
when all its replies are there, a failed request decides nothing; counts by kind of answer are given before and after.
Departure from the published recipe: references are searched for as whole words, and yes/no only where a reply gives its
answer, because "no" is found inside almost any text. Leaves out: starting the servers.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentic.common.answers import extract_boxed
from agentic.common.clients import FrozenClient, check_reachable
from agentic.common.errors import ConfigError, InfrastructureError
from agentic.common.evaluation import Job, Line, Outcome, RunStore, check_protocol, exclusive, run_jobs
from agentic.common.evaluation_provenance import sha256_file
from agentic.common.evaluation_scores import qa_normalize
from agentic.common.roles import Role
from agentic.memagent.data_documents import Question

DATASET = "closed_book"
YES_NO = ("yes", "no")
INSTRUCTION = (
    "Answer the question from what you know. If you are not sure, give your best guess. End with the answer alone in "
    "\\boxed{}."
)


@dataclass(frozen=True)
class FilterSettings:
    """How the models are asked; defaults are those of the published filter."""

    tries: int = 2
    temperature: float = 1.0
    top_p: float = 0.7
    max_new_tokens: int = 512
    timeout_s: float = 120.0
    concurrency: int = 64
    api_key_env: str | None = None


def parse_endpoints(entries: Sequence[str], settings: FilterSettings) -> dict[str, Role]:
    """Roles by arm name, from `MODEL=URL`. Raises ConfigError naming the entry."""
    roles: dict[str, Role] = {}
    for entry in entries:
        model, equals, url = entry.partition("=")
        name = re.sub(r"[^\w-]+", "_", model)
        if not equals or not model or not url.startswith(("http://", "https://")) or name in roles:
            raise ConfigError(
                f"--endpoint {entry}: write MODEL=URL, each model once, the URL with http:// or https://"
            )
        roles[name] = Role(
            name=name,
            url=url.rstrip("/"),
            api="chat",
            model=model,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_new_tokens=settings.max_new_tokens,
            timeout_s=settings.timeout_s,
            max_concurrency=settings.concurrency,
            api_key_env=settings.api_key_env,
        )
    return roles


def is_known(reply: str, references: Sequence[str]) -> bool:
    """Whether a reply contains a right answer: in its box, or a reference as whole words anywhere in it.

    `yes` and `no` count in the box or as the first or last word.
    """
    boxed, words = qa_normalize(extract_boxed(reply) or ""), qa_normalize(reply).split()
    for reference in map(qa_normalize, references):
        if not reference:
            continue
        places = [words[0], words[-1]] if words and reference in YES_NO else []
        inside = reference not in YES_NO and f" {reference} " in f" {' '.join(words)} "
        if boxed == reference or reference in places or inside:
            return True
    return False


def answer_kind(question: Question) -> str:
    """`yes_no`, `number` or `text`, by the first reference."""
    answer = qa_normalize(question.answers[0])
    if answer in YES_NO:
        return "yes_no"
    return "number" if re.fullmatch(r"[\d.,\s]+", answer) else "text"


def ask(
    questions: Sequence[Question], roles: Mapping[str, Role], settings: FilterSettings, folder: Path, source: Path
) -> list[dict[str, Line]]:
    """All replies, one mapping from question id to line for each model and try; `folder` holds what was asked already.

    Raises ConfigError when the folder belongs to another filter, RoleUnavailable, or TooManyFailures.
    """
    limits = {"tries": settings.tries, "temperature": settings.temperature, "top_p": settings.top_p}
    protocol = {**limits, "max_new_tokens": settings.max_new_tokens, "questions": sha256_file(source)}
    with exclusive(folder):
        check_protocol(folder, protocol)
        store = RunStore(folder)
        runs = [(name, run) for run in range(settings.tries) for name in roles]
        jobs = [Job(DATASET, name, run, question) for name, run in runs for question in questions]
        asyncio.run(_ask_all(jobs, roles, store, settings.concurrency))
        return [store.load(DATASET, name, run) for name, run in runs]


async def _ask_all(jobs: Sequence[Job], roles: Mapping[str, Role], store: RunStore, concurrency: int) -> None:
    clients = {name: FrozenClient(role) for name, role in roles.items()}
    for role in roles.values():
        await check_reachable(role)
    await run_jobs(jobs, partial(_answer, clients), store, concurrency)


async def _answer(clients: Mapping[str, FrozenClient], job: Job) -> Outcome:
    question: Question = job.question
    messages = [{"role": "user", "content": f"{question.text}\n\n{INSTRUCTION}"}]
    try:
        reply = await clients[job.arm].complete(messages)
    except InfrastructureError as error:
        details = {"failure_detail": str(error)}
        return Outcome("", None, "none", failure_reason=error.reason, details=details)
    return Outcome(reply.text, float(is_known(reply.text, question.answers)), "rule", seconds=reply.seconds)


def decide(
    questions: Sequence[Question], replies: Sequence[Mapping[str, Line]]
) -> tuple[list[Question], list[Question], dict[str, Any]]:
    """Questions that no reply knew, questions that are undecided because a request failed, and the counts."""
    kept: list[Question] = []
    undecided: list[Question] = []
    for question in questions:
        scores = [run.get(question.id, {"score": None})["score"] for run in replies]
        if 1.0 in scores:
            continue
        (undecided if None in scores else kept).append(question)
    counts = {
        "read": len(questions),
        "known": len(questions) - len(kept) - len(undecided),
        "undecided": len(undecided),
        "kept": len(kept),
        "kinds_before": dict(Counter(map(answer_kind, questions))),
        "kinds_after": dict(Counter(map(answer_kind, kept))),
    }
    return kept, undecided, counts
