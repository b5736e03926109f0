"""Questions with their own paragraphs, and the pool of documents that long contexts are made of.

Inputs: HotpotQA files (`question`, `answer`, `context`, `supporting_facts`, official or hub form), question files with
gold paragraphs (`question`, `answers`, `gold: [{title, text}]`), passage files (`title`, `text`).
Invariants: a document is "title newline text"; a pool holds each document once, sorted, so that an index means the same
document in every process; paragraphs of a question that share a title are one document.
Leaves out: the order of documents in a context (`data_synthesis`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agentic.common.data_files import Problem, Row, RowError, one_line, scan_rows, split_good, warn_problems
from agentic.common.errors import ConfigError


@dataclass(frozen=True)
class Question:
    """A question and its own documents (gold and, where the source has them, near distractors)."""

    id: str
    index: int
    """Position in the file, from 0; part of the seed of its context."""
    text: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    """Documents of the question, each once."""
    evidence: frozenset[int]
    """Which of `own` are needed for the answer."""


class DocumentPool:
    """Distinct documents in sorted order."""

    def __init__(self, documents: Iterable[str]) -> None:
        self.documents: list[str] = sorted(set(documents))

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> str:
        return self.documents[index]

    def index(self, document: str) -> int:
        """Position of a document. Raises ValueError when the pool lacks it."""
        place = bisect_left(self.documents, document)
        if place == len(self.documents) or self.documents[place] != document:
            raise ValueError(f"the pool has no document {one_line(document)!r}")
        return place

    @cached_property
    def by_title(self) -> dict[str, list[int]]:
        """Title -> positions of its documents."""
        titles: dict[str, list[int]] = {}
        for place, document in enumerate(self.documents):
            titles.setdefault(title_of(document), []).append(place)
        return titles

    def check(self, indices: Sequence[int]) -> None:
        """Raises ConfigError naming the first index outside of the pool."""
        outside = next((index for index in indices if not 0 <= index < len(self)), None)
        if outside is not None:
            raise ConfigError(f"document index {outside} is outside of the pool of {len(self)} documents")


def make_document(title: str, text: str) -> str:
    """The one text form of a document."""
    return f"{title}\n{text}"


def title_of(document: str) -> str:
    """First line of a document."""
    return document.partition("\n")[0]


# --------------------------------------------------------------------------------------------------------------------
# Files.


def load_questions(path: str | Path, limit: int | None = None) -> tuple[list[Question], list[Problem]]:
    """Questions in file order, and what was left out.

    Raises FileNotFoundError, or ConfigError when no question is usable.
    """
    questions, problems = split_good(_first_of_each_id(_scan(path, read_question), path))
    if not questions:
        raise ConfigError(f"{path}: no usable question{_first(problems)}")
    return questions[:limit], problems


def _first_of_each_id(results: Iterable[Question | Problem], path: str | Path) -> Iterator[Question | Problem]:
    """Replies are stored by id, so a second question with the same one is left out."""
    seen: set[str] = set()
    for result in results:
        if isinstance(result, Question) and result.id in seen:
            detail = f"an earlier question has the id {result.id}"
            yield Problem(f"{path}: record {result.index}", "duplicate_id", detail)
            continue
        if isinstance(result, Question):
            seen.add(result.id)
        yield result


def load_pool(paths: Sequence[str | Path], questions: Iterable[Question] = (), strict: bool = False) -> DocumentPool:
    """Pool of all documents in passage or question files, and of the questions' own documents.

    Raises FileNotFoundError, or ConfigError for a file without any document, with `strict` for any bad row: indices
    into the pool are only right when nothing is left out.
    """
    documents: list[str] = [document for question in questions for document in question.own]
    for path in paths:
        found, problems = split_good(_scan(path, _documents_of))
        if not found:
            raise ConfigError(f"{path}: holds no documents{_first(problems)}")
        if strict and problems:
            raise ConfigError(f"{path}: {len(problems)} bad rows, so indices would be wrong; the first: {problems[0]}")
        warn_problems(path, problems)
        documents += [document for several in found for document in several]
    return DocumentPool(documents)


def _first(problems: Sequence[Problem]) -> str:
    return f"; the first of {len(problems)} problems: {problems[0]}" if problems else ""


def _scan(path: str | Path, read: Any) -> Iterator[Any]:
    for row in scan_rows(path):
        if isinstance(row, Problem):
            yield row
            continue
        try:
            yield read(row)
        except RowError as error:
            yield Problem(row.where, error.reason, error.detail)


def _documents_of(row: Row) -> list[str]:
    """One passage, or the paragraphs of a question without merging: what the published pool consists of."""
    record = row.record
    if "title" in record and "text" in record:
        if not isinstance(record["title"], str) or not isinstance(record["text"], str):
            raise RowError("passage_not_text", f"title and text must be texts: {one_line(record)}")
        return [make_document(record["title"], record["text"])]
    return [make_document(title, text) for title, text in _paragraphs(record)]


def read_question(row: Row) -> Question:
    """Bring a record of either form to a Question. Raises RowError with reason and detail."""
    record = row.record
    paragraphs = _paragraphs(record)
    needed = _evidence_titles(record)
    own = _merge(paragraphs)
    evidence = frozenset(n for n, document in enumerate(own) if needed is None or title_of(document) in needed)
    answers = record.get("answers", record.get("answer"))
    id_ = record.get("_id", record.get("id", row.number))
    return Question(str(id_), row.number, _text(record, "question"), read_references(answers), tuple(own), evidence)


def read_references(value: Any) -> tuple[str, ...]:
    """Reference answers as non-empty texts; numbers are accepted. Raises RowError."""
    values = list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for answer in values:
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise RowError("reference_not_text", f"a reference is a {type(answer).__name__}: {one_line(answer)}")
    answers = tuple(str(answer).strip() for answer in values if str(answer).strip())
    if not answers:
        raise RowError("no_references", f"the reference list is empty: {one_line(value)}")
    return answers


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        fields = ", ".join(map(str, record)) or "none"
        raise RowError(f"no_{key}", f"`{key}` must be a text, got {one_line(repr(value))}; fields: {fields}")
    return value


def _paragraphs(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, text) in the order of the record."""
    gold, context = record.get("gold"), record.get("context")
    try:
        if isinstance(gold, list) and gold:
            return [(_string(entry["title"]), _string(entry["text"])) for entry in gold]
        if isinstance(context, Mapping):
            context = list(zip(context["title"], context["sentences"], strict=True))
        if isinstance(context, list) and context:
            return [(_string(title), "".join(map(_string, sentences))) for title, sentences in context]
    except (KeyError, TypeError, ValueError) as error:
        detail = f"expected gold: [{{title, text}}] or context: [[title, [sentences]]] ({one_line(error)})"
        raise RowError("bad_paragraphs", detail) from error
    raise RowError("no_paragraphs", f"neither `gold` nor `context` holds paragraphs; fields: {', '.join(record)}")


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text is expected")
    return value


def _evidence_titles(record: Mapping[str, Any]) -> set[str] | None:
    """Titles of the supporting facts; None when every own paragraph is gold."""
    facts = record.get("supporting_facts")
    if isinstance(facts, Mapping):
        return set(map(str, facts.get("title", ())))
    if isinstance(facts, list):
        return {str(fact[0]) for fact in facts if isinstance(fact, (list, tuple)) and fact}
    return None


def _merge(paragraphs: Sequence[tuple[str, str]]) -> list[str]:
    """One document a title, its paragraphs joined in order; a repeated paragraph counts once."""
    texts: dict[str, dict[str, None]] = {}
    for title, text in paragraphs:
        texts.setdefault(title, {})[text] = None
    return [make_document(title, " ".join(parts)) for title, parts in texts.items()]
