"""Page reader: fetches one address and returns the passages that fit a question. No model is asked.

Inputs: address and question. Invariants: bounded in time and bytes; blocked domains and addresses that are not public
are refused, also behind redirects; off unless chosen. Leaves out: links, pages that need scripts, PDF.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from agentic.agentflow.tools._web import FetchError, Page, best_passages, fetch, passages, visible_text
from agentic.agentflow.tools.base import Kit, ToolResult, ToolSpec, WebSettings

PASSAGES = 5


class WebPage:
    """The best passages of a page."""

    spec: ClassVar[ToolSpec] = ToolSpec(
        name="web_page",
        aliases=("web page reader", "page reader", "web rag search"),
        description="reads one web page and returns the passages that fit a question",
        parameters={"url": "the complete address of the page", "query": "what to look for on it"},
        limitation="plain pages only: no PDF, no pages that need scripts; long pages are cut",
        best_practice="use an address from a search result; ask for the fact in the words the page would use",
    )

    def __init__(self, settings: WebSettings) -> None:
        self._settings = settings

    @classmethod
    def build(cls, kit: Kit) -> WebPage:
        return cls(kit.web)

    async def run(self, url: str, query: str) -> ToolResult:
        """Up to five passages in order of the page; a page that cannot be had is a failed call, not a failed run."""
        try:
            page = await fetch(url.strip(), self._settings)
        except FetchError as error:
            return ToolResult(False, f"Error: {url.strip()[:200]} could not be read: {error}", {"error": "fetch"})
        # Parsing a megabyte takes a while; the other trajectories go on meanwhile.
        pieces, chosen = await asyncio.to_thread(_choose, page, query)
        meta = {"url": page.url, "passages": len(pieces), "truncated": page.truncated}
        if not chosen:
            return ToolResult(False, f"Error: {page.url} has no text", meta)
        return ToolResult(True, "\n...\n".join([page.url, *(pieces[i] for i in chosen)]), meta)


def _choose(page: Page, query: str) -> tuple[list[str], list[int]]:
    pieces = passages(visible_text(page.body) if page.is_html else page.body)
    return pieces, best_passages(query, pieces, PASSAGES)
