"""data: reading files and slices, error messages, Dataset order, prompt filter, a rank's share of train data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.data import (
    Dataset,
    check_prompt_file,
    filter_long_prompt,
    get_source,
    process_rollout_data,
    read_file,
)
from slime.utils.misc import Box
from slime.utils.types import Sample


class WordTokenizer:
    """One id per word; template `role: content` lines."""

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False and kwargs.pop("add_generation_prompt")
        head = "".join(f"{key}={value} " for key, value in kwargs.items()) + (f"tools={len(tools)} " if tools else "")
        return head + "".join(f"{m['role']}: {m['content']} " for m in messages) + "assistant:"


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def dataset(path: str, max_length: int | None = None, **kwargs: Any) -> Dataset:
    return Dataset(path, WordTokenizer(), None, max_length, **kwargs)


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "ten.jsonl", [{"text": f"p{i}", "i": i} for i in range(10)])


bound = st.one_of(st.none(), st.integers(-12, 12))


@given(start=bound, stop=bound)
def test_slices_are_pythons(ten_path: str, start: int | None, stop: int | None) -> None:
    suffix = f"@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert [r["i"] for r in read_file(ten_path + suffix)] == list(range(10))[start:stop]


@pytest.fixture(scope="module")
def ten_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("slices") / "ten.jsonl"
    return write_jsonl(path, [{"text": f"p{i}", "i": i} for i in range(10)])


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"text": f"p{i}", "metadata": {"k": i}, "tools": [{"name": "t"}]} for i in range(5)]
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(records), path)
    assert list(read_file(path)) == records
    assert [r["text"] for r in read_file(path + "@[-2:]")] == ["p3", "p4"]
    assert dataset(path, tool_key="tools")[1].metadata == {"k": 1, "tools": [{"name": "t"}]}
    with pytest.raises(ValueError, match=r"a\.parquet: row 0: record has no key 'prompt'"):
        check_prompt_file(path, "prompt")


def test_broken_line_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "a"}\n' * 16 + '{"text": \n' + '{"text": "b"}\n')
    with pytest.raises(ValueError, match=r'broken\.jsonl:17: not valid JSON .*: {"text":'):
        list(read_file(str(path)))
    assert len(list(read_file(f"{path}@[:16]"))) == 16


def test_blank_lines_count_as_lines_but_not_as_records(tmp_path: Path) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n[1]\n')
    with pytest.raises(ValueError, match=r"blank\.jsonl:4: expected a JSON object, got list"):
        list(read_file(str(path)))
    assert list(read_file(f"{path}@[0:1]")) == [{"text": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("no.jsonl", None, FileNotFoundError, r"no\.jsonl: no such data file"),
        ("a.csv", b"x", ValueError, r"a\.csv: unknown type of data file; use \.jsonl or \.parquet"),
        ("a.parquet", b"x", ValueError, r"a\.parquet: not a parquet file"),
        ("a.jsonl", b"", ValueError, r"a\.jsonl: holds no records"),
        ("a.jsonl", b'{"a": 1}\n\n{"x": "y", "b": 2}\n', ValueError, r"a\.jsonl:1: record has no key 'x' .* keys: a"),
        ("a.jsonl", b'{"x": "y"}\n{"x": ""}\n', ValueError, r"a\.jsonl:2: 'x' must be a non-empty text or list"),
        ("a.jsonl", b'{"x": [1]}\n', ValueError, r"a\.jsonl:1: 'x' must be a non-empty text or list"),
        ("a.jsonl", b'{"x": "\xff"}\n', ValueError, r"a\.jsonl:1: not valid JSON"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes | None, error: type, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        check_prompt_file(str(tmp_path / name), "x")


def test_check_counts_records(ten: str) -> None:
    assert check_prompt_file(ten, "text") == 10
    assert check_prompt_file(ten + "@[2:-2]", "text") == 6


def test_dataset_fields(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    records = [
        {"q": "one", "a": "1", "metadata": {"k": 1}, "tools": '[{"name": "t"}]'},
        {"q": chat, "a": 2},
    ]
    path = write_jsonl(tmp_path / "d.jsonl", records)
    data = dataset(path, prompt_key="q", label_key="a", tool_key="tools")
    assert [s.prompt for s in data.samples] == ["one", chat]
    assert [s.label for s in data.samples] == ["1", 2]
    assert [s.metadata for s in data.samples] == [{"k": 1, "tools": [{"name": "t"}]}, {}]
    rendered = dataset(
        path, prompt_key="q", tool_key="tools", apply_chat_template=True, apply_chat_template_kwargs={"think": 0}
    )
    assert [s.prompt for s in rendered.samples] == [
        "think=0 tools=1 user: one assistant:",
        "think=0 user: hi assistant:",
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"d\.jsonl:1: record has no key 'a' \(--label-key\)"),
        ({"text": "x", "a": 1, "metadata": [1]}, r"d\.jsonl:1: 'metadata' must be an object"),
        ({"text": "x", "a": 1, "tools": {"name": "t"}}, r"d\.jsonl:1: 'tools' must be a list of tools"),
        ({"text": "x", "a": 1, "tools": "[{"}, r"d\.jsonl:1: 'tools' is no JSON list"),
    ],
)
def test_dataset_explains_bad_fields(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record])
    with pytest.raises(ValueError, match=message):
        dataset(path, label_key="a", tool_key="tools")


def test_dataset_refuses_media_and_emptiness(ten: str) -> None:
    with pytest.raises(ValueError, match="text prompts only"):
        dataset(ten, multimodal_keys={"image": "images"})
    with pytest.raises(ValueError, match="no prompts to use: it is empty"):
        dataset(ten + "@[10:]")
    with pytest.raises(ValueError, match="none of its 10 prompts has at most 0 tokens"):
        dataset(ten, max_length=0)


def test_shuffle_depends_on_seed_and_epoch_only(ten: str) -> None:
    first, second = dataset(ten, seed=1), dataset(ten, seed=1)
    assert [s.prompt for s in first.samples] == [f"p{i}" for i in range(10)]
    first.shuffle(0)
    zero = [s.prompt for s in first.samples]
    first.shuffle(3)
    second.shuffle(3)
    assert [s.prompt for s in first.samples] == [s.prompt for s in second.samples] != zero
    assert sorted(zero) == [f"p{i}" for i in range(10)] and len(first) == 10
    first.shuffle(0)
    assert [s.prompt for s in first.samples] == zero


def test_filter_keeps_order_and_lists() -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "a b c d e"}]
    samples = [Sample(prompt=p) for p in ("a b c", "a", chat, "a b", "a b c d")]  # type: ignore[arg-type]
    assert [s.prompt for s in filter_long_prompt(samples, WordTokenizer(), None, 2)] == ["a", chat, "a b"]
    assert filter_long_prompt(samples, WordTokenizer(), None, None) is samples
    with pytest.raises(ValueError, match="media"):
        filter_long_prompt([Sample(prompt="a", multimodal_inputs={"images": [1]})], WordTokenizer(), None, 2)


def test_process_rollout_data_localises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda ref: ref))
    whole = {"total_lengths": [10, 11, 12, 13], "raw_reward": [0.0, 0.1, 0.2, 0.3]}
    boxes = [Box({**whole, "partition": [2, 0], "tokens": ["c", "a"]}), Box({**whole, "partition": [3, 1]})]
    data = process_rollout_data(None, boxes, 0, 2)
    assert data["total_lengths"] == [12, 10] and data["local_raw_reward"] == [0.2, 0.0]
    assert data["raw_reward"] == whole["raw_reward"] and data["partition"] == [2, 0]
    with pytest.raises(ValueError, match="2 data-parallel ranks, but there are 3"):
        process_rollout_data(None, boxes, 0, 3)


def test_get_source() -> None:
    named = Sample()
    named.source = "attr"  # type: ignore[attr-defined]
    assert get_source(named) == "attr"
    assert get_source(Sample(metadata={"source_name": "meta"})) == "meta"
    assert get_source(Sample()) == "unknown"


def test_a_record_without_the_label_is_named_before_anything_starts(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "answer": "2"}\n')
    assert check_prompt_file(str(path), "prompt") == 2
    with pytest.raises(ValueError, match=r"data.jsonl:2: record has no key 'label'.*answer"):
        check_prompt_file(str(path), "prompt", "label")
