"""A seeded world of key-value facts in which MemAgent has something to learn on a laptop.

Purpose: documents with questions, scripted readings for the warm start and the vocabulary of a tiny tokenizer. A document is
a list of facts ("ann has 117 ."), a chunk holds 25 of them, a question asks for the number of one person, or of two whose
facts stand in different chunks. The memory is a line for each person asked for, with "none" as long as nothing is known.

Inputs: a seed. Everything here is a pure function of it.

Invariants:
* A fact is four tokens and a chunk 25 whole facts, so what the engine is shown is what the warm start showed.
* A person who is asked for has one fact in the document; all others may have several.
* Every document has a random stream of its own; the held-out files ask the same questions at every length, so that accuracies
  at two lengths differ by the length alone.
* The scripted reader overlooks one wording of a fact more often than not: greedy decoding of the warm-started model misses
  it, while sampling still finds it. What is in the memory is never lost, and no number is ever invented.

Left out: rendering to tokens and training (slime's SFT path does both).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic.memagent.prompts import PromptSet

_FIRST, _LAST = "al be co di el fa gi ho".split(), "ba dor fin gus kim lea mus na per ra ton vy".split()
NAMES = [first + last for first in _FIRST for last in _LAST]
NUMBERS = range(100, 300)  # all of three digits: "1 17" and "11 7" would be the same answer
UNKNOWN = "none"
# Wordings of a fact, with the chance that the scripted reader overlooks it although it was asked for.
OVERLOOKED = {"has": 0.03, "keeps": 0.08, "hides": 0.65}
WORDINGS, NOTE = tuple(OVERLOOKED), "has"
TOKENS_PER_FACT, FACTS_PER_CHUNK = 4, 25
TWO_FACTS = 0.4
"""Share of questions that need two facts."""
TRAIN_CHUNKS = 4
HELDOUT_CHUNKS = {"heldout": TRAIN_CHUNKS, "heldout_8": 8, "heldout_32": 32, "heldout_128": 128}
N_VALIDATION = N_LONG = 100

# The warm start, by its part done so far: the reader overlooks nothing before FAULTLESS, chunks grow until GROWN, and so does
# the share of real questions among those for MANY facts, whose many copied numbers are what teaches to look up.
ONE_CHUNK, FAULTLESS, GROWN = 0.15, 0.5, 0.55
MANY, MANY_AT_END = 5, 0.15
SMALLEST_CHUNK = 6
ROWS_PER_BLOCK = 128


@dataclass(frozen=True)
class Fact:
    """What a document or a memory says about a person."""

    name: str
    wording: str
    number: str

    def __str__(self) -> str:
        return f" {self.name} {self.wording} {self.number} ."


@dataclass(frozen=True)
class Problem:
    """A question for the numbers of `wanted`, and the chunks of the document that has them."""

    wanted: tuple[Fact, ...]
    chunks: tuple[tuple[Fact, ...], ...]

    @property
    def names(self) -> list[str]:
        return [fact.name for fact in self.wanted]

    @property
    def question(self) -> str:
        return f"number{'s' * (len(self.wanted) > 1)} of {' and '.join(self.names)}"

    @property
    def label(self) -> str:
        return " ".join(fact.number for fact in self.wanted)


def text_of(facts: Iterable[Fact]) -> str:
    """Facts as they stand in documents and memories."""
    return "".join(map(str, facts))


def memory_of(names: Iterable[str], known: dict[str, str]) -> str:
    """The scripted memory: a line for each of `names`."""
    return text_of(Fact(name, NOTE, known.get(name, UNKNOWN)) for name in names)


def make_problem(
    stream: str, chunks: int, facts_per_chunk: int = FACTS_PER_CHUNK, wanted: int | None = None
) -> Problem:
    """Problem `stream` (a name such as 'train/0/17'); the question is the same for any number of chunks.

    Asks for `wanted` facts (default: one, or two with chance `TWO_FACTS`), in different chunks as far as there are enough.
    """
    rng = random.Random(stream)
    names = rng.sample(NAMES, wanted or 1 + (rng.random() < TWO_FACTS))
    asked = tuple(_draw_fact(name, rng) for name in names)
    rng = random.Random(f"{stream}/{chunks}x{facts_per_chunk}")
    others = [name for name in NAMES if name not in names]
    rows = [[_draw_fact(rng.choice(others), rng) for _ in range(facts_per_chunk)] for _ in range(chunks)]
    order, slots = rng.sample(range(chunks), chunks), rng.sample(range(facts_per_chunk), len(asked))
    for number, (fact, slot) in enumerate(zip(asked, slots, strict=True)):
        rows[order[number % chunks]][slot] = fact
    return Problem(asked, tuple(map(tuple, rows)))


def _draw_fact(name: str, rng: random.Random) -> Fact:
    return Fact(name, rng.choice(WORDINGS), str(rng.choice(NUMBERS)))


class ReadingWriter:
    """Turns problems into chat rows (one per conversation) for slime's SFT path, through the method's own prompt texts."""

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self.prompts = prompts
        self.rng = random.Random(seed)

    def rows(self, problem: Problem, faultless: bool = False) -> Iterator[dict[str, Any]]:
        """A scripted reading: one row a chunk, then the answer from the last memory."""
        known: dict[str, str] = {}
        memory = self.prompts.no_memory
        for chunk in problem.chunks:
            known |= self._noticed(problem.names, chunk, faultless)
            slots = {"question": problem.question, "memory": memory, "chunk": text_of(chunk)}
            memory = memory_of(problem.names, known)
            yield self._row("memory", memory, **slots)
        numbers = "".join(f" {known.get(name, UNKNOWN)}" for name in problem.names)
        reply = self.prompts.answer_prefill + numbers + "}"
        yield self._row("answer", reply, question=problem.question, memory=memory)

    def _noticed(self, names: Sequence[str], chunk: Iterable[Fact], faultless: bool) -> dict[str, str]:
        asked = [fact for fact in chunk if fact.name in names]
        seen = [fact for fact in asked if faultless or self.rng.random() >= OVERLOOKED[fact.wording]]
        return {fact.name: fact.number for fact in seen}

    def _row(self, role: str, reply: str, **slots: str) -> dict[str, Any]:
        return {"prompt": [*self.prompts.messages(role, **slots), {"role": "assistant", "content": reply}]}


def warm_start_rows(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """`count` chat rows in the order in which they are to be learned: from short chunks and many questions to live play."""
    writer = ReadingWriter(PromptSet.load("compact"), seed)
    for start in range(0, count, ROWS_PER_BLOCK):
        rows: list[dict[str, Any]] = []
        while len(rows) < ROWS_PER_BLOCK:
            rows += _warm_start_reading(writer, f"sft/{seed}/{start}/{len(rows)}", start / count)
        writer.rng.shuffle(rows)
        yield from rows[: min(ROWS_PER_BLOCK, count - start)]


def _warm_start_reading(writer: ReadingWriter, stream: str, done: float) -> Iterator[dict[str, Any]]:
    """The rows of one document, as the part `done` of the warm start has them."""
    grown = min(done / GROWN, 1.0)
    facts = round(SMALLEST_CHUNK + (FACTS_PER_CHUNK - SMALLEST_CHUNK) * grown)
    many = writer.rng.random() < 1 - (1 - MANY_AT_END) * grown**2
    chunks = 1 if done < ONE_CHUNK else writer.rng.choice((2, 2, 4))
    problem = make_problem(stream, chunks, facts, MANY if many else None)
    return writer.rows(problem, faultless=done < FAULTLESS)


def added_tokens() -> list[str]:
    """Pieces that the tiny tokenizer keeps whole: names, numbers and words with their leading blank, and the box."""
    words = [*NAMES, *map(str, NUMBERS), *WORDINGS, UNKNOWN, "and", "of", "."]
    return [f" {word}" for word in words] + ["\\boxed{"]


def write_world(
    folder: Path, seed: int, n_sft: int = 12800, n_train: int = 1000, n_heldout: int = 200
) -> dict[str, Path]:
    """Write the files of the world under `folder`; return their paths by name.

    `sft` (`n_sft` chat rows, in order), `train`, `validation` (for choosing a checkpoint) and `heldout` with 4 chunks, and
    `heldout_8`, `heldout_32`, `heldout_128` with as many chunks as their names say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"sft": warm_start_rows(seed, n_sft)}
    files["train"] = _records("train", seed, n_train, TRAIN_CHUNKS)
    files["validation"] = _records("validation", seed, N_VALIDATION, TRAIN_CHUNKS)
    for name, chunks in HELDOUT_CHUNKS.items():
        count = n_heldout if chunks == TRAIN_CHUNKS else min(n_heldout, N_LONG)
        files[name] = _records("heldout", seed, count, chunks)
    paths = {name: folder / f"{name}.jsonl" for name in files}
    for name, records in files.items():
        with paths[name].open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return paths


def _records(split: str, seed: int, count: int, chunks: int) -> Iterator[dict[str, Any]]:
    """Lines of slime's prompt file, as `Item.to_prompt` writes them."""
    for index in range(count):
        problem = make_problem(f"{split}/{seed}/{index}", chunks)
        found = [number for number, chunk in enumerate(problem.chunks) if set(chunk) & set(problem.wanted)]
        metadata = {
            "context": "".join(map(text_of, problem.chunks)),
            "ground_truth": [problem.label],
            "index": index,
            "kind": "qa",
            "chunks": chunks,
            "facts": len(problem.wanted),
            "evidence": [round((number + 0.5) / chunks, 4) for number in found],
        }
        yield {"prompt": problem.question, "label": problem.label, "metadata": metadata}
