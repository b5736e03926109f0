"""Rows of public data files, read so that a bad row costs one line and never its neighbours.

Inputs: .jsonl, .json (a list, or `{"data": [...]}`) and .parquet. Invariants: the order of the file is kept; every row is
yielded once, as a `Row` or as a `Problem`; a parquet file is read in small batches; only a missing file and an unknown
type are errors. Leaves out: what the fields mean (each method's loaders know).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentic.common.errors import AgenticError, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PARQUET_BATCH = 64
SHOWN_CHARS = 80


class Row(NamedTuple):
    """One record; `number` counts records from 0."""

    where: str
    number: int
    record: dict[str, Any]


class Problem(NamedTuple):
    """Why something was left out; `reason` is the key under which it is counted."""

    where: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}: {self.detail}"


class RowError(AgenticError):
    """Raised by readers of one record; `keep_good` turns it into a Problem."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def scan_rows(path: str | Path) -> Iterator[Row | Problem]:
    """All rows of a file. Raises FileNotFoundError for a missing file and ConfigError for an unknown type."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such data file")
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    if file.suffix not in readers:
        raise ConfigError(f"{file}: unknown type of data file; use {', '.join(readers)}")
    return _objects_only(readers[file.suffix](file))


def split_good(results: Iterable[T | Problem]) -> tuple[list[T], list[Problem]]:
    """Good results and problems, each in order."""
    good: list[T] = []
    problems: list[Problem] = []
    for result in results:
        if isinstance(result, Problem):
            problems.append(result)
        else:
            good.append(result)
    return good, problems


def warn_problems(path: str | Path, problems: list[Problem], shown: int = 5) -> None:
    """One warning with the counts by reason and the first few places."""
    if problems:
        counts = ", ".join(f"{reason} x{count}" for reason, count in count_reasons(problems).items())
        places = "; ".join(map(str, problems[:shown]))
        logger.warning("%s: %d rows left out (%s): %s", path, len(problems), counts, places)


def count_reasons(problems: Iterable[Problem]) -> dict[str, int]:
    """Counts by reason, most frequent first."""
    return dict(Counter(problem.reason for problem in problems).most_common())


def one_line(text: Any, limit: int = SHOWN_CHARS) -> str:
    """A short excerpt without line breaks."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _objects_only(rows: Iterator[tuple[str, int, Any] | Problem]) -> Iterator[Row | Problem]:
    for row in rows:
        if isinstance(row, Problem):
            yield row
        elif isinstance(row[2], dict):
            yield Row(*row)
        else:
            detail = f"expected an object with named fields, got {type(row[2]).__name__}"
            yield Problem(row[0], "not_an_object", detail)


def _jsonl(file: Path) -> Iterator[tuple[str, int, Any] | Problem]:
    number = 0
    with file.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{line_number}"
            try:
                yield where, number, json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                excerpt = one_line(line[:SHOWN_CHARS].decode(errors="replace"))
                yield Problem(where, "not_json", f"{error}: {excerpt}")
            number += 1


def _json(file: Path) -> Iterator[tuple[str, int, Any] | Problem]:
    try:
        data = json.loads(file.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        yield Problem(str(file), "unreadable_file", f"not valid JSON ({error})")
        return
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        yield Problem(str(file), "unreadable_file", "expected a list of records, or an object with one under `data`")
        return
    yield from ((f"{file}: row {number}", number, row) for number, row in enumerate(rows))


def _parquet(file: Path) -> Iterator[tuple[str, int, Any] | Problem]:
    import pyarrow as pa  # here, because only this format needs it
    import pyarrow.parquet as pq

    damaged = (pa.ArrowException, OSError)
    try:
        content = pq.ParquetFile(file)
    except damaged as error:
        yield Problem(str(file), "unreadable_file", f"not a whole parquet file ({one_line(error, 200)})")
        return
    start = 0
    for group in range(content.num_row_groups):
        size, done = content.metadata.row_group(group).num_rows, 0
        try:
            for batch in content.iter_batches(batch_size=PARQUET_BATCH, row_groups=[group]):
                yield from _batch_rows(file, start + done, batch)
                done += batch.num_rows
        except damaged as error:
            where = f"{file}: rows {start + done} to {start + size - 1}"
            yield Problem(where, "unreadable_rows", f"row group {group} is damaged ({one_line(error, 200)})")
        start += size


def _batch_rows(file: Path, start: int, batch: Any) -> Iterator[tuple[str, int, Any] | Problem]:
    for offset in range(batch.num_rows):
        where = f"{file}: row {start + offset}"
        try:
            record = {name: batch.column(name)[offset].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield Problem(where, "not_utf8", str(error))
        else:
            yield where, start + offset, record
