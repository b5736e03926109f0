"""The generic evaluation: lines survive a kill, a resumed run gives the same set, statistics are exact."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentic.common.errors import ConfigError, TooManyFailures
from agentic.common.evaluation import Job, Outcome, RunStore, check_protocol, exclusive, run_jobs
from agentic.common.evaluation_provenance import commit, engine_info, model_fingerprint, sha256_file
from agentic.common.evaluation_records import need_field, read_records
from agentic.common.evaluation_scores import option_of, qa_exact, qa_f1, reaches
from agentic.common.evaluation_statistics import (
    compare_arms,
    majority_score,
    missing,
    paired_difference,
    render_results,
    standard_error,
    summarise,
)


@dataclass(frozen=True)
class Q:
    id: str


JOBS = [Job("d", "a", run, Q(f"q{number}")) for run in range(2) for number in range(6)]


async def scored(job: Job) -> Outcome:
    await asyncio.sleep(random.random() / 200)
    return Outcome(f"{job.question.id}/{job.run}", 1.0, "rule", vote="x")


def line(score: float | None, vote: str | None = None, **more) -> dict:
    base = {"id": "q", "score": score, "vote": vote, "judged_by": "rule", "tokens": {}, "seconds": 1.0}
    return base | {"failure_reason": None if score is not None else "role_timeout:judge"} | more


def answers(store: RunStore) -> dict[tuple[int, str], str]:
    return {(run, id_): value["answer"] for run in range(2) for id_, value in store.load("d", "a", run).items()}


class Killed(BaseException):
    pass


async def test_a_killed_run_goes_on_and_ends_with_the_same_lines(tmp_path: Path) -> None:
    whole, halted = RunStore(tmp_path / "whole"), RunStore(tmp_path / "halted")
    await run_jobs(JOBS, scored, whole, 3)
    asked: list[Job] = []

    async def dies(job: Job) -> Outcome:
        asked.append(job)
        if len(asked) == 5:
            raise Killed
        return await scored(job)

    with pytest.raises(Killed):
        await run_jobs(JOBS, dies, halted, 3)
    path = halted.path("d", "a", 0)
    done = len(halted.load("d", "a", 0))
    assert 0 < done < 6
    with path.open("ab") as file:
        file.write(b'{"id": "q5", "sco')  # a write that the kill cut short
    asked.clear()

    async def counts(job: Job) -> Outcome:
        asked.append(job)
        return await scored(job)

    await run_jobs(JOBS, counts, halted, 3)
    assert len(asked) == len(JOBS) - done
    ids = [f"q{number}" for number in range(6)]
    for store in (whole, halted):
        for run in range(2):
            store.settle("d", "a", run, ids)
            assert [json.loads(text)["id"] for text in store.path("d", "a", run).read_text().splitlines()] == ids
    assert answers(whole) == answers(halted) and len(answers(whole)) == 12
    await run_jobs(JOBS, dies, halted, 3)  # nothing left to do


async def test_failures_are_tried_again_and_the_later_line_wins(tmp_path: Path) -> None:
    store, ids = RunStore(tmp_path), ["q0", "q1"]
    jobs = [Job("d", "a", 0, Q(id_)) for id_ in ids]

    async def fails(job: Job) -> Outcome:
        bad = job.question.id == "q1"
        return Outcome("", None if bad else 1.0, "none", failure_reason="role_timeout:judge" if bad else None)

    await run_jobs(jobs, fails, store, 2)
    assert missing([store.load("d", "a", 0)], ids, 0.0) == ["run 0: 1 of 2 questions failed (role_timeout:judge x1)"]
    assert missing([store.load("d", "a", 0)], ids, 0.5) == []
    await run_jobs(jobs, scored, store, 2)
    assert missing([store.load("d", "a", 0)], ids, 0.0) == []
    store.settle("d", "a", 0, ids)
    assert len(store.path("d", "a", 0).read_text().splitlines()) == 2


async def test_nothing_but_failures_stops_the_loop(tmp_path: Path) -> None:
    async def down(job: Job) -> Outcome:
        return Outcome("", None, "none", failure_reason="role_unavailable:planner")

    jobs = [Job("d", "a", 0, Q(str(number))) for number in range(100)]
    with pytest.raises(TooManyFailures, match="20 failures in a row, the last role_unavailable:planner"):
        await run_jobs(jobs, down, RunStore(tmp_path), 4)
    assert len(RunStore(tmp_path).load("d", "a", 0)) < 30


async def test_concurrency_is_a_limit(tmp_path: Path) -> None:
    flying = most = 0

    async def watch(job: Job) -> Outcome:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001)
        flying -= 1
        return Outcome("", 1.0, "rule")

    await run_jobs(JOBS, watch, RunStore(tmp_path), 4)
    assert most == 4


def test_broken_line_names_file_and_line(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.path("d", "a", 0).write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"d\.a\.0\.jsonl:1: not a result line"):
        store.load("d", "a", 0)


def test_text_that_is_no_utf8_survives(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append(JOBS[0], Outcome("a\ud800b\u2028\n", 1.0, "rule"))
    store.settle("d", "a", 0, ["q0"])
    assert store.load("d", "a", 0)["q0"]["answer"] == "a\ud800b\u2028\n"


def test_one_folder_one_protocol_one_process(tmp_path: Path) -> None:
    check_protocol(tmp_path, {"seed": 1, "data": {"a": "x"}}, growing=("data",))
    check_protocol(tmp_path, {"seed": 1, "data": {"b": "y"}}, growing=("data",))
    assert json.loads((tmp_path / "protocol.json").read_text())["data"] == {"a": "x", "b": "y"}
    with pytest.raises(ConfigError, match="started with seed = 1, now 2"):
        check_protocol(tmp_path, {"seed": 2, "data": {}}, growing=("data",))
    with pytest.raises(ConfigError, match=r"data\.a = 'x', now 'z'"):
        check_protocol(tmp_path, {"seed": 1, "data": {"a": "z"}}, growing=("data",))
    with exclusive(tmp_path), pytest.raises(ConfigError, match="another evaluation"):
        with exclusive(tmp_path):
            pass


def test_statistics() -> None:
    runs = [{"p": line(1.0, "7"), "q": line(0.0, "1")}, {"p": line(1.0, "7.0"), "q": line(1.0, "2")}]
    stats = summarise(runs, ["p", "q"])
    assert stats["mean"] == 0.75 and stats["run_means"] == [0.5, 1.0]
    assert stats["stderr"] == pytest.approx(0.25) and stats["stderr_runs"] == pytest.approx(0.25)
    assert stats["majority"] == pytest.approx((1.0 + 0.5) / 2)  # the tie of q counts its mean
    assert stats["n_failed"] == 0
    assert standard_error([1.0]) is None
    assert standard_error([0.0, 0.0, 1.0, 1.0]) == pytest.approx((1 / 3) ** 0.5 / 2)


def test_a_failure_is_no_score() -> None:
    runs = [{"p": line(1.0), "q": line(None)}, {"p": line(0.0), "q": line(None)}]
    stats = summarise(runs, ["p", "q"])
    assert stats["mean"] == 0.5 and stats["mean_failures_wrong"] == 0.25
    assert stats["n_failed"] == 2 and stats["failure_reasons"] == {"role_timeout:judge": 2}
    assert missing(runs[:1], ["p", "q", "r"], 1.0) == ["run 0: 1 of 3 questions have no answer (r)"]


@pytest.mark.parametrize(
    ("votes", "score"),
    [
        ([("5", 1), ("5", 1), ("6", 0)], 1.0),
        ([("6", 0), ("6", 0), ("5", 1)], 0.0),
        ([("1/2", 1), ("0.5", 1), ("7", 0), (None, 0), (None, 0), (None, 0)], 1.0),
        ([(None, 0)], 0.0),
    ],
)
def test_majority(votes: list, score: float) -> None:
    assert majority_score([line(float(value), vote) for vote, value in votes]) == score


def test_arms_are_compared_question_by_question() -> None:
    assert paired_difference({"p": 1.0, "q": 0.5}, {"p": 0.5, "q": 0.0, "r": 1.0}) == {
        "n": 2,
        "mean": 0.5,
        "stderr": 0.0,
    }
    arms = compare_arms(
        {"old": [{"p": line(0.0), "q": line(0.0)}], "new": [{"p": line(1.0), "q": line(0.0)}]}, ["p", "q"]
    )
    assert arms["differences"]["new - old"] == {"n": 2, "mean": 0.5, "stderr": 0.5}
    assert "d: new - old = 50.0 +- 50.0 (n=2)" in render_results({"d": arms}, 1)


@pytest.mark.parametrize(
    ("candidate", "letter"),
    [("B", "B"), ("(b)", "B"), ("B. a dog", "B"), (r"\text{B}", "B"), ("a dog", "B"), ("The answer is (C)", "C"),
     ("E", None), ("a fish", None), ("D) 10", "D"), ("10.0", "D")],
)  # fmt: skip
def test_option_letter_then_content(candidate: str, letter: str | None) -> None:
    assert option_of(candidate, ["a cat", "A dog", "a cow", "10"]) == letter


def test_option_content_must_be_unique() -> None:
    assert option_of("same", ["same", "same", "other"]) is None


def test_short_answers() -> None:
    assert qa_exact("The Eiffel-Tower.", ["eiffeltower", "x"]) and qa_exact("1,000", ["1000"])
    assert not qa_exact("Paris", ["London"]) and not qa_exact("!", ["the"])
    assert qa_f1("Barack Hussein Obama", ["Obama", "Barack Obama"]) == pytest.approx(0.8)
    assert qa_f1("", ["x"]) == 0.0


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("(1 + 1 + 4) * 4", True),
        ("(1+1+4)*4 = 24", True),
        (r"\left(1 + 1 + 4\right) \times 4", True),
        ("[1 + 1 + 4] × 4", True),
        ("(1+1+4)*4 = 25", False),
        ("(1 + 1 + 4) * 4 * 1", False),
        ("14 + 14 - 4", False),
        ("4 * (4 + 1 + 1", False),
        ("__import__('os').getcwd()", False),
        ("4**4", False),
        ("1+" * 500 + "1", False),
        ("4 / (1 - 1) + 4", False),
        ("", False),
    ],
)
def test_game_of_24(expression: str, right: bool) -> None:
    assert reaches(expression, [1, 1, 4, 4]) is right


def test_game_of_24_is_exact() -> None:
    assert reaches("8/(3-8/3)", [3, 3, 8, 8]) and reaches(r"\frac{8}{3-\frac{8}{3}}", [3, 3, 8, 8])


def test_records_of_all_types(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]
    (tmp_path / "f.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "f.json").write_text(json.dumps({"data": rows}))
    (tmp_path / "f.csv").write_text("a,b\n1,x\n2,y\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        assert [record for _, record in read_records(tmp_path / f"f.{suffix}")] == rows


def test_record_errors_name_the_place(tmp_path: Path) -> None:
    bad = tmp_path / "f.jsonl"
    bad.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ConfigError, match=r"f\.jsonl:2: not valid JSON"):
        list(read_records(bad))
    bad.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"f\.jsonl:1: expected an object"):
        list(read_records(bad))
    bad.write_text("\n")
    with pytest.raises(ConfigError, match="holds no records"):
        list(read_records(bad))
    with pytest.raises(FileNotFoundError):
        list(read_records(tmp_path / "none.jsonl"))
    (tmp_path / "f.txt").write_text("x")
    with pytest.raises(ConfigError, match="unknown type"):
        list(read_records(tmp_path / "f.txt"))
    with pytest.raises(ConfigError, match="here: needs one of the fields b, c; it has a"):
        need_field({"a": 1, "b": None}, "here", "b", "c")


def test_fingerprint_sees_changed_weights_of_the_same_size(tmp_path: Path) -> None:
    prints = []
    for number, byte in enumerate((b"a", b"b", b"a")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(byte * 1000)
        prints.append({key: value for key, value in model_fingerprint(str(folder)).items() if key != "name"})
    assert prints[0] == prints[2] != prints[1] and prints[0]["weights_bytes"] == 1000
    assert model_fingerprint("gpt-x") == {"name": "gpt-x"}
    assert sha256_file(tmp_path / "0" / "config.json") == prints[0]["config_sha256"]
    assert commit() is None or len(commit() or "") >= 40


async def test_engine_without_info_is_empty() -> None:
    assert await engine_info("http://127.0.0.1:9", timeout_s=0.5) == {}
