"""Wikipedia search: introductions of the pages that fit a query, through the MediaWiki interface.

Inputs: the query; `agentflow_wikipedia_url`, the address of an `api.php`. Invariants: nothing is returned when that
domain is blocked; off unless chosen. Leaves out: whole articles (`web_page` reads the addresses that are returned).
"""

from __future__ import annotations

from typing import Any, ClassVar

from agentic.agentflow.memory import truncate_middle
from agentic.agentflow.tools._backend import ask, check_template, value_at
from agentic.agentflow.tools._web import is_blocked
from agentic.agentflow.tools.base import Kit, ToolResult, ToolSpec, WebSettings
from agentic.common.errors import InfrastructureError

PAGES = 3
PAGE_CHARS = 1500
# Introductions as plain text, with the pages' addresses, in order of the search.
QUERY = (
    f"?action=query&format=json&generator=search&gsrlimit={PAGES}&gsrsearch={{query}}"
    f"&prop=extracts%7Cinfo&exintro=1&explaintext=1&exlimit={PAGES}&inprop=url"
)


class WikipediaSearch:
    """Introductions of the best pages."""

    spec: ClassVar[ToolSpec] = ToolSpec(
        name="wikipedia_search",
        aliases=("wikipedia", "wikipedia rag search"),
        description="finds Wikipedia pages for a query and returns their introductions and addresses",
        parameters={"query": "the person, place, work or concept to look up"},
        limitation="encyclopedic knowledge only; introductions, not whole articles",
        best_practice="name one subject per call; read the article itself with a page reader if there is one",
    )

    def __init__(self, settings: WebSettings) -> None:
        """Raises ConfigError when no address is set."""
        self._url = settings.wikipedia_url + QUERY
        check_template("agentflow_wikipedia_url", self._url if settings.wikipedia_url else "")
        self._settings = settings

    @classmethod
    def build(cls, kit: Kit) -> WikipediaSearch:
        return cls(kit.web)

    async def run(self, query: str) -> ToolResult:
        """Title, address and introduction of up to three pages."""
        data = await ask(self.spec.name, self._url, query, self._settings.timeout_s)
        if not isinstance(data, dict) or "error" in data:  # too many requests, for instance: said with HTTP 200
            raise InfrastructureError(f"{self.spec.name}_unavailable", str(data)[:200])
        pages: dict[str, Any] = value_at(data, "query.pages") or {}
        found = sorted(pages.values(), key=lambda page: page.get("index", 0))
        kept = [page for page in found if not is_blocked(page.get("fullurl", ""), self._settings.blocked_domains)]
        meta = {"titles": [page.get("title", "") for page in kept], "blocked": len(found) - len(kept)}
        if not kept:
            return ToolResult(False, "Error: no Wikipedia page was found; try the exact name of the subject", meta)
        return ToolResult(True, "\n\n".join(_entry(page) for page in kept), meta)


def _entry(page: dict[str, Any]) -> str:
    text = truncate_middle(page.get("extract", "").strip(), PAGE_CHARS) or "(no introduction)"
    return f"{page.get('title', '')}\n{page.get('fullurl', '')}\n{text}"
