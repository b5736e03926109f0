"""Long contexts around a question: its own documents among random others, shuffled and numbered.

Inputs: a question, the pool, the number of documents, a seed. Invariants: every own document is there exactly once; the
same (seed, question index, number of documents) gives the same context in every process; without `compat_shuffle` the
places of the own documents differ from question to question, with it they are those of the published files, which are
the same for every question. Leaves out: files (`data`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from agentic.common.errors import ConfigError
from agentic.memagent.data_documents import DocumentPool, Question, title_of

# The published files shuffle a list that begins with the own documents by a generator with this constant seed, so for a
# given length those stand in the same places in every context (200 documents: 7, 10, 17, 81, 88, 96, 109, ...).
COMPAT_SEED = 4


class Arrangement(NamedTuple):
    """Documents of one context as indices into the pool, in order."""

    indices: list[int]
    own: tuple[int, ...]
    """1-based places of the question's own documents, ascending."""
    evidence: tuple[int, ...]
    """1-based places of those that are needed for the answer, ascending."""


def arrange(
    question: Question, pool: DocumentPool, num_docs: int, seed: int, compat_shuffle: bool = False
) -> Arrangement:
    """Choose and order `num_docs` documents. Raises ConfigError when the pool is too small."""
    own = [pool.index(document) for document in question.own]
    others = _others(question, pool, own)
    rng = random.Random(f"{seed}/{question.index}/{num_docs}")
    wanted = num_docs - len(own)
    if wanted < 0 or wanted > len(pool) - len(others):
        raise ConfigError(
            f"--num-docs {num_docs}: question {question.id} has {len(own)} documents of its own and the pool offers "
            f"{len(pool) - len(others)} others; choose from {len(own)} to {len(own) + len(pool) - len(others)}, or "
            "give more --passages"
        )
    chosen = (
        own + [place for place in rng.sample(range(len(pool)), wanted + len(others)) if place not in others][:wanted]
    )
    order = list(range(num_docs))
    (random.Random(COMPAT_SEED) if compat_shuffle else rng).shuffle(order)
    places = [place for place, number in enumerate(order, start=1) if number < len(own)]
    evidence = [place for place, number in enumerate(order, start=1) if number in question.evidence]
    return Arrangement([chosen[number] for number in order], tuple(places), tuple(evidence))


def _others(question: Question, pool: DocumentPool, own: Sequence[int]) -> set[int]:
    """What is no distractor: the own documents and any other version of them (same title)."""
    titles = map(title_of, question.own)
    return {*own, *(place for title in titles for place in pool.by_title[title])}


def render_documents(documents: Sequence[str]) -> str:
    """The context: documents under numbered headings, blank lines between them."""
    return "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1))
