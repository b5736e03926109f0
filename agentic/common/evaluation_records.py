"""Records of public data files: .jsonl, .json (a list, or `{"data": [...]}`), .parquet, .csv, .tsv.

Invariants: the order of the file is kept, nothing is skipped silently (blank lines are no records); every error names
file, line or row, and the keys that a record has.
Leaves out: what the fields mean (each method's loaders know).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentic.common.errors import ConfigError

Record = dict[str, Any]


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (`file:line` or `file: row n`, record).

    Raises FileNotFoundError for a missing file, ConfigError for an unknown type, a broken line or an empty file.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such data file")
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv, ".tsv": _csv}
    if file.suffix not in readers:
        raise ConfigError(f"{file}: unknown type of data file; use {', '.join(readers)}")
    empty = True
    for where, record in readers[file.suffix](file):
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: expected an object with named fields, got {type(record).__name__}")
        empty = False
        yield where, record
    if empty:
        raise ConfigError(f"{file}: holds no records")


def find_field(record: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is present and not None; None when there is none."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def need_field(record: Mapping[str, Any], where: str, *names: str) -> Any:
    """As `find_field`, but a record without any of them is a ConfigError that lists what it has."""
    value = find_field(record, *names)
    if value is None:
        raise ConfigError(f"{where}: needs one of the fields {', '.join(names)}; it has {', '.join(map(str, record))}")
    return value


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            if line.strip():
                yield where, _parse(line, where)


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    data = _parse(file.read_bytes(), str(file))
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise ConfigError(f"{file}: expected a list of records, or an object with such a list under `data`")
    yield from ((f"{file}: row {number}", row) for number, row in enumerate(rows))


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa  # here, because only this format needs it
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(file).iter_batches()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file}: not a parquet file ({error})") from error
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((f"{file}: row {number}", row) for number, row in enumerate(rows))


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        for row in reader:
            where = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                raise ConfigError(f"{where}: {'more' if None in row else 'fewer'} cells than the header has columns")
            yield where, row


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        excerpt = text[:80].decode(errors="replace").strip()
        raise ConfigError(f"{where}: not valid JSON ({error}): {excerpt}") from error
