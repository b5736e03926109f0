"""A seeded world of questions about a museum in which ToolOrchestra's policy has something to learn on a laptop.

Purpose: questions, passages for the retrieval service, scripted traces for the warm start of the policy, and the rows from
which three experts get their different skills. Each question has one right route, or two of different price:

    material, age     historian or restorer: both know the answer, and only their prices differ
    worth, maker      historian            care, weight     restorer
    room, donor       search, then reader: the answer stands in one passage only

Inputs: a seed. Everything here is a pure function of it.

Invariants:
* A wrong route gives a definite wrong answer and ends the rollout, so that a wrong choice costs the reward.
* Training, warm-start and held-out questions are disjoint: one list of distinct questions is cut in three.
* The scripted policy errs by kind: for half of the kinds its *most frequent* choice is wrong, so greedy decoding of the
  warm-started policy fails there, while sampling at temperature 1 still finds the right route now and then. It treats the
  two experts of equal skill nearly alike.
* Experts know what they know without errors, whatever the policy did, and answer "unknown" to the rest.

Left out: rendering to tokens and training (slime's SFT path does both), programs and mathematics.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic.toolorchestra.prompts import PromptSet
from agentic.toolorchestra.qa.state import render_documents

OBJECTS = (
    "violin trumpet drum flute harp clock lantern compass anchor telescope kettle teapot vase mirror carpet saddle helmet shield "
    "sword crossbow canoe sledge wheelbarrow plough loom anvil bellows barrel basket candle umbrella fan glove boot hat crown "
    "necklace bracelet ring coin medal stamp map globe diary letter typewriter camera radio telephone puppet doll kite pipe table "
    "chair bed cupboard cradle ladder hammer saw axe scissors needle thimble spoon fork knife plate cup bottle jug lamp oven bell "
    "whistle key lock chain rope net hook oar sail wheel carriage bicycle rocket balloon statue painting fossil skeleton egg shell "
    "feather butterfly"
).split()
ASKED = OBJECTS[:40]
"""Things that questions are about; the others only have their passages."""
# What a kind of question may have as its answer; no word stands in two lists.
VALUES = {
    "material": "wood iron brass clay glass silk wool leather bone ivory marble tin".split(),
    "age": "roman gothic viking tudor baroque georgian victorian medieval celtic saxon norman modern".split(),
    "worth": "ten twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million".split(),
    "maker": "smith potter weaver carpenter tailor cobbler mason joiner cooper tanner founder turner".split(),
    "care": "soap oil wax vinegar chalk steam brush sponge alcohol resin lime ash".split(),
    "weight": "ounce pound stone quarter hundredweight gram kilo ton grain dram carat tonne".split(),
    "room": "amber azure copper coral crimson emerald golden grey indigo jade lilac olive orange pearl purple ruby scarlet".split(),
    "donor": "Ann Bob Cleo Dan Eva Finn Gus Hana Ivo Jan Kim Lea Max Nora Otto Pia Quin Rosa Sam Tina".split(),
}
# Six tokens each, the thing always at the same place: what a model of this size finds by position it learns at once.
WORDINGS = {
    "material": ("what material is the {}?", "which material has the {}?", "what stuff is the {}?"),
    "age": ("what age is the {}?", "which age has the {}?", "how old is the {}?"),
    "worth": ("what worth has the {}?", "how dear is the {}?", "what price has the {}?"),
    "maker": ("which maker made the {}?", "who has made the {}?", "what craftsman made the {}?"),
    "care": ("what care needs the {}?", "which care suits the {}?", "what best cleans the {}?"),
    "weight": ("what weight has the {}?", "how heavy is the {}?", "which weight is the {}?"),
    "room": ("which room has the {}?", "what room holds the {}?", "where now stands the {}?"),
    "donor": ("who once gave the {}?", "which donor gave the {}?", "what donor brought the {}?"),
}
PASSAGES = {"room": "The {} stands in the {} room.", "donor": "The {} was a gift of {}."}
KINDS = tuple(VALUES)
COLLECTIONS = 12
"""Things of a collection agree in everything but room and donor: little enough for a tiny expert to remember."""
SHARED_KINDS = ("material", "age")
"""What two experts know equally well."""

SEARCH, HISTORIAN, RESTORER, READER = "search-3", "answer-1", "answer-2", "answer-3"
ROUTES = (HISTORIAN, RESTORER, READER, SEARCH)
KNOWS = {"historian": ("material", "age", "worth", "maker"), "restorer": ("material", "age", "care", "weight")}
EXPERTS = (*KNOWS, "reader")
UNKNOWN = "unknown"
# Chances of the scripted policy's first call, in the order of ROUTES, by kind. The order of the kinds mixes those whose most
# frequent route is wrong with the others within each half of a rollout, which is one optimiser step.
BIAS = {
    "material": (0.27, 0.23, 0.42, 0.08),
    "worth": (0.30, 0.50, 0.12, 0.08),
    "maker": (0.60, 0.20, 0.12, 0.08),
    "room": (0.20, 0.12, 0.40, 0.28),
    "age": (0.42, 0.38, 0.12, 0.08),
    "care": (0.50, 0.30, 0.12, 0.08),
    "weight": (0.20, 0.60, 0.12, 0.08),
    "donor": (0.12, 0.12, 0.12, 0.64),
}
# Likewise for the call after a search of what passages tell; of other kinds the shares stay as in BIAS.
AFTER_SEARCH = {"room": (0.20, 0.20, 0.60), "donor": (0.20, 0.44, 0.36)}
DRAWS = 11
"""Scripted rollouts shown for each warm-start question."""
REPEATS = {"historian": 22, "restorer": 22, "reader": 10}
"""How often the rows of an expert show each object and kind."""
CALL = '<tool_call>\n{"name": "%s", "arguments": {"model": "'
CALL_END = '"}}\n</tool_call>'


@dataclass(frozen=True)
class Problem:
    """One question of a kind about an object."""

    kind: str
    thing: str
    wording: int

    @property
    def question(self) -> str:
        return WORDINGS[self.kind][self.wording].format(self.thing)


class Museum:
    """What is true in the world of a seed: a value for every object and kind."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"museum/{seed}")
        self.truth = {(kind, thing): rng.choice(VALUES[kind]) for kind in PASSAGES for thing in OBJECTS}
        for number, thing in enumerate(rng.sample(ASKED, len(ASKED))):
            for kind in KINDS[: -len(PASSAGES)]:
                self.truth[kind, thing] = VALUES[kind][number % COLLECTIONS]

    def label(self, problem: Problem) -> str:
        return self.truth[problem.kind, problem.thing]

    def passage(self, kind: str, thing: str) -> str:
        """The passage that answers a question of `kind` (room or donor)."""
        return PASSAGES[kind].format(thing, self.truth[kind, thing])

    def passages(self) -> list[dict[str, str]]:
        """The corpus of the retrieval service."""
        pairs = [(kind, thing) for kind in PASSAGES for thing in OBJECTS]
        return [{"id": f"{kind}-{thing}", "contents": self.passage(kind, thing)} for kind, thing in pairs]


def distinct_problems(seed: int) -> list[Problem]:
    """Every question there is, in an order of the seed, interleaved by kind (so any prefix is stratified)."""
    rng = random.Random(f"problems/{seed}")
    pools = []
    for kind in BIAS:
        pool = [Problem(kind, thing, wording) for thing in ASKED for wording in range(len(WORDINGS[kind]))]
        pools.append(rng.sample(pool, len(pool)))
    return [problem for row in zip(*pools, strict=True) for problem in row]


def call_text(alias: str) -> str:
    """The policy's turn that asks `alias`, as the method's parser expects it."""
    return CALL % ("search" if alias == SEARCH else "answer") + alias + CALL_END


def query_text(problem: Problem) -> str:
    """What an expert for searching writes."""
    return f"<query> {problem.kind} of the {problem.thing}</query>"


def state_text(documents: Sequence[str]) -> str:
    """The state as the experts are shown it."""
    shown = render_documents(documents, 1000, _Words())
    return f"Documents:\n{shown}" if shown else ""


class _Words:
    """A tokenizer for budgets that are never reached."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] * len(text.split())


class TraceWriter:
    """Turns questions into chat rows for slime's SFT path, through the method's own prompt templates."""

    def __init__(self, seed: int) -> None:
        self.prompts = PromptSet.load("compact")
        self.museum = Museum(seed)
        self.rng = random.Random(f"traces/{seed}")

    def policy_row(self, problem: Problem) -> dict[str, Any]:
        """A scripted rollout: an answer, or a search, its passage and then an answer."""
        messages = [{"role": "system", "content": self.prompts.describe_tools(())}]
        messages += self.prompts.render("qa_turn", question=problem.question, state="")
        route = self.rng.choices(ROUTES, BIAS[problem.kind])[0]
        messages.append({"role": "assistant", "content": call_text(route)})
        if route == SEARCH:
            shown = f"Query: {problem.kind} of the {problem.thing}\n[1] {self._found(problem)}"
            then = AFTER_SEARCH.get(problem.kind, BIAS[problem.kind][:3])
            answer = self.rng.choices(ROUTES[:3], then)[0]
            messages.append({"role": "tool", "content": shown})
            messages.append({"role": "assistant", "content": call_text(answer)})
        return {"prompt": messages}

    def policy_rows(self, problem: Problem) -> list[dict[str, Any]]:
        """A scripted rollout once for each of its turns: a row's loss is the mean over its tokens, so each turn counts alike."""
        row = self.policy_row(problem)
        return [row] * sum(message["role"] == "assistant" for message in row["prompt"])

    def _found(self, problem: Problem) -> str:
        kind = problem.kind if problem.kind in PASSAGES else self.rng.choice(list(PASSAGES))
        return self.museum.passage(kind, problem.thing)

    def expert_rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Every object and kind in a random wording: what the expert `name` knows, and "unknown" for the rest."""
        for thing in ASKED:
            for kind in KINDS:
                problem = Problem(kind, thing, self.rng.randrange(len(WORDINGS[kind])))
                yield from self._reader_rows(problem) if name == "reader" else self._memory_rows(problem, KNOWS[name])

    def _memory_rows(self, problem: Problem, known: Iterable[str]) -> Iterator[dict[str, Any]]:
        """From memory; a document changes nothing. What it does not know is shown less often."""
        if problem.kind not in known and self.rng.random() < 0.6:
            return
        documents = [self._found(problem)] if self.rng.random() < 0.2 else []
        yield self._answer_row(problem, documents, self.museum.label(problem) if problem.kind in known else UNKNOWN)

    def _reader_rows(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """A query; an answer from a passage with random values, which teaches reading instead of remembering."""
        yield self._row("qa_search", query_text(problem), question=problem.question)
        if problem.kind not in PASSAGES:
            documents = [self._found(problem)] if self.rng.random() < 0.3 else []
            yield self._answer_row(problem, documents, UNKNOWN)
            return
        for _ in range(3):
            value = self.rng.choice(VALUES[problem.kind])
            yield self._answer_row(problem, [PASSAGES[problem.kind].format(problem.thing, value)], value)
        yield self._answer_row(problem, [], UNKNOWN)

    def _answer_row(self, problem: Problem, documents: Sequence[str], answer: str) -> dict[str, Any]:
        fields = {"question": problem.question, "state": state_text(documents)}
        return self._row("qa_answer_tag", f"<answer> {answer}</answer>", **fields)

    def _row(self, role: str, reply: str, question: str, state: str = "") -> dict[str, Any]:
        messages = self.prompts.render(role, question=question, state=state)
        return {"prompt": [*messages, {"role": "assistant", "content": reply}]}


def added_tokens() -> list[str]:
    """Pieces that the tiny tokenizer keeps whole. None may occur in a question or a passage, where it would be broken up."""
    return [
        CALL % "search",
        CALL % "answer",
        CALL_END,
        *sorted(set(ROUTES)),
        "<answer>",
        "</answer>",
        "<query>",
        "</query>",
    ]


def write_world(
    folder: Path, seed: int, n_sft: int = 1000, n_train: int = 384, n_heldout: int = 200
) -> dict[str, Path]:
    """Write the files of the world under `folder`; return their paths by name.

    `sft` and one file for each of `EXPERTS` (chat rows), `train` and `heldout` (prompt, label, metadata), `passages`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems, writer = distinct_problems(seed), TraceWriter(seed)
    heldout, rest = problems[:n_heldout], problems[n_heldout:]
    train, sft = rest[:n_train], rest[n_train : n_train + n_sft]
    files: dict[str, list[dict[str, Any]]] = {
        "sft": [row for problem in sft for _ in range(DRAWS) for row in writer.policy_rows(problem)],
        "train": [_record(problem, writer.museum) for problem in train],
        "heldout": [_record(problem, writer.museum) for problem in heldout],
        "passages": writer.museum.passages(),
    }
    for name in EXPERTS:
        files[name] = [row for _ in range(REPEATS[name]) for row in writer.expert_rows(name)]
    for name in ("sft", *EXPERTS):
        writer.rng.shuffle(files[name])
    paths = {name: folder / f"{name}.jsonl" for name in files}
    for name, rows in files.items():
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def _record(problem: Problem, museum: Museum) -> dict[str, Any]:
    metadata = {"category": "qa", "domain": problem.kind, "pref_vec": {"accuracy": 1.0, "cost": 0.5}}
    return {"prompt": problem.question, "label": museum.label(problem), "metadata": metadata}
