"""Score of a final answer: the rule first, a judging model only where the rule cannot tell.

Inputs: question, full answer text (untrusted), reference label, a frozen client and the prompt that asks it.
Invariants: the same rule decides in training and evaluation; only the judge's own output is parsed, its last verdict
wins; inside the judge's input the answer text cannot leave its quoted block, forge a verdict line or chat markup; an
empty answer is 0 without a call; a judge that cannot be reached or gives no verdict raises Unscored, never a score.
Left out: caching (`judge_cache` wraps the client), two-stage multiple choice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentic.common.answers import answers_equal, extract_answer_tag, extract_boxed, is_integer_label
from agentic.common.clients import Completion, Messages
from agentic.common.errors import InfrastructureError, PromptTooLong, Unscored

logger = logging.getLogger(__name__)

KNOWN_PAIR = {
    "question": "What is 6 * 7?",
    "right": "The product is 42.",
    "wrong": "The product is 41.",
    "label": "42",
}
_VERDICT = re.compile(r"\bverdict\b[\s*_`:=\"'-]*\b(true|false)\b", re.IGNORECASE)
QUOTE = "| "
# Control tokens of common chat templates: ChatML and Llama 3, DeepSeek (full-width bar), Gemma, Llama 2.
_CONTROL = re.compile(r"<(?=[|｜]|/?(?:start_of_turn|end_of_turn|bos|eos|s)>)|\[(?=/?INST\])")


class JudgeClient(Protocol):
    """What the judge needs of a client (`clients.FrozenClient` has it)."""

    async def complete(self, messages: Messages) -> Completion: ...


@dataclass(frozen=True)
class Judgement:
    """Score of one answer."""

    score: float
    """1.0 or 0.0, the reward."""
    acc: bool
    pred: str | None
    """Candidate taken from a box or an answer tag; None when there was neither."""
    gt: str
    judged_by: str
    """`rule`, `judge`, `empty` (no answer text) or `none` (rule could not tell, and there is no judge)."""


async def judge(
    question: str,
    answer_text: str,
    label: str,
    client: JudgeClient | None,
    prompt_messages_fn: Callable[..., Messages],
) -> Judgement:
    """Score `answer_text` against `label`; `client=None` means rule only (what the rule cannot confirm scores 0).

    `prompt_messages_fn(question=, answer=, label=)` renders the judge's chat prompt; `answer` arrives quoted.
    The rule is final when it says equal, and for integer labels also when it says different.
    Raises Unscored when the judge fails or gives no verdict.
    """
    label = str(label)
    if not answer_text.strip():
        return Judgement(0.0, False, None, label, "empty")
    pred = extract_candidate(answer_text)
    same = None if pred is None else answers_equal(pred, label)
    if same or (same is False and is_integer_label(label)):
        return Judgement(float(same), same, pred, label, "rule")
    if client is None:
        return Judgement(0.0, False, pred, label, "none" if same is None else "rule")
    messages = prompt_messages_fn(question=question, answer=quote(answer_text), label=label)
    acc = await _ask(client, messages)
    return Judgement(float(acc), acc, pred, label, "judge")


async def check_judge(client: JudgeClient, prompt_messages_fn: Callable[..., Messages]) -> dict[str, bool | str]:
    """The judge on a known right and a known wrong answer: tells a broken judge from a weak policy."""
    verdicts: dict[str, bool | str] = {}
    for name in ("right", "wrong"):
        try:
            question, label = KNOWN_PAIR["question"], KNOWN_PAIR["label"]
            verdicts[name] = (await judge(question, KNOWN_PAIR[name], label, client, prompt_messages_fn)).acc
        except Unscored as error:
            verdicts[name] = str(error)[:200]
    if verdicts != {"right": True, "wrong": False}:
        logger.warning("the judge errs on a known pair (%s): scores that it gives mean little", verdicts)
    return verdicts


def extract_candidate(answer_text: str) -> str | None:
    """The last box, else the last answer tag; prose is never searched for an answer."""
    boxed = extract_boxed(answer_text)
    return boxed if boxed is not None else extract_answer_tag(answer_text)


def parse_verdict(output: str) -> bool | None:
    """The last `VERDICT: True` or `VERDICT: False` of the judge's output; None without one."""
    verdicts = _VERDICT.findall(output)
    return verdicts[-1].lower() == "true" if verdicts else None


def quote(text: str) -> str:
    """Every line behind a bar, and control-token spellings broken up, so that the text stays data in a prompt."""
    inert = _CONTROL.sub(lambda match: match.group() + " ", text)
    inert = re.sub(r"\bverdict\b", "(verdict)", inert, flags=re.IGNORECASE)
    return "\n".join(QUOTE + line for line in inert.splitlines())


async def _ask(client: JudgeClient, messages: Messages) -> bool:
    try:
        completion = await client.complete(messages)
    except (InfrastructureError, PromptTooLong) as error:
        raise Unscored(f"judge failed: {error}") from error
    verdict = parse_verdict(completion.text)
    if verdict is None:
        raise Unscored(f"no verdict in the judge's output: {completion.text[-200:]!r}")
    return verdict
