"""RULER tasks at any length: needles, variable tracking, frequent words, questions among documents.

After RULER (arXiv 2404.06654), with our own wording and word lists. Inputs: task, length in tokens, a tokenizer, a pool of
documents for essays, questions for `qa_1`. Invariants: a sample is a function of (seed, task, length, index) and the
tokenizer; context and question together have at most `length - reserve` tokens and, where the material allows, at
least 95% of that; every wanted output occurs in the context.
Departures: keys are three words, essays are the user's passages, `fwe` has no filler word, depths are uniform.
Leaves out: scoring (`reward`), files (`data`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentic.common.errors import ConfigError
from agentic.memagent.data_documents import DocumentPool, Question
from agentic.memagent.data_synthesis import arrange, render_documents
from agentic.memagent.ruler_text import (
    essay_sentences,
    make_keys,
    make_numbers,
    make_uuids,
    make_words,
    needle,
    noise_sentences,
    scatter,
)

NEEDLES = 4
CHAIN_HOPS = 4
FREQUENT_WORDS = 3
ZIPF_EXPONENT = 2.0
LEAST_FILL = 0.95
FIT_ROUNDS = 8


class Sample(NamedTuple):
    """One sample; `qa` tells that any of `outputs` is a right answer, otherwise all are wanted."""

    context: str
    question: str
    outputs: list[str]
    evidence: list[float]
    qa: bool = False


@dataclass(frozen=True)
class Material:
    """What the tasks are made of; either may be empty for tasks that do not need it."""

    pool: DocumentPool
    questions: Sequence[Question] = ()
    seed: int = 0


Maker = Callable[[random.Random, int, int, Material], Sample]
"""(generator, size in sentences, words or documents, index of the sample, material) -> sample."""


def _needles(haystack: str, kind: str = "number", keys: int = 1, values: int = 1, asked: int = 1) -> Maker:
    """`keys` keys with `values` values each are hidden; the first `asked` keys are asked for.

    `haystack` is `noise`, `essay` or `needles`: nothing but further keys, in which case `keys` is ignored.
    """

    def make(rng: random.Random, size: int, _index: int, material: Material) -> Sample:
        count = max(size, asked) if haystack == "needles" else keys
        names = make_keys(rng, count)
        stock = (make_uuids if kind == "uuid" else make_numbers)(rng, count * values)
        names_shown = make_uuids(rng, count) if haystack == "needles" and kind == "uuid" else names
        pairs = [(name, stock[number * values + k]) for number, name in enumerate(names_shown) for k in range(values)]
        lines = [needle(kind, name, value) for name, value in pairs]
        wanted = {needle(kind, name, value): value for name, value in pairs[: asked * values]}
        rng.shuffle(lines)
        straw = {"noise": noise_sentences, "needles": lambda _: []}.get(
            haystack, lambda count: essay_sentences(material.pool, rng, count)
        )(size)
        sentences, depths = scatter(straw, lines, rng)
        depth_of = dict(zip(lines, depths, strict=True))
        subject = " and ".join(names_shown[:asked])
        plural = "s" if asked * values > 1 else ""
        question = f"What {'are all the' if plural else 'is the'} secret {kind}{plural} of {subject}?"
        return Sample(" ".join(sentences), question, list(wanted.values()), sorted(depth_of[line] for line in wanted))

    return make


def _variables(rng: random.Random, size: int, _index: int, _material: Material) -> Sample:
    """One chain of assignments in noise; all variables that hold its value are wanted."""
    names = [word.upper() for word in make_words(rng, CHAIN_HOPS + 1, 5)]
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {after} = VAR {before}." for before, after in zip(names, names[1:], strict=False)]
    sentences, depths = scatter(noise_sentences(size), lines, rng)
    question = f"Which variables hold the value {value}, directly or through other variables? List all of them."
    return Sample(" ".join(sentences), question, names, depths)


def _frequent_words(rng: random.Random, size: int, _index: int, _material: Material) -> Sample:
    """Meaningless words with Zipf counts, shuffled; the three most frequent ones are wanted."""
    vocabulary = make_words(rng, max(size // 10, FREQUENT_WORDS + 1), 6)
    scale = size / sum((rank + 1) ** -ZIPF_EXPONENT for rank in range(len(vocabulary)))
    counts = [max(1, round(scale * (rank + 1) ** -ZIPF_EXPONENT)) for rank in range(len(vocabulary))]
    counts[:FREQUENT_WORDS] = [count + FREQUENT_WORDS - rank for rank, count in enumerate(counts[:FREQUENT_WORDS])]
    words = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    question = f"Which {FREQUENT_WORDS} words of the text are the most frequent ones?"
    return Sample(" ".join(words), question, vocabulary[:FREQUENT_WORDS], [])


def _question_answering(_rng: random.Random, size: int, index: int, material: Material) -> Sample:
    """A question whose documents stand among `size` others."""
    question = material.questions[index]
    total = len(question.own) + size
    order = arrange(question, material.pool, total, material.seed)
    text = render_documents([material.pool[place] for place in order.indices])
    depths = [place / total for place in order.evidence]
    return Sample(text, question.text, list(question.answers), depths, qa=True)


TASKS: dict[str, Maker] = {
    "niah_single_1": _needles("noise"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", "uuid"),
    "niah_multikey_1": _needles("essay", keys=NEEDLES),
    "niah_multikey_2": _needles("needles"),
    "niah_multikey_3": _needles("needles", "uuid"),
    "niah_multivalue": _needles("essay", values=NEEDLES),
    "niah_multiquery": _needles("essay", keys=NEEDLES, asked=NEEDLES),
    "vt": _variables,
    "fwe": _frequent_words,
    "qa_1": _question_answering,
}
ESSAY_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")


def check_material(task: str, material: Material) -> None:
    """Raises ConfigError naming the flag whose file a task needs."""
    if task in ESSAY_TASKS and not len(material.pool):
        raise ConfigError(f"--task {task}: needs text to hide things in; give --passages FILE")
    if task == "qa_1" and not material.questions:
        raise ConfigError("--task qa_1: needs --questions FILE, and --passages FILE for the other documents")


def make_samples(
    task: str, length: int, count: int, tokenizer: Any, material: Material, reserve: int
) -> Iterator[Sample]:
    """`count` samples of at most `length - reserve` tokens (context and question).

    Raises ConfigError when the smallest sample does not fit, or the material is missing.
    """
    check_material(task, material)
    if task == "qa_1" and count > len(material.questions):
        raise ConfigError(f"--num-samples {count}: --questions holds {len(material.questions)} for qa_1")
    size = max((length - reserve) // 20, 1)
    for index in range(count):
        sample, size = _fit(task, length, index, tokenizer, material, length - reserve, size)
        yield sample


def _fit(
    task: str, length: int, index: int, tokenizer: Any, material: Material, budget: int, size: int
) -> tuple[Sample, int]:
    """The sample at the largest size found in a few rounds, and that size, which the next sample starts from."""
    fits: tuple[int, Sample] | None = None
    too_big = _largest(task, material, index) + 1
    for _ in range(FIT_ROUNDS):
        low = fits[0] if fits else 0
        size = min(max(size, low + 1), too_big - 1)
        if size <= low or size < 1:
            break
        rng = random.Random(f"{material.seed}/{task}/{length}/{index}")
        sample = TASKS[task](rng, size, index, material)
        tokens = len(tokenizer.encode(f"{sample.context}\n{sample.question}", add_special_tokens=False))
        if tokens <= budget:
            fits = (size, sample)
            if tokens >= LEAST_FILL * budget:
                break
        else:
            too_big = size
        size = int(size * 0.98 * budget / tokens)
    if fits is None:
        raise ConfigError(
            f"--lengths {length}: too short for {task} with --reserve {length - budget}; use longer ones"
        )
    return fits[1], fits[0]


def _largest(task: str, material: Material, index: int) -> int:
    """Most units that the material offers."""
    if task != "qa_1":
        return 10**8
    own = material.questions[index].own
    titles = {document.partition("\n")[0] for document in own}
    return len(material.pool) - sum(len(material.pool.by_title[title]) for title in titles)
