"""The retrieval service: an ASGI application over an index and an embedder.

    POST /retrieve   see `protocol`; 400 and 413 bad request, 401 key, 404 unknown eid, 502 embedding service,
                     503 with Retry-After when the queue is full or the answer took too long
    GET  /health     200 with the index, the limits and the counters; the application exists only once all is loaded

Invariants: queries of all requests are embedded and searched together (`batching`), equal ones once; nothing blocks the
event loop; a passage outside the list of the given eid is never sent, an unknown or missing eid is refused when there
are lists; an error is `{"error": "one line"}`.
Leaves out: web search, loading (`serve`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fastapi import FastAPI, Request, Response

from agentic.common.errors import ConfigError, InfrastructureError
from agentic.toolorchestra.retrieval.batching import MicroBatcher, Overloaded
from agentic.toolorchestra.retrieval.embedding import Embedder
from agentic.toolorchestra.retrieval.index import Hits, VectorIndex
from agentic.toolorchestra.retrieval.protocol import (
    MAX_BODY_BYTES,
    BadRequest,
    RetrieveRequest,
    parse_request,
    render_answer,
)

logger = logging.getLogger(__name__)

SAME_MODEL = 0.98


@dataclass(frozen=True)
class ServiceSettings:
    """Limits and defaults of the service."""

    topk: int = 5
    """Hits of a request whose topk is null."""
    max_topk: int = 1000
    """Most hits a request may ask for."""
    min_score: float | None = None
    """Hits whose cosine is not above are dropped; None keeps all."""
    query_prefix: str | None = None
    """Text before every query; None takes the model's own prompt for queries."""
    max_batch: int = 128
    """Most queries in one call of the model and the index."""
    window_ms: float = 5.0
    """Longest wait for further queries, in milliseconds."""
    max_queue: int = 1024
    """Queries that may wait; further requests are refused."""
    request_timeout_s: float = 30.0
    """Longest time from arrival to answer, in seconds."""


class Query(NamedTuple):
    """One query in the batch."""

    text: str
    topk: int
    rows: np.ndarray | None
    """Passages that may be found, None for all."""


class Retriever:
    """Embeds and searches; blocking, for one thread at a time."""

    def __init__(self, index: VectorIndex, embedder: Embedder, settings: ServiceSettings) -> None:
        """Raises ConfigError when the embedder is not the one the index was made with."""
        self.index, self.embedder = index, embedder
        self.min_score = settings.min_score
        self.prefix = embedder.query_prompt if settings.query_prefix is None else settings.query_prefix
        check_same_model(index, embedder)

    def retrieve(self, batch: list[Query]) -> list[Hits]:
        texts = list(dict.fromkeys(query.text for query in batch))
        vectors = self.embedder.encode([self.prefix + text for text in texts])
        place = {text: number for number, text in enumerate(texts)}
        # Equal queries over all passages are one search; one over a list of passages is short anyway.
        searches: dict[tuple[int, Any], Query] = {}
        keys = [(place[query.text], None if query.rows is None else number) for number, query in enumerate(batch)]
        for key, query in zip(keys, batch, strict=True):
            if key not in searches or searches[key].topk < query.topk:
                searches[key] = query
        wanted = list(searches.values())
        found = self.index.search(
            vectors[[key[0] for key in searches]], [q.topk for q in wanted], [q.rows for q in wanted]
        )
        hits = dict(zip(searches, found, strict=True))
        return [self._cut(hits[key], query.topk) for key, query in zip(keys, batch, strict=True)]

    def _cut(self, hits: Hits, topk: int) -> Hits:
        rows, scores = hits.rows[:topk], hits.scores[:topk]
        if self.min_score is None:
            return Hits(rows, scores)
        return Hits(rows[scores > self.min_score], scores[scores > self.min_score])


def check_same_model(index: VectorIndex, embedder: Embedder) -> None:
    """Embed the first passage again: another model would find nonsense without any error."""
    made_with = f"{index.folder}: made with {index.metadata.embedding_model} ({index.metadata.embedder})"
    if embedder.dimension != index.dimension:
        raise ConfigError(
            f"{made_with}, dimension {index.dimension}, but {embedder.name} has {embedder.dimension}; use the same model"
        )
    if len(index.documents) == 0:
        return
    cosine = float(embedder.encode([index.documents.text(0)])[0] @ index.vectors[0])
    if not cosine > SAME_MODEL:
        raise ConfigError(
            f"{made_with}; {embedder.name} gives its first passage another vector (cosine {cosine:.3f}); "
            "use the same model"
        )


def load_eid_lists(path: Path, index: VectorIndex) -> dict[str, np.ndarray]:
    """Rows of the passages each example may see, from a JSON object `{eid: [passage ids]}`.

    Ids that the index does not have (too short, or of another corpus) are counted in a warning. Raises
    FileNotFoundError, ConfigError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--eid-lists {path}: no such file")
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"--eid-lists {path}: not JSON ({error})") from error
    if not isinstance(data, dict) or not all(isinstance(ids, list) for ids in data.values()):
        raise ConfigError(f"--eid-lists {path}: expected an object with a list of passage ids for every eid")
    row_of_id = index.documents.row_of_id()
    names = {eid: dict.fromkeys(map(str, ids)) for eid, ids in data.items()}
    missing = sum(name not in row_of_id for ids in names.values() for name in ids)
    if missing:
        logger.warning("--eid-lists %s: %d of its passage ids are not in the index", path, missing)
    return {
        eid: np.array([row_of_id[name] for name in ids if name in row_of_id], dtype=np.int64)
        for eid, ids in names.items()
    }


class Service:
    """State of the application; `app` is the ASGI application."""

    def __init__(
        self,
        retriever: Retriever,
        settings: ServiceSettings,
        eid_lists: Mapping[str, np.ndarray] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.index = retriever.index
        self.settings = settings
        self._model = retriever.embedder.name
        self._eid_lists = eid_lists
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self.batcher: MicroBatcher[Query, Hits] = MicroBatcher(
            retriever.retrieve, settings.max_batch, settings.window_ms / 1e3, settings.max_queue
        )
        self.app = FastAPI(title="retrieval", lifespan=self._lifespan, openapi_url=None)
        # Plain routes: the bodies are read and checked here.
        self.app.add_route("/retrieve", self._retrieve, methods=["POST"])
        self.app.add_route("/health", self._health, methods=["GET"])

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.batcher.start()
        yield
        await self.batcher.close()

    async def _health(self, _: Request) -> Response:
        return _json(
            {
                "status": "ready",
                "documents": len(self.index.documents),
                "dimension": self.index.dimension,
                "model": self._model,
                "eid_lists": None if self._eid_lists is None else len(self._eid_lists),
                "settings": asdict(self.settings),
                "counters": self.batcher.status(),
            }
        )

    async def _retrieve(self, request: Request) -> Response:
        try:
            self._check_key(request)
            body = await _read(request)
            asked = parse_request(body, self.settings.topk, self.settings.max_topk)
            hits = await self._search(asked)
        except BadRequest as error:
            return _error(error.status, str(error))
        except Overloaded as error:
            return _error(503, str(error), error.retry_after_s)
        except asyncio.TimeoutError:
            return _error(503, f"no answer within {self.settings.request_timeout_s:g} s; the service is too busy", 1)
        except InfrastructureError as error:
            return _error(502, str(error))
        answer = render_answer(hits, asked.return_scores, self.index.documents.raw)
        return Response(answer, media_type="application/json")

    async def _search(self, asked: RetrieveRequest) -> Sequence[Hits]:
        rows = self._visible(asked.eid)
        queries = [Query(query, asked.topk, rows) for query in asked.queries]
        return await self.batcher.submit(queries, self.settings.request_timeout_s)

    def _visible(self, eid: str | None) -> np.ndarray | None:
        if self._eid_lists is None:
            return None
        if eid is None:
            raise BadRequest("eid is missing; this service shows every example its own passages")
        if eid not in self._eid_lists:
            raise BadRequest(f"eid '{eid[:60]}' is not in the lists of this service", status=404)
        return self._eid_lists[eid]

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._key):
            raise BadRequest("wrong or missing key; send `Authorization: Bearer KEY`", status=401)


async def _read(request: Request) -> bytes:
    """The body, never more of it than the limit."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    return b"".join(parts)


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(data), status, headers, media_type="application/json")


def _error(status: int, message: str, retry_after_s: int | None = None) -> Response:
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return _json({"error": " ".join(message.split())}, status, headers)
