"""Evaluation questions: loaders for the public formats of the benchmarks, and the score of an answer.

Inputs: a file in one of the formats under which a benchmark is published (field names differ between publishers, all
common ones are known). Invariants: all arms of an evaluation get the same `prompt`, options and numbers included;
records that cannot be used (hidden label, needs an attachment, unanswerable) are counted by reason; anything else that
does not fit is an error naming file and line; the order of options is a function of the question alone.
Scores: integers by rule only; other mathematics rule first, then judge; QA by normalised match, then judge (word F1 is
recorded beside it); multiple choice by letter, then content, then judge; game of 24 by exact arithmetic.
Leaves out: downloading; questions with images or files.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from agentic.agentflow.data import clean_question
from agentic.agentflow.rollout import question_of
from agentic.common.answers import extract_answer_tag, extract_boxed, is_integer_label
from agentic.common.clients import Messages
from agentic.common.errors import ConfigError
from agentic.common.evaluation_records import Record, find_field, need_field, read_records
from agentic.common.evaluation_scores import LETTERS, option_of, qa_exact, qa_f1, qa_normalize, reaches
from agentic.common.judge import JudgeClient, Judgement, extract_candidate, judge
from agentic.common.roles import nearest

QUESTION_FIELDS = ("query", "question", "Question", "problem", "Problem", "prompt")
ANSWER_FIELDS = ("answer", "Answer", "label", "result", "golden_answers", "answers", "final_answer", "Final answer")
ID_FIELDS = ("id", "_id", "pid", "ID", "unique_id", "task_id", "qid", "Record ID")
GPQA_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class Question:
    """One question as every arm sees it, with what is needed to score an answer."""

    id: str
    prompt: str
    labels: tuple[str, ...]
    """Accepted references; the first is the one shown to the judge together with the others."""
    kind: str
    """`integer`, `math`, `qa`, `choice` or `game24`."""
    options: tuple[str, ...] = ()
    """Contents of the options A, B, ... of a multiple-choice question."""
    numbers: tuple[int, ...] = ()
    """The four numbers of the game of 24."""


class Skip(NamedTuple):
    """A record that cannot be used, with the reason it is counted under."""

    reason: str


Reader = Callable[[Record, str, str], "Question | Skip"]


def load_questions(benchmark: str, path: Path, limit: int | None = None) -> tuple[list[Question], dict[str, int]]:
    """Questions of a benchmark file in its order (the first `limit`), and the number of skipped records by reason.

    Raises FileNotFoundError or ConfigError.
    """
    if benchmark not in BENCHMARKS:
        raise ConfigError(f"--data {benchmark}=...: no such benchmark{nearest(benchmark, BENCHMARKS)}")
    questions: dict[str, Question] = {}
    skipped: Counter[str] = Counter()
    for number, (where, record) in enumerate(read_records(path)):
        if limit is not None and len(questions) == limit:
            break
        question = BENCHMARKS[benchmark](record, where, _id_of(record, number))
        if isinstance(question, Skip):
            skipped[question.reason] += 1
        elif question.id in questions:
            raise ConfigError(f"{where}: the id {question.id!r} occurs twice")
        else:
            questions[question.id] = question
    if not questions:
        raise ConfigError(f"{path}: no usable question of {benchmark} ({dict(skipped) or 'empty file'})")
    return list(questions.values()), dict(skipped)


def _id_of(record: Record, number: int) -> str:
    metadata = record.get("metadata")
    nested = metadata if isinstance(metadata, Mapping) else {}
    found = find_field({**nested, **record}, *ID_FIELDS)
    return str(number if found is None else found)


# --------------------------------------------------------------------------------------------------------------------
# Readers, one per family of formats.


def _text(record: Record, where: str) -> str:
    value = need_field(record, where, *QUESTION_FIELDS)
    text = clean_question(question_of(value)) if isinstance(value, (str, list)) else ""
    if not text:
        raise ConfigError(f"{where}: the question is empty")
    return text


def _answers(record: Record, where: str) -> tuple[str, ...]:
    value = need_field(record, where, *ANSWER_FIELDS)
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(answer).strip() for answer in values if str(answer).strip())


def _math(record: Record, where: str, id_: str) -> Question | Skip:
    """AIME, AMC, MATH-type: `answer` or `label`; without one the last box of `solution`; GSM8K: behind `####`."""
    if find_field(record, *ANSWER_FIELDS) is None and find_field(record, "solution", "Solution"):
        label = extract_boxed(str(find_field(record, "solution", "Solution"))) or ""
    else:
        label = next(iter(_answers(record, where)), "").rpartition("####")[2].strip()
    if not label:
        return Skip("no_label")
    label = _whole_number(label)
    return Question(id_, _text(record, where), (label,), "integer" if is_integer_label(label) else "math")


def _whole_number(label: str) -> str:
    """`27.0` -> `27` (how AMC 23 is published), `1,200` -> `1200`; anything else as it is."""
    plain = label.replace(",", "")
    whole = re.fullmatch(r"[+-]?\d+\.0*", plain) or re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", label)
    return str(int(Fraction(plain.rstrip(".")))) if whole else label


def _integer(record: Record, where: str, id_: str) -> Question | Skip:
    question = _math(record, where, id_)
    if isinstance(question, Question) and question.kind != "integer":
        raise ConfigError(f"{where}: the answer {question.labels[0]!r} is no integer; for such data use math=PATH")
    return question


def _qa(record: Record, where: str, id_: str) -> Question | Skip:
    """Bamboogle, HotpotQA, 2Wiki, MuSiQue, GAIA: one answer or several accepted ones."""
    if record.get("answerable") is False:
        return Skip("unanswerable")
    if record.get("file_name") or record.get("image"):
        return Skip("needs_a_file")
    aliases = record.get("answer_aliases") or ()
    labels = (*_answers(record, where), *(str(alias) for alias in aliases))
    if not labels or labels == ("?",):
        return Skip("no_label")
    return Question(id_, _text(record, where), labels, "qa")


def _gpqa(record: Record, where: str, id_: str) -> Question | Skip:
    """The published table (one right and three wrong answers); anything else as `_choice`."""
    if "Correct Answer" not in record:
        return _choice(record, where, id_)
    right = str(record["Correct Answer"]).strip()
    options = [right, *(str(need_field(record, where, name)).strip() for name in GPQA_WRONG)]
    text = _text(record, where)
    random.Random(text).shuffle(options)
    return _choice_question(id_, text, options, LETTERS[options.index(right)])


def _choice(record: Record, where: str, id_: str) -> Question | Skip:
    """`options` or `choices` as mapping or list (of texts or of {key, value}); the answer as letter or as content."""
    given = need_field(record, where, "options", "choices")
    options = list(given.values()) if isinstance(given, Mapping) else list(given)
    options = [str(option["value"] if isinstance(option, Mapping) else option).strip() for option in options]
    # Where both are there, `answer` is the content and `answer_idx` the letter.
    answer = str(need_field(record, where, "answer_idx", "answer", "Answer", "label")).strip()
    options = [re.sub(rf"^\(?{letter}[.):]\s+", "", option) for letter, option in zip(LETTERS, options, strict=False)]
    letter = option_of(answer, options)
    if letter is None:
        raise ConfigError(f"{where}: the answer {answer!r} is none of the {len(options)} options")
    return _choice_question(id_, _text(record, where), options, letter)


def _choice_question(id_: str, text: str, options: Sequence[str], letter: str) -> Question:
    listed = "\n".join(f"{name}. {option}" for name, option in zip(LETTERS, options, strict=False))
    prompt = f"{text}\n\nOptions:\n{listed}\n\nAnswer with the letter of the right option."
    return Question(id_, prompt, (letter,), "choice", options=tuple(options))


def _game24(record: Record, where: str, id_: str) -> Question | Skip:
    """Numbers from `numbers`, `Puzzles` (`1 1 4 6`), or in square brackets inside the question."""
    if record.get("solvable") is False:
        return Skip("unsolvable")
    value = need_field(record, where, "numbers", "Puzzles", "puzzle", *QUESTION_FIELDS)
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    listed = re.findall(r"\[([\d,\s]+)\]", text)
    numbers = tuple(int(number) for number in re.findall(r"\d+", listed[-1] if listed else text))
    if len(numbers) != 4:
        raise ConfigError(f"{where}: expected four numbers, found {len(numbers)} in {text[:80]!r}")
    first, last = ", ".join(map(str, numbers[:3])), numbers[3]
    prompt = (
        f"Make 24 from the numbers {first} and {last}. Use each of them exactly once, with + - * / and brackets only. "
        "The final answer is the expression itself, for example (1 + 3) * 6 * 1 for the numbers 1, 1, 3 and 6."
    )
    return Question(id_, prompt, ("24",), "game24", numbers=numbers)


BENCHMARKS: dict[str, Reader] = {
    "aime24": _integer,
    "amc23": _math,
    "gsm8k": _math,
    "math": _math,
    "bamboogle": _qa,
    "hotpotqa": _qa,
    "2wiki": _qa,
    "musique": _qa,
    "gaia": _qa,
    "gpqa": _gpqa,
    "medqa": _choice,
    "gameof24": _game24,
}


# --------------------------------------------------------------------------------------------------------------------
# Scores.


class Scored(NamedTuple):
    """Judgement of an answer, what it counts as in a majority vote, and further measures."""

    judgement: Judgement
    vote: str | None
    measures: dict[str, float]


async def score_answer(
    question: Question, answer: str, client: JudgeClient | None, render_judge: Callable[..., Messages]
) -> Scored:
    """Score the full text of an answer; `client=None` means rules only. An empty text is 0 for every kind.

    Raises Unscored when the judge fails or gives no verdict.
    """
    if not answer.strip():
        return Scored(Judgement(0.0, False, None, question.labels[0], "empty"), None, {})
    if question.kind in ("integer", "math"):
        asked = None if question.kind == "integer" else client
        judgement = await judge(question.prompt, answer, question.labels[0], asked, render_judge)
        return Scored(judgement, judgement.pred, {})
    if question.kind == "game24":
        pred = extract_candidate(answer)
        right = pred is not None and reaches(pred, question.numbers)
        return Scored(_by_rule(right, pred, "24"), pred, {})
    if question.kind == "choice":
        return await _score_choice(question, answer, client, render_judge)
    return await _score_qa(question, answer, client, render_judge)


async def _score_choice(
    question: Question, answer: str, client: JudgeClient | None, render_judge: Callable[..., Messages]
) -> Scored:
    label, pred = question.labels[0], extract_candidate(answer)
    letter = None if pred is None else option_of(pred, question.options)
    if letter is not None:
        return Scored(_by_rule(letter == label, letter, label), letter, {})
    reference = f"{label}. {question.options[LETTERS.index(label)]}"
    return Scored(await _ask_judge(question, answer, reference, pred, client, render_judge), pred, {})


async def _score_qa(
    question: Question, answer: str, client: JudgeClient | None, render_judge: Callable[..., Messages]
) -> Scored:
    tagged = extract_answer_tag(answer)
    pred = tagged if tagged is not None else extract_boxed(answer)
    span = answer.strip() if pred is None else pred
    measures = {"f1": qa_f1(span, question.labels)}
    vote = qa_normalize(span) or None
    if qa_exact(span, question.labels):
        return Scored(_by_rule(True, pred, question.labels[0]), vote, measures)
    reference = " or ".join(question.labels)
    return Scored(await _ask_judge(question, answer, reference, pred, client, render_judge), vote, measures)


async def _ask_judge(
    question: Question,
    answer: str,
    reference: str,
    pred: str | None,
    client: JudgeClient | None,
    render_judge: Callable[..., Messages],
) -> Judgement:
    """The judge's verdict on what the rules of QA and multiple choice could not confirm; without a judge it is 0."""
    if client is None:
        return Judgement(0.0, False, pred, reference, "none")
    return await judge(question.prompt, answer, reference, client, render_judge)


def _by_rule(right: bool, pred: str | None, label: str) -> Judgement:
    return Judgement(float(right), right, pred, label, "rule")
