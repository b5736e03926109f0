"""Whether the answer of an expert is right: extraction by the kind of tier, then the rule, then the judge.

Inputs: the expert's text (untrusted), the reference, a judge client. Invariants: an answer is taken from its box or tag
only, prose grants nothing; an empty or rambling prediction is wrong without a call; a judge that fails raises Unscored and
is never a score. Leaves out: the judge's protocol (`agentic.common.judge`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from agentic.common.answers import answers_equal, extract_answer_tag, extract_boxed, is_integer_label
from agentic.common.clients import Messages
from agentic.common.judge import JudgeClient, judge
from agentic.toolorchestra.parsing import without_thought

MAX_WORDS = 500
_BOXED_TIERS = ("math", "qwen")


class Grade(NamedTuple):
    """Score 0.0 or 1.0, and who gave it: `empty`, `too_long`, `rule`, `judge` or `none` (no judge there)."""

    score: float
    judged_by: str


def answers_in_box(alias: str, model: str) -> bool:
    r"""Whether this tier is asked for `\boxed{}` (mathematics and Qwen models) or for an answer tag (all others)."""
    return any(part in name.lower() for name in (alias, model) for part in _BOXED_TIERS)


def extract_prediction(text: str, boxed: bool) -> str:
    """The answer in an expert's text, empty when it has none in the form that its tier was asked for."""
    body = without_thought(text) or ""
    return ((extract_boxed(body) if boxed else extract_answer_tag(body)) or "").strip()


async def grade(
    question: str,
    prediction: str,
    label: str,
    client: JudgeClient | None,
    render_judge: Callable[..., Messages],
) -> Grade:
    """Score a prediction. The rule is final when it says equal, and for integer references when it says different.

    Raises Unscored when the judge fails or gives no verdict.
    """
    prediction, label = prediction.strip(), str(label).strip()
    if not prediction:
        return Grade(0.0, "empty")
    if len(prediction.split()) > MAX_WORDS:
        return Grade(0.0, "too_long")
    same = prediction.casefold() == label.casefold() or answers_equal(prediction, label)
    if same or (same is False and is_integer_label(label)):
        return Grade(float(same), "rule")
    judgement = await judge(question, prediction, label, client, render_judge)
    return Grade(judgement.score, judgement.judged_by)
