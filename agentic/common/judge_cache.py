"""Verdicts of a judging model, kept in a SQLite file that several processes may share.

Input: a judge client, the name of its model and a version string (everything else that a verdict depends on).
Invariants: the key is (model, hash of the whole prompt, version); only an answer with a verdict is kept, so a failure
is asked again; a file that cannot be read or written later costs a warning and a call, never a score.
Left out: expiry; delete the file, or change the version.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentic.common.clients import Completion, Messages
from agentic.common.errors import ConfigError
from agentic.common.judge import JudgeClient, parse_verdict

logger = logging.getLogger(__name__)

VERSION = "1"
"""Of the way an answer becomes a verdict (`judge.parse_verdict`)."""
BUSY_S = 30.0
_TABLE = """CREATE TABLE IF NOT EXISTS verdicts (
    model TEXT NOT NULL, prompt TEXT NOT NULL, version TEXT NOT NULL, answer TEXT NOT NULL,
    PRIMARY KEY (model, prompt, version)) WITHOUT ROWID"""


class CachedJudge:
    """A judge client that asks only what was not answered before. A kept answer counts no tokens and no time."""

    def __init__(self, client: JudgeClient, path: str | Path, model: str, version: str = "") -> None:
        """Raises ConfigError when `path` is no SQLite file and cannot become one."""
        self._client = client
        self._path = Path(path)
        self._model, self._version = model, f"{VERSION};{version}"
        self.hits = self.calls = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute(_TABLE)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"judge cache {path}: {error}; give a new file in a writable folder") from error

    async def complete(self, messages: Messages) -> Completion:
        """The kept answer, else the client's, which is kept if it holds a verdict."""
        key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
        kept = await asyncio.to_thread(self._read, key)
        if kept is not None:
            self.hits += 1
            return Completion(kept, "stop", 0, 0, 0.0)
        self.calls += 1
        completion = await self._client.complete(messages)
        if parse_verdict(completion.text) is not None:
            await asyncio.to_thread(self._write, key, completion.text)
        return completion

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One connection per use: safe across threads and forks, and cheap beside a call of a model.

        With the default journal: switching to a write-ahead log, and its clean-up whenever the last connection closes,
        fail at once instead of waiting when another process opens the file.
        """
        database = sqlite3.connect(self._path, timeout=BUSY_S)
        try:
            with database:
                yield database
        finally:
            database.close()

    def _read(self, key: str) -> str | None:
        query = "SELECT answer FROM verdicts WHERE model = ? AND prompt = ? AND version = ?"
        try:
            with self._open() as database:
                row = database.execute(query, (self._model, key, self._version)).fetchone()
        except sqlite3.Error as error:
            logger.warning("judge cache %s cannot be read: %s", self._path, error)
            return None
        return None if row is None else str(row[0])

    def _write(self, key: str, answer: str) -> None:
        # The first answer stays: two processes that asked at the same time then agree from here on.
        statement = "INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)"
        try:
            with self._open() as database:
                database.execute(statement, (self._model, key, self._version, answer))
        except sqlite3.Error as error:
            logger.warning("judge cache %s cannot be written: %s", self._path, error)
