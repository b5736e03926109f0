"""Repeated evaluation of several arms on several data sets: run loop, result lines, resumption, statistics.

Inputs: jobs (data set, arm, run number, question) and an asynchronous function that answers one.
Invariants:
* every finished job is one line of `runs/<dataset>.<arm>.<run>.jsonl`, written at once and whole; a job with a scored
  line is never done again, so a killed evaluation goes on where it was;
* a failure (`score` None) is a line as well but no score: it is tried again by the next start, and its later line wins;
* a finished file is in the order of the questions, whatever the order of the answers was;
* one folder holds one protocol: a start with other settings is refused, and so is a second start at the same time;
* there is no summary of an incomplete evaluation.
Leaves out: what a question is (it only needs an `id`), how it is answered and scored.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentic.common.errors import ConfigError, TooManyFailures

logger = logging.getLogger(__name__)

STOP_AFTER_FAILURES = 20
"""So many failures in a row mean that a server is gone, and the loop stops."""
PROGRESS_S = 30.0
Line = dict[str, Any]


class HasId(Protocol):
    """A question, as far as this module is concerned."""

    @property
    def id(self) -> str: ...


class Job(NamedTuple):
    """One question in one run of one arm; runs count from 0."""

    dataset: str
    arm: str
    run: int
    question: Any


def sampling_seed(seed: int, job: Job) -> int:
    """A seed (0 to 2^31 - 1) for one question in one run; the same in every arm."""
    key = f"{seed}/{job.dataset}/{job.question.id}/{job.run}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class Outcome:
    """What became of a job; with the job's names it is a line of the result file."""

    answer: str
    score: float | None
    """0.0 to 1.0; None for a failure, which is no score."""
    judged_by: str
    vote: str | None = None
    """What majority@k counts: the extracted answer; None does not vote."""
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    """Role -> `prompt`, `completion`, `calls`."""
    seconds: float = 0.0
    failure_reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Further plain json types of the method."""


# --------------------------------------------------------------------------------------------------------------------
# Files.


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder for one process. Raises ConfigError when another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder}: another evaluation writes here; choose another folder or wait") from error
        yield


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def check_protocol(folder: Path, protocol: Mapping[str, Any], growing: Sequence[str] = ()) -> None:
    """Compare with the folder's `protocol.json`, and write it; sections in `growing` may gain entries.

    Raises ConfigError that names the first setting that differs.
    """
    path = folder / "protocol.json"
    wanted = json.loads(json.dumps(protocol))
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        for name in growing:
            wanted[name] = {**stored.get(name, {}), **wanted.get(name, {})}
            stored[name] = {**wanted[name], **stored.get(name, {})}
        difference = _first_difference(stored, wanted)
        if difference is not None:
            where, before, now = difference
            raise ConfigError(f"{folder}: started with {where} = {before!r}, now {now!r}; choose another --out folder")
    write_whole(path, json.dumps(wanted, indent=2) + "\n")


def _first_difference(stored: Any, wanted: Any, where: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*stored, *(key for key in wanted if key not in stored)]:
            found = _first_difference(stored.get(key), wanted.get(key), f"{where}.{key}" if where else str(key))
            if found:
                return found
        return None
    return None if stored == wanted else (where, stored, wanted)


class RunStore:
    """The result lines of one folder, by (data set, arm, run)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, dataset: str, arm: str, run: int) -> Path:
        return self.folder / f"{dataset}.{arm}.{run}.jsonl"

    def load(self, dataset: str, arm: str, run: int) -> dict[str, Line]:
        """Lines by question id, the last of each. A last line that a kill cut short is removed from the file.

        Raises ConfigError for any other line that is no result line.
        """
        path = self.path(dataset, arm, run)
        if not path.exists():
            return {}
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))
        lines = {}
        for number, text in enumerate(whole.splitlines(), start=1):
            line = _parse_line(text, f"{path}:{number}")
            lines[line["id"]] = line
        return lines

    def append(self, job: Job, outcome: Outcome) -> Line:
        """Write one line with one call, so that it is whole or absent after a kill."""
        names = {"id": job.question.id, "dataset": job.dataset, "arm": job.arm, "run": job.run}
        line = {**names, **asdict(outcome)}
        descriptor = os.open(self.path(*job[:3]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, _dump(line))
        finally:
            os.close(descriptor)
        return line

    def settle(self, dataset: str, arm: str, run: int, ids: Sequence[str]) -> None:
        """Bring the file into the order of the questions, one line each."""
        lines = self.load(dataset, arm, run)
        text = b"".join(_dump(lines[id_]) for id_ in ids if id_ in lines).decode()
        path = self.path(dataset, arm, run)
        if lines and path.read_text(encoding="utf-8") != text:
            write_whole(path, text)


def _dump(line: Line) -> bytes:
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _parse_line(text: bytes, where: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not a result line ({error}); delete the line to have it done again") from error
    if not isinstance(line, dict) or not {"id", "score", "failure_reason"} <= set(line):
        raise ConfigError(f"{where}: not a result line (no id, score); delete the line to have it done again")
    return line


# --------------------------------------------------------------------------------------------------------------------
# The loop.


async def run_jobs(
    jobs: Sequence[Job], answer: Callable[[Job], Awaitable[Outcome]], store: RunStore, concurrency: int
) -> None:
    """Do all jobs that have no scored line, `concurrency` at a time, in the order given.

    `answer` returns an Outcome also for a failure of the infrastructure; what it raises stops the loop.
    Raises TooManyFailures when nothing but failures come back.
    """
    todo = list(_unfinished(jobs, store))
    logger.info("%d of %d answers are there, %d to go", len(jobs) - len(todo), len(jobs), len(todo))
    queue, watch = iter(todo), _Watch(len(todo))

    async def work() -> None:
        for job in queue:
            outcome = await answer(job)
            store.append(job, outcome)
            watch.note(job, outcome)

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(todo)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _unfinished(jobs: Sequence[Job], store: RunStore) -> Iterator[Job]:
    files: dict[tuple[str, str, int], dict[str, Line]] = {}
    for job in jobs:
        if job[:3] not in files:
            files[job[:3]] = store.load(*job[:3])
        line = files[job[:3]].get(job.question.id)
        if line is None or line["score"] is None:
            yield job


class _Watch:
    """Progress in the log, and the end when every answer is a failure."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.failed, self.in_a_row = total, 0, 0, 0
        self.spoke = time.monotonic()

    def note(self, job: Job, outcome: Outcome) -> None:
        self.done += 1
        failed = outcome.score is None
        self.failed += failed
        self.in_a_row = self.in_a_row + 1 if failed else 0
        if self.in_a_row >= STOP_AFTER_FAILURES:
            raise TooManyFailures(
                f"{self.in_a_row} failures in a row, the last {outcome.failure_reason} ({job.dataset}, {job.arm}): "
                f"{outcome.details.get('failure_detail', '')}; look at the servers, then run the same command again"
            )
        if time.monotonic() - self.spoke > PROGRESS_S or self.done == self.total:
            self.spoke = time.monotonic()
            logger.info("%d of %d done (%d failed), now %s %s", self.done, self.total, self.failed, *job[:2])
