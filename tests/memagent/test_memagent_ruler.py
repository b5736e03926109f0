"""RULER tasks: outputs are in the context, lengths are kept, samples are reproducible."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers_agentic import FakeTokenizer

from agentic.common.errors import ConfigError
from agentic.memagent import data
from agentic.memagent.data_documents import DocumentPool, Question
from agentic.memagent.data_items import load_items
from agentic.memagent.ruler import TASKS, Material, Sample, make_samples

LENGTH, RESERVE = 6000, 200
OWN = tuple(f"Own {n}\nThe fact {n} is here. It is short." for n in range(3))
QUESTIONS = [Question(f"q{n}", n, "Which fact?", (f"fact {n}", "X"), OWN, frozenset({n})) for n in range(3)]
POOL = DocumentPool(
    [*OWN, *(f"Title {n}\nSentence {n} of a story. Another one follows! Why {n}?" for n in range(120))]
)
MATERIAL = Material(POOL, QUESTIONS, seed=3)


def samples(task: str, count: int = 3, length: int = LENGTH, material: Material = MATERIAL) -> list[Sample]:
    return list(make_samples(task, length, count, FakeTokenizer(), material, RESERVE))


@pytest.mark.parametrize("task", TASKS)
def test_outputs_are_in_the_context_and_the_length_is_kept(task: str) -> None:
    made = samples(task)
    assert len({sample.context for sample in made}) == 3
    for sample in made:
        tokens = len(f"{sample.context}\n{sample.question}".encode())
        assert 0.9 * (LENGTH - RESERVE) <= tokens <= LENGTH - RESERVE
        assert (
            any(o in sample.context for o in sample.outputs)
            if sample.qa
            else all(output in sample.context for output in sample.outputs)
        )
        assert sample.evidence == sorted(sample.evidence) and all(0 <= depth <= 1 for depth in sample.evidence)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_seed_and_index_only(task: str) -> None:
    assert samples(task, 2) == samples(task, 3)[:2]
    if task != "qa_1":
        other = Material(POOL, QUESTIONS, seed=4)
        assert samples(task, 1, material=other)[0].context != samples(task, 1)[0].context


@pytest.mark.parametrize(
    ("task", "outputs", "keys_asked", "needles"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 1, 1, 4),
        ("niah_multivalue", 4, 1, 4),
        ("niah_multiquery", 4, 4, 4),
    ],
)
def test_needles(task: str, outputs: int, keys_asked: int, needles: int) -> None:
    for sample in samples(task):
        pairs = re.findall(r"The secret (?:number|uuid) of ([\w-]+) is ([\w-]+)\.", sample.context)
        assert len(pairs) == needles and len(sample.outputs) == outputs
        asked = [key for key in {key for key, _ in pairs} if key in sample.question]
        assert len(asked) == keys_asked
        assert {value for key, value in pairs if key in asked} == set(sample.outputs)
        assert len(sample.evidence) == outputs


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_a_haystack_of_needles_holds_nothing_else(task: str) -> None:
    (sample,) = samples(task, 1)
    lines = re.findall(r"The secret (?:number|uuid) of ([\w-]+) is ([\w-]+)\.", sample.context)
    assert sample.context.count("The secret ") == len(lines) == len({key for key, _ in lines}) > 40
    assert [value for key, value in lines if key in sample.question] == sample.outputs


def test_variables_follow_the_chain() -> None:
    for sample in samples("vt"):
        assignments = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.context)
        value = assignments[0][1]
        assert value in sample.question and len(sample.outputs) == 5
        holders = {value}
        for name, source in assignments:
            assert source in holders
            holders.add(name)
        assert holders - {value} == set(sample.outputs)


def test_the_three_most_frequent_words_are_unique() -> None:
    for sample in samples("fwe"):
        counts = Counter(sample.context.split()).most_common(4)
        assert [word for word, _ in counts[:3]] == sample.outputs
        assert counts[2][1] > counts[3][1]


def test_missing_material_and_short_lengths_name_the_flag() -> None:
    empty = Material(DocumentPool([]))
    with pytest.raises(ConfigError, match="--passages"):
        samples("niah_single_2", material=empty)
    with pytest.raises(ConfigError, match="--questions"):
        samples("qa_1", material=empty)
    with pytest.raises(ConfigError, match="--num-samples 4: --questions holds 3"):
        samples("qa_1", 4)
    with pytest.raises(ConfigError, match="--lengths 210: too short for vt"):
        samples("vt", length=210)


def test_command_writes_files_that_the_loader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load_tokenizer", lambda _: FakeTokenizer())
    passages = tmp_path / "p.jsonl"
    passages.write_text("".join(json.dumps({"title": f"T{n}", "text": f"Text {n}. More."}) + "\n" for n in range(9)))
    argv = ["ruler", "--task", "niah_multiquery", "vt", "--lengths", "2k", "3000", "--num-samples", "2"]
    assert data.main([*argv, "--tokenizer", "t", "--passages", str(passages), "--output", str(tmp_path)]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {Path(name).name for name in files} == {
        f"eval_{task}_{length}.json" for task in ("niah_multiquery", "vt") for length in (2048, 3000)
    }
    items, problems = load_items(tmp_path / "eval_vt_2048.json")
    assert not problems and [item.kind for item in items] == ["ruler"] * 2 and len(items[0].evidence) == 5
