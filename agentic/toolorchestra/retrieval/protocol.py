"""The wire format of `POST /retrieve`.

Request: `{"queries": [str], "topk": int|null, "return_scores": bool, "eid": str|null, "new_cache_dir": str|null}`; only
`queries` is required. `eid` selects the passages that this example may see; `new_cache_dir` is what callers of services
with a web search send, and has no effect here.
Answer: a list with one list per query; each hit is `{"document": {...}, "score": float}` with `return_scores`, else the
bare document, which is the object of the corpus as it is (text under `content` or `contents`).
Invariants: a request is right in every field or refused with one line that names the field; documents are copied from
the index as bytes.
Leaves out: HTTP (`service`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentic.common.roles import nearest
from agentic.toolorchestra.retrieval.index import Hits

FIELDS = ("queries", "topk", "return_scores", "eid", "new_cache_dir")
MAX_BODY_BYTES = 1 << 20
MAX_QUERIES = 64
MAX_QUERY_CHARS = 20_000


class BadRequest(Exception):
    """The request is refused; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RetrieveRequest:
    """A checked request."""

    queries: tuple[str, ...]
    topk: int
    return_scores: bool
    eid: str | None


def parse_request(body: bytes, default_topk: int, max_topk: int) -> RetrieveRequest:
    """Raises BadRequest."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be an object with `queries`, not {type(data).__name__}")
    for key in data:
        if key not in FIELDS:
            raise BadRequest(f"unknown field '{key}'{nearest(key, FIELDS)}")
    _check_text("new_cache_dir", data.get("new_cache_dir"))
    scores = data.get("return_scores", False)
    if not isinstance(scores, bool):
        raise BadRequest(f"return_scores must be true or false, not {_shown(scores)}")
    return RetrieveRequest(
        _queries(data.get("queries")),
        _topk(data.get("topk"), default_topk, max_topk),
        scores,
        _check_text("eid", data.get("eid")) or None,
    )


def _queries(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise BadRequest(f"queries must be a list of texts, not {_shown(value)}")
    if len(value) > MAX_QUERIES:
        raise BadRequest(f"{len(value)} queries in one request; at most {MAX_QUERIES} are taken")
    for number, query in enumerate(value):
        if not isinstance(query, str) or not query.strip():
            raise BadRequest(f"queries[{number}] must be a text that is not blank, not {_shown(query)}")
        if len(query) > MAX_QUERY_CHARS:
            raise BadRequest(f"queries[{number}] has {len(query)} characters; at most {MAX_QUERY_CHARS} are taken")
    return tuple(value)


def _topk(value: Any, default: int, most: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadRequest(f"topk must be a whole number from 1 to {most}, or null, not {_shown(value)}")
    return value


def _check_text(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{key} must be text or null, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60]


def render_answer(hits: Sequence[Hits], return_scores: bool, document: Callable[[int], bytes]) -> bytes:
    """The body of the answer; `document` gives the JSON object of a row."""
    lists = []
    for rows, scores in hits:
        found = [document(int(row)) for row in rows]
        if return_scores:
            pairs = zip(found, scores.tolist(), strict=True)
            found = [b'{"document":%b,"score":%b}' % (text, orjson.dumps(score)) for text, score in pairs]
        lists.append(b"[%b]" % b",".join(found))
    return b"[%b]" % b",".join(lists)
