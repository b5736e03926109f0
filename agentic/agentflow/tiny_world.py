"""A seeded world of arithmetic word problems in which AgentFlow's planner has something to learn on a laptop.

Purpose: problems, scripted traces for the warm start and the vocabulary of a tiny tokenizer. Each problem is solvable only
with the right tool, the right sub-goal and numbers copied from the question; three of the eight kinds need two tool steps,
where the second step uses the result of the first.

Inputs: a seed. Everything here is a pure function of it.

Invariants:
* The right plan scores 1.0 and a plan with a wrong sub-goal or a wrong tool gives a definite wrong result: the tool never says
  "try again", so a wrong choice costs the reward (free retries would destroy the credit).
* Training, warm-start and held-out problems are disjoint: one list of distinct problems is cut in three.
* The scripted planner errs by kind: for some kinds its *most frequent* choice is wrong, so greedy decoding of the warm-started
  planner fails there, while sampling at temperature 1 still finds the right plan now and then.
* The frozen roles are scripted without errors whatever the planner did.

Left out: rendering to tokens and training (slime's SFT path does both), and other languages or number formats.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentic.agentflow.prompts import PromptSet

NAMES = "ann bob cleo dan eva finn gus hana ivo jan kim lea max nora otto pia quin rosa sam tina uma vera will yara zoe".split()
ITEMS = "pears plums nuts eggs cards coins books stamps beads shells".split()
# Number facts that only the frozen generator knows; (what is counted, one of) -> count.
FACTS = {
    ("legs", "spider"): 8,
    ("legs", "ant"): 6,
    ("legs", "dog"): 4,
    ("legs", "hen"): 2,
    ("legs", "crab"): 10,
    ("wheels", "car"): 4,
    ("wheels", "bike"): 2,
    ("wheels", "tricycle"): 3,
    ("sides", "square"): 4,
    ("sides", "pentagon"): 5,
    ("sides", "octagon"): 8,
    ("strings", "violin"): 4,
    ("strings", "guitar"): 6,
    ("arms", "starfish"): 5,
    ("arms", "squid"): 9,
    ("eggs", "dozen"): 12,
}
MAX_NUMBER = 199
# Scripted decisions shown for each state: copying the right numbers out of the question is the slowest thing to learn.
PLANS_PER_STEP = 3
CODER, GENERATOR = "python_coder", "base_generator"
EXPRESSIONS = {
    "add": "print({0} +{1})",
    "subtract": "print({0} -{1})",
    "multiply": "print({0} *{1})",
    "maximum": "print(max({0},{1}))",
}
# The sub-goal that the scripted planner takes for the right one. Kinds that look alike (gets, gives) are confused with
# different ones: a warm start that cannot tell two kinds apart would make their rewards pull against each other.
CONFUSION = {"add": "maximum", "subtract": "add", "multiply": "subtract", "maximum": "add", "recall": "maximum"}
# Chance of the right sub-goal and of the right tool in the warm start, by kind and step. Below one half the mode is wrong.
# Kinds that begin alike (packs bags) share the chances of their first step, which a tiny model could not keep apart.
# The order mixes easy and hard kinds within each half of a rollout, which is one optimiser step.
BIAS: dict[str, list[tuple[float, float]]] = {
    "add": [(0.36, 0.85)],
    "fact": [(0.90, 0.40)],
    "multiply_subtract": [(0.42, 0.85), (0.42, 0.90)],
    "subtract": [(0.70, 0.80)],
    "multiply": [(0.42, 0.85)],
    "maximum": [(0.85, 0.42)],
    "multiply_add": [(0.42, 0.85), (0.70, 0.85)],
    "fact_multiply": [(0.85, 0.65), (0.70, 0.85)],
}
KINDS = tuple(BIAS)
TWO_STEP_KINDS = tuple(kind for kind, steps in BIAS.items() if len(steps) == 2)


@dataclass(frozen=True)
class Step:
    """One right planner decision: `sub_goal` on `arguments` (numbers or words) with `tool`, which returns `result`."""

    arguments: tuple[str, ...]
    sub_goal: str
    tool: str
    result: int


@dataclass(frozen=True)
class Problem:
    """A word problem with its kind and the right steps; the label is the last step's result."""

    kind: str
    question: str
    steps: tuple[Step, ...]

    @property
    def label(self) -> str:
        return str(self.steps[-1].result)


def compute(sub_goal: str, first: int, second: int) -> int:
    """The result of an arithmetic sub-goal on two integers; KeyError for an unknown one."""
    return {
        "add": first + second,
        "subtract": first - second,
        "multiply": first * second,
        "maximum": max(first, second),
    }[sub_goal]


def _arithmetic(sub_goal: str, first: int, second: int) -> Step:
    return Step((str(first), str(second)), sub_goal, CODER, compute(sub_goal, first, second))


def _ordered_pair(rng: random.Random, high: int) -> tuple[int, int]:
    """Two different numbers, the larger one first, so that every arithmetic sub-goal has a result of its own."""
    second, first = sorted(rng.sample(range(2, high + 1), 2))
    return first, second


def make_problem(kind: str, rng: random.Random) -> Problem:
    """Draw one problem of `kind`; ValueError for an unknown kind."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    if kind in ("add", "subtract"):
        first, second = _ordered_pair(rng, 49)
        change = f"gets {second} more" if kind == "add" else f"gives {second} away"
        return Problem(kind, f"{name} has {first} {item} and {change} .", (_arithmetic(kind, first, second),))
    if kind == "maximum":
        other, (first, second) = rng.choice(NAMES), _ordered_pair(rng, 99)
        if rng.random() < 0.5:
            first, second = second, first
        question = f"{name} counts {first} {item} , {other} sees {second} . what is the most ?"
        return Problem(kind, question, (_arithmetic(kind, first, second),))
    if kind in ("fact", "fact_multiply"):
        return _fact_problem(kind, name, rng)
    if kind not in ("multiply", "multiply_add", "multiply_subtract"):
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    bags, each = _ordered_pair(rng, 12)
    question, steps = f"{name} packs {bags} bags of {each} {item}", [_arithmetic("multiply", bags, each)]
    if kind != "multiply":
        sub_goal, total = kind.removeprefix("multiply_"), bags * each
        extra = rng.randint(2, 49 if sub_goal == "add" else min(49, total - 1))
        question += f" and gets {extra} more" if sub_goal == "add" else f" and gives {extra} away"
        steps.append(_arithmetic(sub_goal, total, extra))
    return Problem(kind, question + " .", tuple(steps))


def _fact_problem(kind: str, name: str, rng: random.Random) -> Problem:
    part, whole = rng.choice(list(FACTS))
    recall = Step((part, whole), "recall", GENERATOR, FACTS[part, whole])
    if kind == "fact":
        count = rng.randint(
            13, MAX_NUMBER
        )  # a number that plays no part: the planner must not reach for the calculator
        return Problem(kind, f"{name} , who is {count} , wants to know the {part} of a {whole} .", (recall,))
    count = rng.randint(2, 12)
    question = f"{name} finds {count} things , each a {whole} . how many {part} ?"
    return Problem(kind, question, (recall, _arithmetic("multiply", recall.result, count)))


def distinct_problems(per_kind: int, seed: int) -> list[Problem]:
    """`per_kind` different problems of every kind, interleaved by kind (so any prefix is stratified)."""
    rng = random.Random(seed)
    pools: dict[str, list[Problem]] = {}
    for kind in KINDS:
        seen: dict[str, Problem] = {}
        while len(seen) < per_kind:
            problem = make_problem(kind, rng)
            seen.setdefault(problem.question, problem)
        pools[kind] = list(seen.values())
    return [pools[kind][i] for i in range(per_kind) for kind in KINDS]


def scripted_step(kind: str, index: int, right: Step, rng: random.Random) -> Step:
    """The planner's decision at step `index` as the warm start shows it: right with the chances of `BIAS`."""
    p_goal, p_tool = BIAS[kind][index]
    sub_goal = right.sub_goal if rng.random() < p_goal else CONFUSION[right.sub_goal]
    other_tool = GENERATOR if right.tool == CODER else CODER
    tool = right.tool if rng.random() < p_tool else other_tool
    return Step(right.arguments, sub_goal, tool, run_tool(tool, sub_goal, right.arguments, rng))


def run_tool(tool: str, sub_goal: str, arguments: tuple[str, ...], rng: random.Random) -> int:
    """What the frozen role behind `tool` answers: the truth where the tool is the right one, else a definite wrong number."""
    if tool == CODER:
        numbers = [int(a) for a in arguments if a.isdigit()]
        return compute(sub_goal, *numbers) if len(numbers) == 2 and sub_goal in EXPRESSIONS else 0
    if sub_goal == "recall" and arguments in FACTS:
        return FACTS[arguments]
    return rng.choice((1, 11))  # a language model that guesses instead of computing


def _code(sub_goal: str, arguments: tuple[str, ...]) -> str:
    spaced = [f" {a}" for a in arguments]
    usable = sub_goal in EXPRESSIONS and all(a.isdigit() for a in arguments)
    return f"```python\n{EXPRESSIONS[sub_goal].format(*spaced) if usable else 'print( 0)'}\n```"


class TraceWriter:
    """Turns problems into chat rows (one per role call) for slime's SFT path, through the method's own prompt templates."""

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self.prompts = prompts
        self.rng = random.Random(seed)

    def row(self, role: str, reply: str, **fields: str) -> dict[str, list[dict[str, str]]]:
        return {"prompt": [*self.prompts.render(role, **fields), {"role": "assistant", "content": reply}]}

    def rows(self, problem: Problem) -> Iterator[dict[str, list[dict[str, str]]]]:
        """All rows of one scripted episode: analysis, then plan, command, tool and check for every step, then the final answer."""
        analysis = "two steps" if len(problem.steps) == 2 else "one step"
        yield self.row("analysis", analysis, question=problem.question, tools="")
        memory, arguments, result = "", problem.steps[0].arguments, 0
        for index, right in enumerate(problem.steps):
            if index:  # the second step works on what the first one returned, right or wrong
                arguments = (str(result), problem.steps[1].arguments[1])
            right = Step(arguments, right.sub_goal, right.tool, right.result)
            fields = self._plan_fields(problem, analysis, memory, index)
            for _ in range(PLANS_PER_STEP):  # the last one is carried out
                step = scripted_step(problem.kind, index, right, self.rng)
                yield self.row("next_step", plan_text(step), **fields)
            yield from self.tool_rows(step)
            result = step.result
            memory += self.memory_entry(index + 1, step)
            verdict = "STOP" if index + 1 == len(problem.steps) else "CONTINUE"
            yield self.row("verify", verdict, question=problem.question, analysis=analysis, tools="", memory=memory)
        yield self.final_row(memory, result, problem.question, analysis)

    def tool_rows(self, step: Step) -> Iterator[dict[str, list[dict[str, str]]]]:
        """The executor's command and the answer of the frozen role behind the tool."""
        query = f"{step.sub_goal} {' '.join(step.arguments)}"
        command = f'```python\nexecution = tool.execute(query="{query}")\n```'
        fields = {"sub_goal": step.sub_goal, "context": " ".join(step.arguments), "tool_name": step.tool}
        yield self.row("command", command, question="", tool_metadata="", **fields)
        if step.tool == CODER:
            yield self.row("python_coder", _code(step.sub_goal, step.arguments), query=query)
        else:
            yield self.row("base_generator", f" {step.result}", query=query)

    def copy_rows(self) -> Iterator[dict[str, list[dict[str, str]]]]:
        """Rows for the frozen roles: random numbers, which teach copying instead of remembering, and every number fact."""
        numbers = tuple(str(self.rng.randint(0, MAX_NUMBER)) for _ in range(2))
        sub_goal = self.rng.choice(list(EXPRESSIONS))
        step = Step(numbers, sub_goal, CODER, self.rng.randint(0, MAX_NUMBER))
        yield from self.tool_rows(step)
        words, count = self.rng.choice(list(FACTS.items()))
        yield from self.tool_rows(Step(words, "recall", GENERATOR, count))
        first = self.memory_entry(
            1, Step(numbers, self.rng.choice(list(CONFUSION)), CODER, self.rng.randint(0, MAX_NUMBER))
        )
        memory = self.rng.choice(("", first)) + self.memory_entry(2, step)
        yield self.final_row(memory, step.result, "", "")

    def memory_entry(self, number: int, step: Step) -> str:
        return self.prompts.render_memory_entry(
            step=str(number), tool_name=step.tool, sub_goal=step.sub_goal, command="", result=str(step.result)
        )

    def final_row(self, memory: str, result: int, question: str, analysis: str) -> dict[str, list[dict[str, str]]]:
        return self.row("final", f"\\boxed{{ {result}}}", question=question, analysis=analysis, memory=memory)

    @staticmethod
    def _plan_fields(problem: Problem, analysis: str, memory: str, index: int) -> dict[str, str]:
        common = {"question": problem.question, "analysis": analysis, "tools": "", "memory": memory}
        return {**common, "step": str(index + 1), "steps_left": ""}


def plan_text(step: Step) -> str:
    """The planner's reply for a decision, in the labelled form that the method's parser expects."""
    return f"Context: {' '.join(step.arguments)}\nSub-Goal: {step.sub_goal}\nTool Name: {step.tool}"


def added_tokens() -> list[str]:
    """Pieces that the tiny tokenizer keeps whole: numbers with their leading blank, labels, tool names and code frames."""
    numbers = [f" {n}" for n in range(MAX_NUMBER + 1)]
    labels = ["Context:", "\nSub-Goal:", "\nTool Name:", f" {CODER}", f" {GENERATOR}", "STOP", "CONTINUE", "\\boxed{"]
    frames = [
        '```python\nexecution = tool.execute(query="',
        '")\n```',
        "```python\nprint(",
        ")\n```",
        "max(",
        "))\n```",
    ]
    return numbers + labels + frames


def write_world(
    folder: Path, seed: int, n_sft: int = 2400, n_train: int = 2000, n_heldout: int = 200
) -> dict[str, Path]:
    """Write `sft.jsonl` (chat rows), `train.jsonl` and `heldout.jsonl` (prompt, label, kind) under `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    per_kind = -(-(n_sft + n_train + n_heldout) // len(KINDS))
    problems = distinct_problems(per_kind, seed)
    heldout, train, sft = (
        problems[:n_heldout],
        problems[n_heldout : n_heldout + n_train],
        problems[n_heldout + n_train :],
    )
    writer = TraceWriter(PromptSet.load("compact"), seed)
    rows = [row for problem in sft for row in (*writer.rows(problem), *writer.copy_rows())]
    random.Random(seed).shuffle(rows)
    paths = {name: folder / f"{name}.jsonl" for name in ("sft", "train", "heldout")}
    _write_jsonl(paths["sft"], rows)
    for name, part in (("train", train), ("heldout", heldout)):
        _write_jsonl(paths[name], [_record(problem) for problem in part])
    return paths


def _record(problem: Problem) -> dict[str, object]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "label": problem.label,
        "metadata": {"kind": problem.kind, "steps": len(problem.steps)},
    }


def _write_jsonl(path: Path, rows: list[dict[str, object]] | list[dict[str, list[dict[str, str]]]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
