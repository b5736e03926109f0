"""Training data of every known shape becomes slime's prompt file (fact 26), counted and without repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentic.agentflow.data import clean_question, collect, convert, inspect, main, read_example
from agentic.common.errors import ConfigError

WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 1 + 1?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "math"


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("record", "prompt", "label"),
    [
        ({"prompt": [{"role": "user", "content": WRAPPED}], "label": "2"}, "What is 1 + 1?", "2"),
        ({"prompt": "bare", "label": 34}, "bare", "34"),
        (
            {
                "prompt": [{"role": "user", "content": WRAPPED}],
                "reward_model": {"ground_truth": "2", "style": "rule"},
                "data_source": "dapo",
                "extra_info": {"index": "7"},
            },
            "What is 1 + 1?",
            "2",
        ),
        ({"id": 3, "question": "who?", "chain": "", "result": "a; b", "source": "nq"}, "who?", "a; b"),
        ({"question": "who wrote it", "golden_answers": ["A", "B"]}, "who wrote it?", "A; B"),
        ({"question": "Find $x$.", "final_answer": r"\frac12", "difficulty": 5}, "Find $x$.", r"\frac12"),
    ],
)
def test_shapes(record: dict[str, Any], prompt: str, label: str) -> None:
    example = read_example(record, "f:1")
    assert (example.prompt, example.label) == (prompt, label)


def test_origin_and_original_text_are_kept() -> None:
    record = {"prompt": WRAPPED, "reward_model": {"ground_truth": "2"}, "data_source": "s", "extra_info": {"index": 7}}
    assert read_example(record, "f:1").metadata == {"source": "s", "id": 7, "original_prompt": WRAPPED}
    mixed = {"id": 3, "question": "q?", "result": "r", "source": "nq", "extra_info": {"idx": 9, "ground_truth": "r"}}
    assert read_example(mixed, "f:1").metadata == {"source": "nq", "id": 3}


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("Find x. Put the final answer between <answer> and </answer> tags. Nothing after it.", "Find x."),
        ("Find x.\nUse <answer></answer>.", "Find x."),
        ("No request here. Find x < 3.", "No request here. Find x < 3."),
        ("What does the <answer> tag mean?", "What does the <answer> tag mean?"),
        ("", ""),
    ],
)
def test_request_for_tags_is_removed_from_the_end_only(text: str, bare: str) -> None:
    assert clean_question(text) == bare


def test_convert_counts_by_reason_and_keeps_the_first(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "in.jsonl",
        {"prompt": "a  b", "label": "1"},
        {"prompt": "a b", "label": "1"},
        {"prompt": "a b", "label": "2"},
        {"prompt": " ", "label": "1"},
        {"prompt": "c", "label": ""},
        {"prompt": WRAPPED, "label": "2"},
    )
    other = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "q?", "result": "r", "source": "nq"}]), other)
    counts = convert([source, other], tmp_path / "out" / "o.jsonl", seed=None, limit=None)
    assert counts == {
        "read": 7, "kept": 3, "duplicate": 1, "conflicting_label": 1, "empty_prompt": 1, "empty_label": 1, "written": 3
    }  # fmt: skip
    written = lines(tmp_path / "out" / "o.jsonl")
    assert [row["prompt"] for row in written] == ["a  b", "What is 1 + 1?", "q?"]
    assert written[1]["metadata"]["original_prompt"] == WRAPPED and written[2]["metadata"] == {"source": "nq"}


def test_shuffle_is_seeded_and_limit_comes_after_it(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": str(n), "label": "1"} for n in range(50)))
    out = [tmp_path / f"{name}.jsonl" for name in "abc"]
    convert([source], out[0], 42, None)
    convert([source], out[1], 42, 10)
    convert([source], out[2], 43, 10)
    first = [row["prompt"] for row in lines(out[0])]
    assert sorted(first, key=int) == [str(n) for n in range(50)] and first != sorted(first, key=int)
    assert [row["prompt"] for row in lines(out[1])] == first[:10] != [row["prompt"] for row in lines(out[2])]


def test_output_is_read_by_the_trainer(tmp_path: Path) -> None:
    from slime.utils.data import check_prompt_file

    convert([jsonl(tmp_path / "in.jsonl", {"prompt": "a", "label": "1"})], tmp_path / "o.jsonl", None, None)
    assert check_prompt_file(str(tmp_path / "o.jsonl"), "prompt") == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"in\.jsonl:1: record has the fields text; known shapes: prompt \+ label"),
        ({"prompt": 3, "label": "1"}, r"in\.jsonl:1: the prompt must be a text"),
        ({"prompt": [{"role": "system", "content": "x"}], "label": "1"}, "one user message"),
        ({"prompt": "x", "label": {"a": 1}}, "label is a dict"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        collect([jsonl(tmp_path / "in.jsonl", record)])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a", "label": "1"})
    assert main(["convert", "--input", str(source), "--output", str(tmp_path / "o.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == 1
    assert main(["convert", "--input", str(source), "--output", str(source)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --output {source}: is one of the inputs")
    assert main(["inspect", str(tmp_path / "none.jsonl")]) == 2
    assert "no such data file" in capsys.readouterr().err
    assert main(["convert"]) == 2 and "--input, --output" in capsys.readouterr().err
    assert main(["inspect", str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == {"integer": 1}


@pytest.mark.skipif(not DATA.is_dir(), reason="the development data sets are not beside the repository")
def test_real_files(tmp_path: Path) -> None:
    report = inspect(DATA / "deepmath_1k.jsonl")
    assert report["read"] == 1000 and report["shapes"] == {"prompt_label": report["kept"]}
    counts = convert([DATA / "gsm8k_test.jsonl"], tmp_path / "o.jsonl", None, None)
    assert counts["read"] == 819 and counts["written"] == counts["kept"] >= 800
