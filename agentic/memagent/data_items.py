"""Items of long-context data in every published shape, read without copying contexts.

Shapes (told apart by their fields): training parquet (`prompt`, `context`, `reward_model`, `extra_info`), evaluation json
(`context`, `input`, `answers`, `num_docs`, `index`), RULER (`context`, `input`, `outputs`), and slime's prompt file
(`prompt`, `label`, `metadata` with `context` and `ground_truth`). A context is a text or a list of document indices.
Invariants: a row is an Item or a Problem with a reason; the text of an index list is made when it is asked for and not
kept; every other context is the object that was read. Leaves out: how the file is read (`data_files`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentic.common.data_files import Problem, Row, RowError, one_line, scan_rows, split_good, warn_problems
from agentic.common.errors import ConfigError
from agentic.memagent.data_documents import DocumentPool, read_references
from agentic.memagent.data_synthesis import render_documents

QA, RULER = "qa", "ruler"


@dataclass(frozen=True)
class Context:
    """A document: its text, or indices into a pool from which the text is made on demand."""

    given: str | None = None
    indices: array[int] = field(default_factory=lambda: array("L"))
    pool: DocumentPool | None = None

    @property
    def text(self) -> str:
        """The whole text; made anew at each call for an index list."""
        if self.given is not None:
            return self.given
        assert self.pool is not None
        return render_documents([self.pool[index] for index in self.indices])


@dataclass(frozen=True)
class Item:
    """One question about one long document."""

    id: str
    """Row number in its file: unique there, the same at every length of a data set."""
    question: str
    references: tuple[str, ...]
    context: Context
    kind: str = QA
    """`qa`: any reference is a right answer. `ruler`: all outputs are wanted, the score is the share found."""
    num_docs: int | None = None
    evidence: tuple[float, ...] = ()
    """Where the evidence lies, 0 (start) to 1 (end), ascending; empty when the file does not say."""
    source: str = ""

    def to_prompt(self) -> dict[str, Any]:
        """A line of slime's prompt file: prompt = question, label = first reference, the rest in the metadata."""
        metadata = {
            "context": self.context.text,
            "ground_truth": list(self.references),
            "num_docs": self.num_docs,
            "data_source": self.source,
            "index": int(self.id),
            "kind": self.kind,
            "evidence": list(self.evidence),
        }
        return {"prompt": self.question, "label": self.references[0], "metadata": metadata}


def scan_items(path: str | Path, pool: DocumentPool | None = None) -> Iterator[Item | Problem]:
    """Items of a file in order. Raises FileNotFoundError, or ConfigError for an unknown type of file."""
    for row in scan_rows(path):
        if isinstance(row, Problem):
            yield row
            continue
        try:
            yield read_item(row, pool)
        except RowError as error:
            yield Problem(row.where, error.reason, error.detail)


def load_items(
    path: str | Path, pool: DocumentPool | None = None, limit: int | None = None
) -> tuple[list[Item], list[Problem]]:
    """Good rows and problems; problems are logged once with their counts.

    Raises FileNotFoundError, or ConfigError when no row is good.
    """
    items, problems = split_good(scan_items(path, pool))
    if not items:
        first = f"; the first problem: {problems[0]}" if problems else ""
        raise ConfigError(f"{path}: no usable row of {len(problems)}{first}")
    warn_problems(path, problems)
    return items[:limit], problems


def read_item(row: Row, pool: DocumentPool | None = None) -> Item:
    """Bring a record of any known shape to an Item. Raises RowError with reason and detail."""
    record = row.record
    extra = {**_mapping(record.get("extra_info")), **_mapping(record.get("metadata"))}
    kind, references = _references(record, extra)
    num_docs = record.get("num_docs", extra.get("num_docs"))
    return Item(
        id=str(row.number),
        question=_question(record),
        references=references,
        context=read_context(record.get("context", extra.get("context")), pool),
        kind=kind,
        num_docs=num_docs if isinstance(num_docs, int) else None,
        evidence=_evidence(record.get("evidence", extra.get("evidence"))),
        source=str(record.get("data_source", extra.get("data_source", record.get("task", "")))),
    )


def read_context(value: Any, pool: DocumentPool | None = None) -> Context:
    """A text or a list of indices. Raises RowError: no_context, context_not_text, context_index_out_of_range."""
    if value is None or isinstance(value, (str, list)) and not (value.strip() if isinstance(value, str) else value):
        raise RowError("no_context", f"the context is empty: {value!r}")
    if isinstance(value, str):
        return Context(value)
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        detail = f"a context must be a text or a list of document indices, got {type(value).__name__}"
        raise RowError("context_not_text", f"{detail}: {one_line(value)}")
    if pool is None:
        raise RowError("no_document_pool", "the context is a list of document indices; name their file: --documents")
    try:
        pool.check(value)
    except ConfigError as error:
        raise RowError("context_index_out_of_range", str(error)) from error
    return Context(None, array("L", value), pool)


def _question(record: Mapping[str, Any]) -> str:
    value = record.get("input", record.get("prompt", record.get("question")))
    if isinstance(value, list):
        texts = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
        value = texts[0] if len(texts) == 1 else value
    if not isinstance(value, str) or not value.strip():
        detail = "`input` or `prompt` must be a text or a list with one user message"
        raise RowError("no_question", f"{detail}, got {one_line(repr(value))}; fields: {', '.join(record)}")
    return value.strip()


def _references(record: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Kind and references, from the first field that there is."""
    if "outputs" in record:
        return RULER, read_references(record["outputs"])
    kind = RULER if extra.get("kind") == RULER else QA
    model = _mapping(record.get("reward_model"))
    for place, name in ((record, "answers"), (model, "ground_truth"), (extra, "ground_truth"), (record, "label")):
        if name in place:
            return kind, read_references(place[name])
    raise RowError("no_references", f"no answers, outputs or ground_truth; fields: {', '.join(record)}")


def _evidence(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(isinstance(v, (int, float)) and 0 <= v <= 1 for v in value):
        return ()
    return tuple(sorted(map(float, value)))


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
