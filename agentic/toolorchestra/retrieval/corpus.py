"""The passages: a JSON Lines corpus in, a folder of files that open without being read out.

Input: one JSON object a line with the text under `content` or `contents` and an optional `id` (text or whole number; the
number of the passage from 0 where it is missing). All other fields are kept.
Files: `documents.jsonl` (the objects, compact), `offsets.npy` (int64, N + 1 byte positions), `id_rank.npy` (int64, N: the
place of each passage among the sorted ids, which decides between equal scores).
Invariants: ids are unique; rows count the passages in the order of the corpus; a wrong line is an error that names file
and line. Leaves out: vectors (`index`).
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agentic.common.errors import ConfigError

DOCUMENTS, OFFSETS, ID_RANK = "documents.jsonl", "offsets.npy", "id_rank.npy"
TEXT_KEYS = ("content", "contents")
HASH_BLOCK = 1 << 20


@dataclass(frozen=True)
class CorpusSummary:
    """What `write_documents` wrote: passages, those left out as too short, and the row of each kept one."""

    documents: int
    left_out: int
    kept_rows: np.ndarray
    """int64, `documents` numbers of passages of the corpus, counted from 0 before any was left out."""


def text_of(document: dict[str, Any]) -> str | None:
    """The passage, under whichever of the two usual keys; None when there is no text."""
    return next((document[key] for key in TEXT_KEYS if isinstance(document.get(key), str)), None)


def file_hash(path: Path) -> str:
    """sha256 of the file, in hex. Raises FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"--corpus {path}: no such file; pass a JSON Lines file of passages")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def read_corpus(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(id, object, text) of every passage. Raises ConfigError with the place of the first wrong line."""
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            document, text = _parse(line, f"{path}:{number}")
            document = {"id": str(len(lines)), **document}
            name = _id(document, f"{path}:{number}")
            if name in lines:
                raise ConfigError(f"{path}:{number}: id '{name}' is that of line {lines[name]}; make ids unique")
            lines[name] = number
            yield name, document, text


def _parse(line: bytes, where: str) -> tuple[dict[str, Any], str]:
    try:
        document = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error}); one object a line is expected") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: expected an object with `id` and `content`, got {type(document).__name__}")
    text = text_of(document)
    if text is None:
        found = ", ".join(document) or "none"
        raise ConfigError(f"{where}: no text under `content` or `contents` (fields: {found}); rename the field")
    return document, text


def _id(document: dict[str, Any], where: str) -> str:
    value = document["id"]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{where}: id {value!r} must be text or a whole number")
    return str(value)


def write_documents(corpus: Path, folder: Path, min_text_chars: int) -> CorpusSummary:
    """Write the three files into `folder`; passages of at most `min_text_chars` characters (and blank ones) stay out."""
    offsets, names, kept = [0], [], []
    row = -1
    with (folder / DOCUMENTS).open("wb") as file:
        for row, (name, document, text) in enumerate(read_corpus(corpus)):
            if len(text.strip()) <= min_text_chars:
                continue
            offsets.append(offsets[-1] + file.write(orjson.dumps(document) + b"\n"))
            names.append(name)
            kept.append(row)
    rank = np.empty(len(names), dtype=np.int64)
    rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    np.save(folder / OFFSETS, np.array(offsets, dtype=np.int64))
    np.save(folder / ID_RANK, rank)
    return CorpusSummary(len(names), row + 1 - len(names), np.array(kept, dtype=np.int64))


class DocumentStore:
    """The passages of an index folder, mapped into memory: opening reads nothing, a passage costs one slice."""

    def __init__(self, folder: Path) -> None:
        # A plain view: taking single elements of a memmap object is ten times slower.
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r").view(np.ndarray)
        with (folder / DOCUMENTS).open("rb") as file:
            # An empty file cannot be mapped.
            empty = not file.seek(0, 2)
            self._bytes: Any = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def raw(self, row: int) -> bytes:
        """The JSON object of a passage, as bytes."""
        start, stop = self._offsets[row : row + 2].tolist()
        return self._bytes[start : stop - 1]

    def text(self, row: int) -> str:
        return text_of(orjson.loads(self.raw(row))) or ""

    def row_of_id(self) -> dict[str, int]:
        """Row of every id; reads the whole file."""
        return {str(orjson.loads(self.raw(row))["id"]): row for row in range(len(self))}
