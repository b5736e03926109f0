import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentic.agentflow import tiny_world
from agentic.agentflow.parsing import parse_command, parse_next_step
from agentic.agentflow.prompts import PromptSet

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", tiny_world.KINDS)
def test_the_right_plan_gives_the_label(kind: str) -> None:
    rng = random.Random(0)
    for _ in range(200):
        problem = tiny_world.make_problem(kind, rng)
        results = [tiny_world.run_tool(step.tool, step.sub_goal, step.arguments, rng) for step in problem.steps]
        assert str(results[-1]) == problem.label
        assert 0 <= int(problem.label) <= tiny_world.MAX_NUMBER
        for number in (a for step in problem.steps for a in step.arguments if a.isdigit()):
            assert f" {number} " in problem.question or number in map(
                str, results[:-1]
            ), "numbers are copied, not invented"


@pytest.mark.parametrize("kind", [k for k in tiny_world.KINDS if k not in tiny_world.TWO_STEP_KINDS])
def test_a_wrong_tool_or_sub_goal_is_not_rewarded(kind: str) -> None:
    """Confusions give another number nearly always (2 + 2 = 2 * 2 is a tie that no rule can avoid)."""
    rng, ties = random.Random(1), 0
    for _ in range(300):
        problem = tiny_world.make_problem(kind, rng)
        right = problem.steps[0]
        wrong_tool = tiny_world.GENERATOR if right.tool == tiny_world.CODER else tiny_world.CODER
        wrong_goal = tiny_world.CONFUSION[right.sub_goal]
        for tool, goal in ((wrong_tool, right.sub_goal), (right.tool, wrong_goal)):
            ties += str(tiny_world.run_tool(tool, goal, right.arguments, rng)) == problem.label
    assert ties <= 30


def test_world_is_seeded_disjoint_and_has_two_step_problems(tmp_path) -> None:
    paths = tiny_world.write_world(tmp_path / "a", 3, n_sft=80, n_train=80, n_heldout=80)
    again = tiny_world.write_world(tmp_path / "b", 3, n_sft=80, n_train=80, n_heldout=80)
    assert all(paths[name].read_bytes() == again[name].read_bytes() for name in paths)
    records = {name: [json.loads(line) for line in paths[name].open()] for name in ("train", "heldout")}
    questions = {name: {r["prompt"][0]["content"] for r in rows} for name, rows in records.items()}
    shown = paths["sft"].read_text()
    assert not questions["train"] & questions["heldout"]
    assert not any(json.dumps(q)[1:-1] in shown for q in questions["heldout"])
    steps = Counter(r["metadata"]["steps"] for r in records["heldout"])
    assert steps[2] / sum(steps.values()) >= 0.2
    assert set(Counter(r["metadata"]["kind"] for r in records["heldout"]).values()) == {10}, "stratified by kind"


def test_scripted_traces_pass_the_parsers_of_the_method() -> None:
    writer = tiny_world.TraceWriter(PromptSet.load("compact"), 0)
    for problem in tiny_world.distinct_problems(5, 0):
        for row in writer.rows(problem):
            request, reply = row["prompt"][-2]["content"], row["prompt"][-1]["content"]
            if request.startswith("plan:"):
                plan = parse_next_step(reply)
                assert plan.tool_name in (tiny_world.CODER, tiny_world.GENERATOR) and plan.context
            if request.startswith("command:"):
                (command,) = parse_command(reply, 1)
                assert command.kwargs["query"].split()[0] in request


def test_planner_errs_as_often_as_the_bias_says() -> None:
    rng = random.Random(0)
    right = tiny_world.make_problem("add", rng).steps[0]
    drawn = [tiny_world.scripted_step("add", 0, right, rng) for _ in range(4000)]
    p_goal, p_tool = tiny_world.BIAS["add"][0]
    assert sum(s.sub_goal == right.sub_goal for s in drawn) / 4000 == pytest.approx(p_goal, abs=0.03)
    assert sum(s.tool == right.tool for s in drawn) / 4000 == pytest.approx(p_tool, abs=0.03)


def test_make_tiny_model_is_deterministic_and_keeps_numbers_whole(tmp_path) -> None:
    for name in ("a", "b"):
        flags = [
            "--world-dir",
            str(tmp_path / name / "world"),
            "--output",
            str(tmp_path / name / "model"),
            "--n-sft",
            "80",
        ]
        command = [
            sys.executable,
            str(ROOT / "tools/make_tiny_model.py"),
            *flags,
            "--n-train",
            "8",
            "--n-heldout",
            "8",
        ]
        subprocess.run(command, check=True, capture_output=True)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / "model" / file).read_bytes() == (tmp_path / "b" / "model" / file).read_bytes()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a" / "model")
    assert len(tokenizer.encode("Context: 199 7", add_special_tokens=False)) == 3
    chat = [{"role": "user", "content": "plan: x"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nplan: x<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode("Zürich 中 \t\n")) == "Zürich 中 \t\n", "any text round-trips"
