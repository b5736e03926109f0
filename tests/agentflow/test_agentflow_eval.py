"""Benchmarks in their public formats, and the evaluation program against scripted engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_agentflow import Play, role_of
from helpers_agentic import FakeEngine, FakeTokenizer, Reply

from agentic.agentflow import arms, crew
from agentic.agentflow import eval as evaluation
from agentic.agentflow.benchmarks import BENCHMARKS, Question, load_questions, score_answer
from agentic.common.clients import Completion
from agentic.common.errors import ConfigError

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the development data sets are not beside the repository")
GPQA = {"Question": "Pick", "Correct Answer": "right", "Record ID": "r1"} | {
    f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)
}
OPTIONS = {"A": "cat", "B": "dog", "C": "cow", "D": "10 mg"}


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(tmp_path: Path, benchmark: str, *records: dict[str, Any]) -> list[Question]:
    return load_questions(benchmark, jsonl(tmp_path / "data.jsonl", *records))[0]


# --------------------------------------------------------------------------------------------------------------------
# Loaders.


@pytest.mark.parametrize(
    ("benchmark", "record", "prompt", "labels", "kind"),
    [
        ("aime24", {"ID": "2024-I-1", "Problem": "P", "Solution": "s", "Answer": 204}, "P", ("204",), "integer"),
        ("aime24", {"id": 60, "problem": "P", "answer": "073"}, "P", ("073",), "integer"),
        ("aime24", {"prompt": [{"role": "user", "content": "P"}], "label": "33"}, "P", ("33",), "integer"),
        ("aime24", {"question": "P. Put it in <answer> tags.", "result": "5", "source": "x"}, "P.", ("5",), "integer"),
        ("amc23", {"id": 0, "question": "P", "answer": "27.0"}, "P", ("27",), "integer"),
        ("gsm8k", {"question": "P", "answer": "4+4=8 <<4+4=8>>\n#### 1,208"}, "P", ("1208",), "integer"),
        ("math", {"problem": "P", "solution": r"so \boxed{\frac{1}{2}}.", "level": "5"}, "P", (r"\frac{1}{2}",), "math"),
        ("math", {"problem": "P", "solution": "s", "answer": "2x", "unique_id": "u"}, "P", ("2x",), "math"),
        ("bamboogle", {"Question": "Q?", "Answer": "A"}, "Q?", ("A",), "qa"),
        ("hotpotqa", {"_id": "1", "question": "Q?", "answer": "yes", "context": []}, "Q?", ("yes",), "qa"),
        ("hotpotqa", {"id": "1", "question": "Q?", "answers": ["A", "B"], "gold": []}, "Q?", ("A", "B"), "qa"),
        ("2wiki", {"id": "1", "question": "Q?", "golden_answers": ["A"], "metadata": {}}, "Q?", ("A",), "qa"),
        ("musique", {"question": "Q?", "answer": "A", "answer_aliases": ["a1"], "answerable": True}, "Q?", ("A", "a1"), "qa"),
        ("gaia", {"task_id": "t", "Question": "Q?", "Final answer": "17", "file_name": ""}, "Q?", ("17",), "qa"),
        ("bamboogle", {"pid": 1, "question": "Q", "query": "Q, please?", "answer": "A"}, "Q, please?", ("A",), "qa"),
    ],
)  # fmt: skip
def test_public_formats(
    tmp_path: Path, benchmark: str, record: dict[str, Any], prompt: str, labels: tuple[str, ...], kind: str
) -> None:
    question = load(tmp_path, benchmark, record)[0]
    assert (question.prompt, question.labels, question.kind) == (prompt, labels, kind)


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Pick", "options": OPTIONS, "answer": "dog", "answer_idx": "B"},
        {"question": "Pick", "choices": ["cat", "dog", "cow", "10 mg"], "answer": "B"},
        {"question": "Pick", "options": ["(A) cat", "B. dog", "C) cow", "D: 10 mg"], "answer": "dog"},
        {"question": "Pick", "options": [{"key": k, "value": v} for k, v in OPTIONS.items()], "answer": "(B)"},
    ],
)
def test_multiple_choice_formats(tmp_path: Path, record: dict[str, Any]) -> None:
    question = load(tmp_path, "medqa", record)[0]
    assert question.labels == ("B",) and question.options == ("cat", "dog", "cow", "10 mg")
    assert "A. cat\nB. dog\nC. cow\nD. 10 mg" in question.prompt


def test_gpqa_options_are_shuffled_by_the_question_alone(tmp_path: Path) -> None:
    records = [GPQA | {"Question": f"Pick {n}", "Record ID": str(n)} for n in range(12)]
    questions = load(tmp_path, "gpqa", *records)
    assert questions == load(tmp_path, "gpqa", *records)
    assert all(q.options["ABCD".index(q.labels[0])] == "right" for q in questions)
    assert len({q.labels for q in questions}) > 1


@pytest.mark.parametrize(
    "record",
    [{"Rank": "1", "Puzzles": "1 1 4 6"}, {"numbers": [1, 1, 4, 6], "solvable": True}, {"question": "Get 24 from [1, 1, 4, 6]!"}],
)  # fmt: skip
def test_game_of_24_formats(tmp_path: Path, record: dict[str, Any]) -> None:
    question = load(tmp_path, "gameof24", record)[0]
    assert question.numbers == (1, 1, 4, 6) and "1, 1, 4 and 6" in question.prompt


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    good = {"Question": "Q?", "Final answer": "1", "task_id": "a"}
    file = jsonl(
        tmp_path / "d.jsonl",
        good,
        good | {"file_name": "x.png", "task_id": "b"},
        good | {"Final answer": "?", "task_id": "c"},
    )
    assert load_questions("gaia", file)[1] == {"needs_a_file": 1, "no_label": 1}
    assert load_questions("gaia", file, limit=1) == (load_questions("gaia", file)[0], {})
    with pytest.raises(ConfigError, match="no usable question of gaia"):
        load_questions("gaia", jsonl(tmp_path / "e.jsonl", good | {"Final answer": "?"}))


@pytest.mark.parametrize(
    ("benchmark", "records", "message"),
    [
        ("aime24", [{"problem": "P", "answer": "1/2"}], r"data\.jsonl:1: the answer '1/2' is no integer"),
        ("aime24", [{"id": 1, "problem": "P", "answer": 1}] * 2, r"data\.jsonl:2: the id '1' occurs twice"),
        ("hotpotqa", [{"question": "Q"}], r"data\.jsonl:1: needs one of the fields answer, .*; it has question"),
        ("medqa", [{"question": "Q", "options": OPTIONS, "answer": "horse"}], "'horse' is none of the 4 options"),
        ("gameof24", [{"numbers": [1, 2, 3]}], "expected four numbers, found 3"),
        ("gms8k", [{}], r"no such benchmark \(did you mean 'gsm8k'\?\)"),
    ],
)
def test_loader_errors(tmp_path: Path, benchmark: str, records: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, benchmark, *records)


@needs_data
def test_real_files() -> None:
    aime = load_questions("aime24", DATA / "math" / "aime24.jsonl")[0]
    assert len(aime) == 30 and {q.kind for q in aime} == {"integer"} and aime[0].id == "aime24-0"
    assert {q.kind for q in load_questions("gsm8k", DATA / "math" / "gsm8k_test.jsonl", 100)[0]} == {"integer"}
    deep = load_questions("math", DATA / "math" / "deepmath_1k.jsonl", 200)[0]
    assert {q.kind for q in deep} == {"integer", "math"}
    assert load_questions("hotpotqa", DATA / "hotpotqa" / "questions.jsonl")[0][0].kind == "qa"


@needs_data
async def test_every_reference_scores_one() -> None:
    for benchmark, file in (("aime24", "aime24"), ("gsm8k", "gsm8k_test"), ("math", "deepmath_1k")):
        for question in load_questions(benchmark, DATA / "math" / f"{file}.jsonl", 100)[0]:
            scored = await score_answer(question, f"so \\boxed{{{question.labels[0]}}}", None, unused)
            assert scored.judgement.score == 1.0, question


# --------------------------------------------------------------------------------------------------------------------
# Scores.


def unused(**_: str) -> list[dict[str, Any]]:
    raise AssertionError("the judge must not be asked")


class Judge:
    """Says True, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []

    def render(self, **fields: str) -> list[dict[str, Any]]:
        self.asked.append(fields)
        return []

    async def complete(self, messages: Any) -> Completion:
        return Completion("VERDICT: True", "stop", 1, 1, 0.0)


CHOICE = Question("c", "Pick", ("B",), "choice", options=("cat", "dog", "cow"))
QA = Question("q", "Who?", ("Barack Obama", "Obama"), "qa")
GAME = Question("g", "Make 24", ("24",), "game24", numbers=(1, 1, 4, 6))


@pytest.mark.parametrize(
    ("question", "answer", "score", "by"),
    [
        (Question("i", "P", ("73",), "integer"), r"\boxed{073}", 1.0, "rule"),
        (Question("i", "P", ("73",), "integer"), "so x = 73", 0.0, "none"),
        (Question("i", "P", ("73",), "integer"), r"\boxed{\text{seventy-three}}", 0.0, "none"),
        (Question("m", "P", ("0.5",), "math"), r"\boxed{\frac{1}{2}}", 1.0, "rule"),
        (CHOICE, r"\boxed{B}", 1.0, "rule"),
        (CHOICE, r"\boxed{A}", 0.0, "rule"),
        (CHOICE, "<answer>the dog</answer>", 1.0, "rule"),
        (QA, "It was <answer>obama</answer>", 1.0, "rule"),
        (QA, "Barack Obama.", 1.0, "rule"),
        (GAME, r"\boxed{(1 + 1 + 4) \times 4}", 0.0, "rule"),
        (GAME, r"\boxed{6 \times 4 \times 1 \times 1}", 1.0, "rule"),
        (GAME, "6 * 4 * 1 * 1", 0.0, "rule"),
        (QA, "  ", 0.0, "empty"),
    ],
)
async def test_rules(question: Question, answer: str, score: float, by: str) -> None:
    judge = Judge()
    scored = await score_answer(question, answer, judge, judge.render)
    assert (scored.judgement.score, scored.judgement.judged_by) == (score, by)
    assert judge.asked == []


async def test_what_rules_cannot_tell_goes_to_the_judge() -> None:
    judge = Judge()
    asked = [(QA, "the 44th president", "Barack Obama or Obama"), (CHOICE, "the animal that barks", "B. dog")]
    for question, answer, reference in asked:
        scored = await score_answer(question, answer, judge, judge.render)
        assert scored.judgement.judged_by == "judge" and judge.asked[-1]["label"] == reference
        alone = await score_answer(question, answer, None, unused)
        assert (alone.judgement.score, alone.judgement.judged_by) == (0.0, "none")
    f1 = (await score_answer(QA, "<answer>Mr Obama</answer>", None, unused)).measures
    assert f1 == {"f1": pytest.approx(2 / 3)}


# --------------------------------------------------------------------------------------------------------------------
# The program.


class Stage:
    """Three engines (untrained and trained policy, frozen roles), a data file and both role files."""

    def __init__(self, tmp_path: Path, policy: FakeEngine, trained: FakeEngine, frozen: FakeEngine) -> None:
        self.engines = {"untrained": policy, "trained": trained, "frozen": frozen}
        self.tmp_path, self.out = tmp_path, tmp_path / "out"
        records = ({"id": f"q{n}", "question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(3, 8))
        self.data = jsonl(tmp_path / "gsm8k.jsonl", *records)
        self.roles = {"untrained": self.write_roles("untrained"), "trained": self.write_roles("trained")}

    def write_roles(self, planner: str, /, **changes: Any) -> Path:
        entry = {"url": self.engines["frozen"].url, "tokenizer": "fake", "model": "frozen-7b"}
        roles = {name: dict(entry) for name in crew.ROLES}
        roles["planner"] = {"url": self.engines[planner].url, "tokenizer": planner, "model": f"{planner}-7b"}
        for name, change in changes.items():
            roles[name] |= change
        path = self.tmp_path / f"roles_{planner}.yaml"
        path.write_text(yaml.safe_dump({"defaults": {"retries": 0, "timeout_s": 60}, "roles": roles}))
        return path

    def run(self, *more: str, runs: int = 2, names: str = "baseline,untrained,trained") -> int:
        argv = ["--data", f"gsm8k={self.data}", "--roles", str(self.roles["untrained"]), "--arms", names]
        argv += ["--runs", str(runs), "--out", str(self.out), "--max-steps", "2", "--max-new-tokens", "512"]
        if "trained" in names.split(","):
            argv += ["--trained-roles", str(self.roles["trained"])]
        return evaluation.main([*argv, *more])

    def lines(self, arm: str, run: int) -> list[dict[str, Any]]:
        path = self.out / "runs" / f"gsm8k.{arm}.{run}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.out / "result.json").read_text())


def solve(prompt: str) -> str | Reply:
    """Right in the final answer of the frozen generator and in a single turn for odd numbers only."""
    number = int(re.findall(r"What is (\d+)", prompt)[-1]) if "What is" in prompt else 0
    if role_of(prompt) == "final":
        return f"\\boxed{{{number + 4}}}"
    if "Think step by step" in prompt:
        return f"\\boxed{{{number + 4 if number % 2 else 0}}}"
    return Play()(prompt)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda path: FakeTokenizer())
    monkeypatch.setattr("agentic.common.clients._load_tokenizer", lambda path: FakeTokenizer())
    with FakeEngine(solve) as policy, FakeEngine(solve) as trained, FakeEngine(solve) as frozen:
        yield Stage(tmp_path, policy, trained, frozen)


def test_three_arms_under_one_protocol(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run() == 0
    results = stage.result["results"]["gsm8k"]
    assert {arm: stats["mean"] for arm, stats in results["arms"].items()} == {
        "baseline": 0.6, "untrained": 1.0, "trained": 1.0
    }  # fmt: skip
    assert results["arms"]["baseline"]["majority"] == 0.6 and results["arms"]["baseline"]["n_runs"] == 2
    assert results["differences"]["untrained - baseline"]["mean"] == pytest.approx(0.4)
    policies = [*stage.engines["untrained"].requests, *stage.engines["trained"].requests]
    sampling = [request.body["sampling_params"] for request in policies]
    assert len(policies) == 2 * 5 * (1 + 2 + 2) and all("input_ids" in request.body for request in policies)
    assert {(p["temperature"], p["top_p"], p["max_new_tokens"]) for p in sampling} == {(0.7, 1.0, 512)}
    assert not any("sampling_seed" in p for p in sampling)  # the engine does not say that it is deterministic
    table = capsys.readouterr().out
    assert "untrained" in table and "majority@2" in table and "60.0" in table


def test_lines_hold_what_happened(stage: Stage) -> None:
    assert stage.run(runs=1) == 0
    line = stage.lines("untrained", 0)[0]
    assert [line["id"] for line in stage.lines("untrained", 0)] == [f"q{n}" for n in range(3, 8)]
    names = ("dataset", "arm", "run", "answer", "score", "judged_by", "vote", "failure_reason")
    assert [line[name] for name in names] == ["gsm8k", "untrained", 0, "\\boxed{7}", 1.0, "rule", "7", None]
    assert set(line["tokens"]) == {"analysis", "next_step", "executor", "base_generator", "verifier", "generator"}
    assert all(counts["calls"] == 1 and counts["prompt"] > 0 for counts in line["tokens"].values())
    assert line["details"]["stop_reason"] == "verifier" and line["details"]["weight_versions"] == ["1"]
    assert set(stage.lines("baseline", 0)[0]["tokens"]) == {"baseline"} and line["seconds"] > 0


def test_result_names_roles_models_data_and_commit(stage: Stage) -> None:
    assert stage.run(runs=1) == 0
    result = stage.result
    assert result["models"]["trained"]["planner"] == {"name": "trained-7b"}
    assert {role["name"] for role in result["roles"]["untrained"]} == set(crew.ROLES)
    assert len(result["protocol"]["data"]["gsm8k"]["sha256"]) == 64 and "commit" in result
    assert result["protocol"]["settings"]["eval_max_steps"] == 2
    assert result["checks"]["judge"] == {"right": True, "wrong": True}  # scripted to say True always
    assert result["data"]["gsm8k"]["n"] == 5 and result["tools"] == ["base_generator", "python_coder"]


def test_seeds_go_to_a_deterministic_engine(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def info(url: str) -> dict[str, Any]:
        return {"enable_deterministic_inference": True, "model_path": "fake"}

    monkeypatch.setattr(evaluation, "engine_info", info)
    assert stage.run(names="baseline,untrained") == 0
    seeds = {(arm, run): [line["details"]["seed"] for line in stage.lines(arm, run)]
             for arm in ("baseline", "untrained") for run in (0, 1)}  # fmt: skip
    assert seeds["baseline", 0] == seeds["untrained", 0] != seeds["baseline", 1]
    sent = {request.body["sampling_params"]["sampling_seed"] for request in stage.engines["untrained"].requests}
    assert sent == {seed for values in seeds.values() for seed in values} and len(sent) == 10


def test_incomplete_gives_no_summary(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run(names="baseline") == 0
    capsys.readouterr()
    (stage.out / "result.json").unlink()
    file = stage.out / "runs" / "gsm8k.baseline.1.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:3]))
    asked = len(stage.engines["untrained"].requests)
    assert stage.run("--summary", names="baseline") == evaluation.INCOMPLETE
    out = capsys.readouterr()
    assert out.out == "" and not (stage.out / "result.json").exists()
    assert "gsm8k, baseline, run 1: 2 of 5 questions have no answer (q6, q7)" in out.err
    assert len(stage.engines["untrained"].requests) == asked
    assert stage.run(names="baseline") == 0
    assert len(stage.engines["untrained"].requests) == asked + 2
    assert [line["id"] for line in stage.lines("baseline", 1)] == [f"q{n}" for n in range(3, 8)]


def test_a_killed_evaluation_goes_on_to_the_same_lines(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    done = 0
    answer = arms.Evaluator.answer

    async def dies(self: arms.Evaluator, job: Any) -> Any:
        nonlocal done
        done += 1
        if done == 8:
            raise Killed
        return await answer(self, job)

    monkeypatch.setattr(arms.Evaluator, "answer", dies)
    with pytest.raises(Killed):
        stage.run("--concurrency", "2")
    monkeypatch.setattr(arms.Evaluator, "answer", answer)
    assert stage.run() == 0
    halted = {(arm, run): stage.lines(arm, run) for arm in arms.ARMS for run in (0, 1)}
    stage.out = stage.tmp_path / "whole"
    assert stage.run() == 0
    varying = ("seconds", "details")
    for (arm, run), lines in halted.items():
        whole = stage.lines(arm, run)
        assert [{k: v for k, v in line.items() if k not in varying} for line in lines] == [
            {k: v for k, v in line.items() if k not in varying} for line in whole
        ]


def test_a_failed_role_is_no_score_and_is_tried_again(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = stage.engines["frozen"]
    frozen.script = lambda prompt: Reply(status=500) if "What is 5" in prompt else solve(prompt)
    assert stage.run(names="untrained", runs=1) == evaluation.INCOMPLETE
    assert "1 of 5 questions failed (role_unavailable:executor x1)" in capsys.readouterr().err
    line = stage.lines("untrained", 0)[2]
    assert line["score"] is None and line["failure_reason"] == "role_unavailable:executor"
    assert stage.run("--summary", "--max-failure-rate", "0.2", names="untrained", runs=1) == 0
    stats = stage.result["results"]["gsm8k"]["arms"]["untrained"]
    assert stats["n_failed"] == 1 and stats["mean"] == 1.0 and stats["mean_failures_wrong"] == 0.8
    frozen.script = solve
    assert stage.run(names="untrained", runs=1) == 0
    assert stage.result["results"]["gsm8k"]["arms"]["untrained"]["n_failed"] == 0


def test_a_prompt_over_the_context_is_a_wrong_answer(stage: Stage) -> None:
    config = stage.tmp_path / "agentflow.yaml"
    config.write_text("agentflow_max_context_len: 100\n")
    assert stage.run("--config", str(config), names="baseline", runs=1) == 0
    line = stage.lines("baseline", 0)[0]
    assert (line["score"], line["judged_by"], line["failure_reason"]) == (0.0, "budget", "prompt_too_long")


def test_other_settings_need_another_folder(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run(names="baseline", runs=1) == 0
    assert stage.run("--seed", "5", names="baseline", runs=1) == 2
    assert "started with seed = 0, now 5; choose another --out folder" in capsys.readouterr().err
    stage.data.write_text(stage.data.read_text().replace("What is 3", "What is 9"))
    assert stage.run(names="baseline", runs=1) == 2
    assert "data.gsm8k.sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("planner", "changes", "message"),
    [
        ("trained", {"executor": {"model": "other"}}, "roles.executor.model differs"),
        ("trained", {"judge": {"temperature": 0.5}}, "roles.judge.temperature differs"),
        ("untrained", {}, "roles.planner: same address"),
    ],
)
def test_arms_may_differ_in_the_planner_only(
    stage: Stage, capsys: pytest.CaptureFixture[str], planner: str, changes: dict[str, Any], message: str
) -> None:
    stage.roles["trained"] = stage.write_roles(planner, **changes)
    assert stage.run(runs=1) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "gsm8k"], "--data gsm8k: write BENCHMARK=PATH"),
        (["--data", "gsm8k=nowhere.jsonl"], "nowhere.jsonl: no such data file"),
        (["--arms", "trained"], "--arms trained: needs --trained-roles"),
        (["--arms", "base"], "--arms base: no such arm (did you mean 'baseline'?)"),
        (["--runs", "0"], "argument --runs: 0: must be at least 1"),
        (["--run", "2"], "unrecognized arguments: --run 2"),
        (["--temperature", "-1"], "--temperature -1.0: out of range"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
    ],
)
def test_bad_flags_are_one_line(
    stage: Stage, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    data = [] if "--data" in argv else ["--data", f"gsm8k={stage.data}"]
    assert evaluation.main([*data, "--roles", str(stage.roles["untrained"]), "--out", str(stage.out), *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not stage.out.exists()


def test_the_planner_of_an_evaluation_has_an_address(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.roles["untrained"] = stage.write_roles("untrained", planner={"url": "policy"})
    assert stage.run(names="baseline") == 2
    assert "`url: policy` is for training" in capsys.readouterr().err
    stage.roles["untrained"] = stage.write_roles("untrained", planner={"url": "http://127.0.0.1:9"})
    assert stage.run(names="baseline") == 2
    assert "does not answer" in capsys.readouterr().err


def test_two_files_of_one_kind_have_two_names(stage: Stage) -> None:
    data = evaluation.load_data([f"math:one={stage.data}", f"math:two={stage.data}"], limit=2)
    assert list(data) == ["one", "two"] and len(data["two"].questions) == 2
    with pytest.raises(ConfigError, match="'math' is used twice"):
        evaluation.load_data([f"math={stage.data}", f"math={stage.data}"], None)


def test_all_benchmarks_are_there() -> None:
    assert set(BENCHMARKS) == {
        "aime24", "amc23", "gsm8k", "math", "bamboogle", "hotpotqa", "2wiki", "musique", "gaia", "gpqa", "medqa", "gameof24"
    }  # fmt: skip
