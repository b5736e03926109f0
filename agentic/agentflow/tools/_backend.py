"""One JSON request to a search service that the settings name, and reading of its answer.

Inputs: a URL template with `{query}`, the settings of the web. Invariants: a service that fails is an
InfrastructureError, because the planner cannot help it; a service that answers in another shape is a ConfigError.
Left out: keys in headers (put them into the URL, or a proxy in between).
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import httpx

from agentic.common.errors import ConfigError, InfrastructureError

ATTEMPTS = 2
PAUSE_S = 0.5


def check_template(setting: str, template: str) -> None:
    """Raises ConfigError unless the template is an http(s) address with `{query}`."""
    if not template.startswith(("http://", "https://")) or "{query}" not in template:
        raise ConfigError(f"{setting} is {template!r}; this tool needs an http or https address with {{query}} in it")


async def ask(tool: str, template: str, query: str, timeout_s: float) -> Any:
    """The decoded JSON answer; one retry.

    Raises:
        InfrastructureError: `<tool>_unavailable`, no usable answer.
    """
    problem = ""
    url = template.replace("{query}", quote(query, safe=""))
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSE_S)
        try:
            async with httpx.AsyncClient(timeout=timeout_s, follow_redirects=True) as client:
                response = await asyncio.wait_for(client.get(url), timeout_s)
            if response.status_code == 200:
                return response.json()
            problem = f"HTTP {response.status_code}"
        except (httpx.HTTPError, asyncio.TimeoutError, ValueError) as error:
            problem = f"{type(error).__name__} {error}"
    raise InfrastructureError(f"{tool}_unavailable", problem)


def value_at(data: Any, path: str) -> Any:
    """`a.b` -> data["a"]["b"]; None where there is nothing."""
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data
