"""The `search` tool's way to the retrieval service.

Inputs: the role `retrieval` of the role table (url, timeout_s, retries, max_concurrency, api_key_env).
Invariants: the conventions of `agentic.common.clients`: a deadline for every attempt and for all, bounded retries after
transport errors, HTTP 5xx and 429, typed errors, the role's semaphore held round the call only; an answer that breaks the
protocol is RoleBadResponse, never an empty list.
Leaves out: web search when there are few hits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentic.common.clients import post_json
from agentic.common.errors import RoleBadResponse
from agentic.common.roles import Role

TEXT_KEYS = ("content", "contents")
# More than any search query needs, and what embedding models read of a text; services refuse very long ones.
MAX_QUERY_CHARS = 2000


@dataclass(frozen=True)
class Passage:
    """One hit. `document` is the whole object as sent; `score` is a cosine."""

    id: str
    text: str
    score: float
    document: dict[str, Any]


class RetrievalClient:
    """Asks one service; may be used by many rollouts at once."""

    def __init__(self, role: Role) -> None:
        self.role = role

    async def search(self, query: str, topk: int | None = None, eid: str | None = None) -> list[Passage]:
        """Passages for one query, best first; see `search_many`."""
        return (await self.search_many([query], topk, eid))[0]

    async def search_many(
        self, queries: Sequence[str], topk: int | None = None, eid: str | None = None
    ) -> list[list[Passage]]:
        """At most `topk` passages (None: the service's number) for each query, among those that `eid` may see.

        Queries are cut to 2,000 characters; a blank one finds nothing. Raises RoleTimeout, RoleUnavailable,
        RoleBadResponse.
        """
        asked = [query.strip()[:MAX_QUERY_CHARS] for query in queries]
        sent = [query for query in asked if query]
        answers = iter(await self._post(sent, topk, eid) if sent else [])
        return [next(answers) if query else [] for query in asked]

    async def _post(self, queries: list[str], topk: int | None, eid: str | None) -> list[list[Passage]]:
        payload = {"queries": queries, "topk": topk, "return_scores": True, "eid": eid}
        data = await post_json(self.role, "/retrieve", payload)
        if not isinstance(data, list) or len(data) != len(queries) or not all(isinstance(hits, list) for hits in data):
            raise RoleBadResponse(self.role.name, f"not one list per query: {str(data)[:200]}")
        return [[self._passage(hit) for hit in hits] for hits in data]

    def _passage(self, hit: Any) -> Passage:
        try:
            document, score = hit["document"], float(hit["score"])
            text = next(document[key] for key in TEXT_KEYS if isinstance(document.get(key), str))
            name = str(document["id"])
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise RoleBadResponse(self.role.name, f"not a hit with document and score: {str(hit)[:200]}") from error
        if not math.isfinite(score):
            raise RoleBadResponse(self.role.name, f"score of passage {name} is {score}")
        return Passage(name, text, score, document)
