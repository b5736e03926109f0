r"""Scores of an answer against its references: the training reward of the paper and the evaluation metrics.

Inputs: the text of the answer turn (untrusted) and one or more references. Invariants: a score is in [0, 1]; what is
empty after normalisation scores 0 in every metric; over several references the best one counts. The prediction is the
last `\boxed{}` for every metric but `multi_value`, which looks into the whole answer.
Leaves out: judges by language model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentic.common.answers import extract_boxed
from agentic.common.evaluation_scores import qa_f1
from agentic.common.evaluation_scores import qa_normalize as normalize

Metric = Callable[[str, str], float]

# The box without braces, up to the next dollar; a brace after the blanks makes it the ordinary form.
_SPACED_BOX = re.compile(r"\\boxed\s+(?![\s{])")
_DROPPED = re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\^\{\\circ\}|\^\\circ|°|\\\$|\\%|\n")
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def boxed_answer(text: str, window_chars: int = 0) -> str | None:
    r"""The last boxed answer, of `\boxed{x}` and `\boxed x$` alike; None when there is none.

    Only the last `window_chars` characters are looked at (0: all).
    """
    text = text[-window_chars:]
    spaced = list(_SPACED_BOX.finditer(text))
    if not spaced:
        return extract_boxed(text)
    rest = text[spaced[-1].end() :]
    later = extract_boxed(rest)
    return rest.partition("$")[0].strip() if later is None else later


def canonical(text: str) -> str:
    """Spelling in which the training reward compares: no case, blanks or LaTeX dressing; articles and punctuation stay."""
    text = _DROPPED.sub("", text.lower()).replace("tfrac", "frac").replace("dfrac", "frac")
    return text.replace(" .", " 0.").replace(" ", "")


def match(prediction: str, reference: str) -> float:
    """Equality in the spelling of `canonical`."""
    return float(bool(canonical(prediction)) and canonical(prediction) == canonical(reference))


def em_norm(prediction: str, reference: str) -> float:
    """Equality without case, punctuation, articles and extra blanks."""
    return float(bool(normalize(prediction)) and normalize(prediction) == normalize(reference))


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of the shares of common words; 0 when one side is yes, no or noanswer and they differ."""
    left, right = normalize(prediction), normalize(reference)
    if left != right and (left in _CLOSED_ANSWERS or right in _CLOSED_ANSWERS):
        return 0.0
    return qa_f1(prediction, [reference]) if left and right else 0.0


def sub_em(prediction: str, reference: str) -> float:
    """One contains the other: the two-way form of the published tables."""
    left, right = normalize(prediction), normalize(reference)
    return float(bool(left and right) and (left in right or right in left))


def sub_em_one_way(prediction: str, reference: str) -> float:
    """The prediction contains the reference."""
    left, right = normalize(prediction), normalize(reference)
    return float(bool(left and right) and right in left)


def multi_value(reply: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the reply, whatever their case (RULER)."""
    lowered = reply.lower()
    found = [bool(reference.strip()) and reference.lower() in lowered for reference in references]
    return sum(found) / len(found) if found else 0.0


def is_held(memory: str, references: Sequence[str], every: bool = False) -> bool:
    """Whether all words of a reference (of `every` one of them) occur in the memory: what the answer turn had to go on."""
    words = set(normalize(memory).split())
    held = [bool(normalize(reference)) and set(normalize(reference).split()) <= words for reference in references]
    return bool(held) and (all(held) if every else any(held))


METRICS: dict[str, Metric] = {"em_norm": em_norm, "f1": f1, "sub_em": sub_em, "sub_em_one_way": sub_em_one_way}
REWARDS = ("em", *METRICS, "multi_value")


def best(metric: Metric, prediction: str | None, references: Sequence[str]) -> float:
    """The metric against the reference that fits best; 0 without a prediction."""
    return max((metric(prediction, reference) for reference in references), default=0.0) if prediction else 0.0


def reward_of(name: str, reply: str, references: Sequence[str], window_chars: int = 0) -> float:
    """The reward called `name` (one of REWARDS); only `em` has the window."""
    if name == "multi_value":
        return multi_value(reply, references)
    if name == "em":
        return best(match, boxed_answer(reply, window_chars), references)
    return best(METRICS[name], boxed_answer(reply), references)


def all_scores(reply: str, references: Sequence[str]) -> dict[str, float]:
    """Every evaluation metric, best reference; `<metric>_first` takes the first reference only, as published code does."""
    prediction = boxed_answer(reply)
    scores = {name: best(metric, prediction, references) for name, metric in METRICS.items()}
    first = {f"{name}_first": best(metric, prediction, references[:1]) for name, metric in METRICS.items()}
    return {**scores, **first, "multi_value": multi_value(reply, references)}
