"""Web search through any service that answers a query with JSON (SearXNG, a proxy of a commercial engine, a stub).

Inputs: the query; `agentflow_web_search_url` and `agentflow_web_search_fields`. Invariants: results of blocked domains
are left out; off unless chosen. Leaves out: reading the pages (`web_page`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from agentic.agentflow.memory import truncate_middle
from agentic.agentflow.tools._backend import ask, check_template, value_at
from agentic.agentflow.tools._web import is_blocked
from agentic.agentflow.tools.base import Kit, ToolResult, ToolSpec, WebSettings
from agentic.common.errors import ConfigError

RESULTS = 5
SNIPPET_CHARS = 500


class WebSearch:
    """Titles, addresses and snippets for a query."""

    spec: ClassVar[ToolSpec] = ToolSpec(
        name="web_search",
        aliases=("google search", "internet search", "search"),
        description="searches the web and returns titles, addresses and short snippets",
        parameters={"query": "what to search for, in a few words"},
        limitation="snippets only; they can be out of date or wrong",
        best_practice="use it for facts, then read a promising address with a page reader if there is one",
    )

    def __init__(self, settings: WebSettings) -> None:
        """Raises ConfigError when the service is not described completely."""
        check_template("agentflow_web_search_url", settings.search_url)
        if len(settings.search_fields) != 4:
            raise ConfigError("agentflow_web_search_fields needs 4 paths: list of results, title, address, snippet")
        self._settings = settings

    @classmethod
    def build(cls, kit: Kit) -> WebSearch:
        return cls(kit.web)

    async def run(self, query: str) -> ToolResult:
        """The first results that are not blocked."""
        data = await ask(self.spec.name, self._settings.search_url, query, self._settings.timeout_s)
        where, *paths = self._settings.search_fields
        found = value_at(data, where)
        if not isinstance(found, list):
            raise ConfigError(f"the answer of agentflow_web_search_url has no list at {where!r}")
        items = [[str(value_at(item, path) or "") for path in paths] for item in found]
        kept = [item for item in items if not is_blocked(item[1], self._settings.blocked_domains)]
        meta: dict[str, Any] = {"found": len(items), "blocked": len(items) - len(kept)}
        if not kept:
            return ToolResult(False, "Error: nothing was found; try other words", meta)
        return ToolResult(True, "\n".join(_entry(n, *item) for n, item in enumerate(kept[:RESULTS], 1)), meta)


def _entry(number: int, title: str, url: str, snippet: str) -> str:
    snippet = truncate_middle(" ".join(snippet.split()), SNIPPET_CHARS)
    return f"[{number}] {title.strip()}\n{url}\n{snippet}"
