"""Data of MemAgent: synthesis, published shapes, inspection of damaged files, closed-book filter."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_agentic import FakeEngine, Reply

from agentic.common.errors import ConfigError
from agentic.memagent import data
from agentic.memagent.data_documents import DocumentPool, Question, load_pool, load_questions
from agentic.memagent.data_filter import answer_kind, decide, is_known
from agentic.memagent.data_items import RULER, load_items, read_context
from agentic.memagent.data_synthesis import arrange, render_documents
from slime.utils.data import Dataset

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared/data/hotpotqa"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data set at {SHARED}")

PUBLISHED_200 = (7, 10, 17, 81, 88, 96, 109, 154, 177, 191)
PUBLISHED_50 = (11, 18, 27, 29, 37, 41, 42, 43, 44, 48)


def question(index: int = 0, own: int = 10) -> Question:
    documents = tuple(f"Own {index}.{n}\ntext {n}" for n in range(own))
    return Question(f"q{index}", index, f"question {index}?", ("answer",), documents, frozenset({0, own - 1}))


QUESTIONS = [question(index) for index in range(4)]
POOL = DocumentPool([*(f"Other {n}\nbody {n}" for n in range(300)), *(text for q in QUESTIONS for text in q.own)])


def write(path: Path, records: list) -> Path:
    text = json.dumps(records) if path.suffix == ".json" else "".join(json.dumps(r) + "\n" for r in records)
    path.write_text(text, encoding="utf-8")
    return path


# --------------------------------------------------------------------------------------------------------------------
# Synthesis.


def test_200_documents_hold_all_own_ones_exactly_once() -> None:
    order = arrange(QUESTIONS[0], POOL, 200, seed=0)
    texts = [POOL[index] for index in order.indices]
    assert len(texts) == len(set(texts)) == 200
    assert {place for place, text in enumerate(texts, start=1) if text in QUESTIONS[0].own} == set(order.own)
    assert len(order.own) == 10
    wanted = {QUESTIONS[0].own[0], QUESTIONS[0].own[9]}
    assert {texts[place - 1] for place in order.evidence} == wanted
    context = render_documents(texts)
    assert [f"Document {n}:" for n in range(1, 201)] == [
        line for line in context.split("\n") if line[:9] == "Document "
    ]


def test_places_differ_by_question_unless_compatible() -> None:
    first, second = (arrange(q, POOL, 200, seed=0) for q in QUESTIONS[:2])
    assert set(first.own) != set(second.own)
    compatible = [arrange(q, POOL, 200, seed=0, compat_shuffle=True) for q in QUESTIONS]
    assert {order.own for order in compatible} == {PUBLISHED_200}
    assert compatible[0].indices != compatible[1].indices
    assert arrange(QUESTIONS[0], POOL, 50, seed=0, compat_shuffle=True).own == PUBLISHED_50


def test_seed_question_and_length_decide_the_context() -> None:
    base = arrange(QUESTIONS[0], POOL, 50, seed=1)
    assert arrange(QUESTIONS[0], POOL, 50, seed=1) == base
    assert arrange(QUESTIONS[0], POOL, 50, seed=2).indices != base.indices
    assert arrange(QUESTIONS[0], POOL, 51, seed=1).indices[:50] != base.indices


def test_no_other_version_of_an_own_document_is_a_distractor() -> None:
    pool = DocumentPool([*POOL.documents, "Own 0.3\nanother wording"])
    order = arrange(QUESTIONS[0], pool, len(pool) - 1, seed=0)
    assert pool.index("Own 0.3\nanother wording") not in order.indices


def test_a_pool_that_is_too_small_says_what_is_possible() -> None:
    with pytest.raises(ConfigError, match=r"--num-docs 341: question q0 has 10 .* from 10 to 340"):
        arrange(QUESTIONS[0], POOL, 341, seed=0)
    with pytest.raises(ConfigError, match="--num-docs 9"):
        arrange(QUESTIONS[0], POOL, 9, seed=0)


HOTPOT = {
    "_id": "x1",
    "question": "Who?",
    "answer": "yes",
    "context": [["B", ["One. ", "Two."]], ["A", ["Three."]]],
    "supporting_facts": [["A", 0]],
}
HUB = {
    "id": "x1",
    "question": "Who?",
    "answer": "yes",
    "context": {"title": ["B", "A"], "sentences": [["One. ", "Two."], ["Three."]]},
    "supporting_facts": {"title": ["A"], "sent_id": [0]},
}


@pytest.mark.parametrize("record", [HOTPOT, HUB])
def test_official_and_hub_form_are_the_same_question(tmp_path: Path, record: dict) -> None:
    (read,), problems = load_questions(write(tmp_path / "q.json", [record]))
    assert not problems
    assert read.own == ("B\nOne. Two.", "A\nThree.") and read.evidence == {1} and read.answers == ("yes",)
    assert load_pool([tmp_path / "q.json"]).documents == ["A\nThree.", "B\nOne. Two."]


def test_gold_paragraphs_of_one_title_are_one_document(tmp_path: Path) -> None:
    gold = [{"title": "T", "text": "a."}, {"title": "U", "text": "b."}, {"title": "T", "text": "c."}]
    record = {"id": 5, "question": "Q?", "answers": ["r", 1904], "gold": gold}
    (read,), _ = load_questions(write(tmp_path / "q.jsonl", [record]))
    assert read.own == ("T\na. c.", "U\nb.") and read.evidence == {0, 1} and read.answers == ("r", "1904")


def test_the_first_question_of_an_id_wins(tmp_path: Path) -> None:
    gold = [{"title": "T", "text": "a."}]
    records = [{"id": "x", "question": f"Q{n}?", "answers": ["r"], "gold": gold} for n in range(2)]
    (read,), problems = load_questions(write(tmp_path / "q.jsonl", records))
    assert read.text == "Q0?" and [problem.reason for problem in problems] == ["duplicate_id"]


def test_build_writes_text_and_indices_that_mean_the_same(tmp_path: Path) -> None:
    gold = [{"title": "T", "text": "gold."}, {"title": "U", "text": ""}]
    questions = write(tmp_path / "q.jsonl", [{"question": "Q?", "answers": ["r"], "gold": gold}] * 2)
    passages = write(tmp_path / "p.jsonl", [{"title": f"t{n}", "text": f"x{n}"} for n in range(30)])
    common = [
        "build",
        "--questions",
        str(questions),
        "--passages",
        str(passages),
        "--num-docs",
        "20",
        "--split",
        "eval",
    ]
    for contexts in ("text", "indices"):
        assert data.main([*common, "--contexts", contexts, "--output", str(tmp_path / contexts)]) == 0
    plain, _ = load_items(tmp_path / "text/eval_20.json")
    pool = load_pool([tmp_path / "indices/documents.jsonl"], strict=True)
    listed, _ = load_items(tmp_path / "indices/eval_20.json", pool)
    assert [item.context.text for item in plain] == [item.context.text for item in listed]
    assert plain[0].num_docs == 20 and len(plain[0].evidence) == 2
    place = round(plain[0].evidence[0] * 20 + 0.5)
    assert (
        f"Document {place}:\nT\ngold." in plain[0].context.text or f"Document {place}:\nU\n" in plain[0].context.text
    )


def test_build_for_training_refuses_indices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["build", "--questions", "q", "--num-docs", "5", "--split", "train", "--contexts", "indices"]
    assert data.main([*argv, "--output", str(tmp_path)]) == 2
    assert "--contexts indices" in capsys.readouterr().err


@needs_shared
def test_build_on_real_questions_is_the_same_in_another_process(tmp_path: Path) -> None:
    argv = ["build", "--questions", str(SHARED / "questions.jsonl"), "--passages", str(SHARED / "passages.jsonl")]
    argv += ["--num-docs", "50", "--split", "train", "--limit", "20", "--output"]
    command = [sys.executable, "-m", "agentic.memagent.data", *argv, str(tmp_path / "other")]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert data.main([*argv, str(tmp_path / "ours")]) == 0
    ours = (tmp_path / "ours/train_50.jsonl").read_bytes()
    assert ours == (tmp_path / "other/train_50.jsonl").read_bytes()
    items, problems = load_items(tmp_path / "ours/train_50.jsonl")
    assert len(items) == 20 and not problems
    own = {q.index: q.own for q in load_questions(SHARED / "questions.jsonl")[0]}
    for item in items:
        assert all(item.context.text.count(text) == 1 for text in own[int(item.id)])


# --------------------------------------------------------------------------------------------------------------------
# Published shapes.


def parquet_row(index: int, **changes: object) -> dict:
    row = {
        "data_source": "hotpotqa",
        "prompt": [{"role": "user", "content": f"Question {index}?"}],
        "context": f"Document 1:\nText {index}",
        "ability": "memory",
        "reward_model": {"style": "rule", "ground_truth": ["first", "second"]},
        "extra_info": {"index": index, "question": f"Question {index}?", "num_docs": 200},
    }
    return row | changes


def test_parquet_row_becomes_a_sample(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([parquet_row(n) for n in range(3)]), tmp_path / "t.parquet")
    out = tmp_path / "train.jsonl"
    assert data.main(["convert", "--input", str(tmp_path / "t.parquet"), "--output", str(out)]) == 0
    samples = Dataset(str(out), None, None, None, prompt_key="prompt", label_key="label").samples
    assert [sample.prompt for sample in samples] == [f"Question {n}?" for n in range(3)]
    assert {sample.label for sample in samples} == {"first"}
    assert samples[1].metadata["ground_truth"] == ["first", "second"]
    assert samples[1].metadata["context"] == "Document 1:\nText 1" and samples[1].metadata["num_docs"] == 200


def test_a_group_shares_one_context(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", [{"prompt": "Q?", "label": "a", "metadata": {"context": "long", "ground_truth": ["a"]}}]
    )
    sample = Dataset(str(path), None, None, None, prompt_key="prompt", label_key="label").samples[0]
    assert all(copy.deepcopy(sample).metadata["context"] is sample.metadata["context"] for _ in range(16))


def test_index_lists_resolve_to_the_text_format() -> None:
    context = read_context([2, 0], DocumentPool(["a\nA", "b\nB", "c\nC"]))
    assert context.text == "Document 1:\nc\nC\n\nDocument 2:\na\nA"
    assert context.given is None and context.indices.itemsize * len(context.indices) <= 16
    for bad in (3, -1):
        with pytest.raises(ConfigError, match=f"document index {bad} is outside of the pool of 3"):
            DocumentPool(["a", "b", "c"]).check([0, bad])


def test_evaluation_and_ruler_records(tmp_path: Path) -> None:
    records = [
        {"context": "C", "input": "Q?", "answers": ["a", "b"], "num_docs": 50, "index": 9},
        {"context": "C", "input": "R?", "outputs": ["1", "2"], "index": 0},
    ]
    (qa, ruler), problems = load_items(write(tmp_path / "e.json", records))
    assert not problems
    assert (qa.id, qa.kind, qa.references, qa.num_docs, qa.evidence) == ("0", "qa", ("a", "b"), 50, ())
    assert (ruler.kind, ruler.references) == (RULER, ("1", "2"))
    assert load_items(write(tmp_path / "p.jsonl", [qa.to_prompt(), ruler.to_prompt()]))[0][1].kind == RULER


# --------------------------------------------------------------------------------------------------------------------
# Inspection: bad rows cost one line each, good ones are kept.


def inspected(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict, list[str]]:
    code = data.main(["inspect", *argv])
    output = capsys.readouterr()
    return code, json.loads(output.out), output.err.splitlines()


def test_inspect_counts_every_reason_and_keeps_good_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"context": "C", "input": "Q?", "answers": ["a"]}
    bad = {
        "no_references": [{**good, "answers": []}, {**good, "answers": ["  "]}, {"context": "C", "input": "Q?"}],
        "reference_not_text": [{**good, "answers": [{"a": 1}]}],
        "no_context": [{**good, "context": " "}, {**good, "context": None}, {**good, "context": []}],
        "context_not_text": [{**good, "context": {"a": 1}}, {**good, "context": ["text"]}, {**good, "context": 7}],
        "context_index_out_of_range": [{**good, "context": [0, 2]}, {**good, "context": [-1]}],
        "no_question": [{**good, "input": ""}, {**good, "input": ["Q"]}],
        "not_an_object": [["a", "list"], "text"],
    }
    documents = write(tmp_path / "d.jsonl", [{"title": "t", "text": "x"}, {"title": "u", "text": "y"}])
    rows = [good, *(row for several in bad.values() for row in several), {**good, "context": [1, 0]}]
    path = write(tmp_path / "e.json", rows)
    code, report, lines = inspected(capsys, str(path), "--documents", str(documents))
    assert code == 1 and report["good"] == 2
    assert report["reasons"] == {reason: len(several) for reason, several in bad.items()}
    assert len(lines) == report["bad"] == len(rows) - 2
    assert all(line.startswith(f"{path}: row {number}: ") for number, line in enumerate(lines, start=1))
    assert (
        lines[9]
        == f"{path}: row 10: context_not_text: a context must be a text or a list of document indices, got int: 7"
    )
    items, problems = load_items(path, load_pool([documents]))
    assert [item.id for item in items] == ["0", str(len(rows) - 1)] and len(problems) == len(lines)


def test_inspect_index_list_without_documents_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "e.jsonl", [{"context": [0], "input": "Q?", "answers": ["a"]}])
    code, report, lines = inspected(capsys, str(path))
    assert code == 1 and report["reasons"] == {"no_document_pool": 1} and "--documents" in lines[0]


def test_inspect_broken_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "e.jsonl", [{"context": "C", "input": "Q?", "answers": ["a"]}] * 3)
    first, _, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{first[:20]}\n{third}\n")
    code, report, lines = inspected(capsys, str(path))
    assert code == 1 and report["good"] == 2 and len(lines) == 1 and lines[0].startswith(f"{path}:2: not_json: ")


def damaged_parquet(path: Path, where: str) -> Path:
    """Three row groups of two rows; `group` damages the second, `end` cuts the file."""
    pq.write_table(pa.Table.from_pylist([parquet_row(n) for n in range(6)]), path, row_group_size=2)
    content = bytearray(path.read_bytes())
    if where == "end":
        content = content[: len(content) // 2]
    else:
        group = pq.ParquetFile(path).metadata.row_group(1)
        start = min(group.column(n).dictionary_page_offset or group.column(n).data_page_offset for n in range(3))
        content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)
    return path


def test_inspect_parquet_with_a_damaged_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged_parquet(tmp_path / "t.parquet", "group")
    code, report, lines = inspected(capsys, str(path))
    assert code == 1 and report["good"] == 4 and report["reasons"] == {"unreadable_rows": 1}
    assert len(lines) == 1 and lines[0].startswith(f"{path}: rows 2 to 3: unreadable_rows: row group 1 is damaged")
    assert [item.id for item in load_items(path)[0]] == ["0", "1", "4", "5"]


def test_inspect_parquet_that_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged_parquet(tmp_path / "t.parquet", "end")
    code, report, lines = inspected(capsys, str(path))
    assert code == 1 and report["good"] == 0 and len(lines) == 1 and "unreadable_file: not a whole parquet" in lines[0]
    with pytest.raises(ConfigError, match="no usable row"):
        load_items(path)


def test_wrong_files_are_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text("x")
    for name, part in (("x.txt", "unknown type of data file"), ("absent.json", "no such data file")):
        assert data.main(["inspect", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and part in error and error.count("\n") == 1


def test_documents_with_a_bad_row_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"title": "t", "text": "x"}, {"title": "u", "text": 5}])
    assert len(load_pool([path])) == 1
    with pytest.raises(ConfigError, match="indices would be wrong"):
        load_pool([path], strict=True)


# --------------------------------------------------------------------------------------------------------------------
# Closed-book filter.


@pytest.mark.parametrize(
    ("reply", "references", "known"),
    [
        (r"I think \boxed{the Eiffel Tower}", ["Eiffel Tower"], True),
        ("It is the eiffel tower, surely.", ["Eiffel Tower"], True),
        ("I know nothing about Nolan.", ["no"], False),
        ("There is no way to tell.", ["no"], False),
        ("No, they are not.", ["no"], True),
        (r"Hmm. \boxed{No}", ["no"], True),
        ("A cat sat.", ["at"], False),
        (r"\boxed{}", ["x"], False),
        ("", ["no"], False),
        ("anything", ["the", "."], False),
    ],
)
def test_what_counts_as_known(reply: str, references: list[str], known: bool) -> None:
    assert is_known(reply, references) is known


def test_a_failed_request_decides_nothing() -> None:
    questions = [question(index) for index in range(3)]
    right, wrong, failed = ({"score": score} for score in (1.0, 0.0, None))
    runs = [{"q0": right, "q1": wrong, "q2": wrong}, {"q0": failed, "q1": wrong, "q2": failed}]
    kept, undecided, counts = decide(questions, runs)
    assert [q.id for q in kept] == ["q1"] and [q.id for q in undecided] == ["q2"]
    assert counts["known"] == 1 and counts["kinds_before"] == {"text": 3} and counts["kinds_after"] == {"text": 1}
    assert [answer_kind(Question("i", 0, "", (a,), (), frozenset())) for a in ("No", "1,904", "May 5")] == [
        "yes_no",
        "number",
        "text",
    ]


def test_filter_asks_every_model_and_goes_on_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = [{"title": "T", "text": "x"}]
    records = [{"id": f"q{n}", "question": f"Q{n}?", "answers": [f"right{n}"], "gold": gold} for n in range(4)]
    source, out = write(tmp_path / "q.jsonl", records), tmp_path / "kept.jsonl"
    broken = True

    def script(prompt: str) -> str | Reply:
        if "Q3?" in prompt and broken:
            return Reply("no", status=400)
        return "right1" if "Q1?" in prompt else "wrong"

    with FakeEngine(script) as engine:
        argv = ["filter", "--questions", str(source), "--output", str(out), "--concurrency", "2"]
        argv += ["--endpoint", f"org/A={engine.url}", "--endpoint", f"org/B={engine.url}"]
        assert data.main(argv) == 3 and not out.exists()
        assert "1 questions lack replies" in capsys.readouterr().err
        before, broken = len(engine.requests), False
        assert data.main(argv) == 0
    asked = [r for r in engine.requests if r.path.endswith("/chat/completions")]
    assert {r.body["model"] for r in asked} == {"org/A", "org/B"}
    assert {(r.body["temperature"], r.body["top_p"], r.body["max_tokens"]) for r in asked} == {(1.0, 0.7, 512)}
    assert sum("Q3?" in r.prompt for r in engine.requests[before:]) == 4
    assert not any("Q0?" in r.prompt for r in engine.requests[before:])
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["q0", "q2", "q3"]
    assert json.loads(capsys.readouterr().out)["known"] == 1


def test_filter_endpoint_without_url_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.main(["filter", "--questions", "q", "--endpoint", "A", "--output", str(tmp_path / "o.jsonl")]) == 2
    assert "--endpoint A: write MODEL=URL" in capsys.readouterr().err
