"""What the search tools share: bounded fetching, the domain block-list, text of a page, choice of passages.

Inputs: URLs and pages of strangers, `WebSettings`. Invariants: a fetch is bounded in time and bytes, redirects are
followed one by one, and every hop is checked; a blocked domain, or an address that is not public (services of the
cluster), is never contacted; a page is text and nothing else. Left out: scripts, robots.txt, PDF; a host whose name is
resolved anew between check and connection is not caught (use a proxy where that matters).
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import httpx

from agentic.agentflow.tools.base import WebSettings

USER_AGENT = "slime-agentic (research; bounded fetches)"
MAX_REDIRECTS = 5
TEXT_TYPES = ("text/", "application/xhtml", "application/xml", "application/json")
SKIPPED = frozenset("script style noscript template svg nav footer aside form button select".split())
BLOCKS = frozenset(
    "address article blockquote br dd div dl dt figure h1 h2 h3 h4 h5 h6 header hr li main ol p pre section table tr ul "
    "title".split()
)
K1, B = 1.5, 0.75
"""The usual constants of BM25 (Robertson and Zaragoza 2009)."""


class FetchError(Exception):
    """The page cannot be had; the message is for the planner."""


@dataclass(frozen=True)
class Page:
    url: str
    """After redirects."""
    body: str
    is_html: bool
    truncated: bool
    """The size limit cut it."""


def is_blocked(url: str, domains: Iterable[str]) -> bool:
    """Whether the URL's host is one of the domains or below one; a URL that cannot be read counts as blocked."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError:
        return True
    return any(host == domain or host.endswith("." + domain) for domain in (d.lower().strip(". ") for d in domains))


async def fetch(url: str, settings: WebSettings) -> Page:
    """Get a page of the open web.

    Raises:
        FetchError: not http(s), blocked, not public, an HTTP error, no text, or too slow.
    """
    try:
        return await asyncio.wait_for(_follow(url, settings), settings.timeout_s)
    except asyncio.TimeoutError as error:
        raise FetchError(f"no answer within {settings.timeout_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        raise FetchError(f"{type(error).__name__}: {error}") from error


async def _follow(url: str, settings: WebSettings) -> Page:
    async with httpx.AsyncClient(timeout=settings.timeout_s, headers={"User-Agent": USER_AGENT}) as client:
        for _ in range(MAX_REDIRECTS + 1):
            await _check(url, settings)
            async with client.stream("GET", url) as response:
                if response.has_redirect_location:
                    url = urljoin(url, response.headers["location"])
                    continue
                return await _read(response, settings.max_bytes)
    raise FetchError(f"more than {MAX_REDIRECTS} redirects")


async def _check(url: str, settings: WebSettings) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(f"{url[:200]!r} is not a complete http or https address")
    if is_blocked(url, settings.blocked_domains):
        raise FetchError(f"the domain {parts.hostname} is blocked in this run")
    if settings.private_addresses:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    if not all(ipaddress.ip_address(str(item[4][0]).partition("%")[0]).is_global for item in found):
        raise FetchError(f"{parts.hostname} is not a public address")


async def _read(response: httpx.Response, max_bytes: int) -> Page:
    if response.status_code >= 400:
        raise FetchError(f"HTTP {response.status_code}")
    kind = response.headers.get("content-type", "text/html").lower()
    if not kind.startswith(TEXT_TYPES):
        raise FetchError(f"the page is {kind.partition(';')[0]}, not text")
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > max_bytes:
            break
    text = _decode(bytes(body[:max_bytes]), response.charset_encoding or "utf-8")
    return Page(str(response.url), text, "html" in kind, len(body) > max_bytes)


def _decode(body: bytes, charset: str) -> str:
    try:
        return body.decode(charset, errors="replace")
    except (LookupError, UnicodeError):  # the page names a charset that there is not, or that cannot replace
        return body.decode(errors="replace")


class _Text(HTMLParser):
    """Collects visible text, one line per block element."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self._skipping.append(tag)
        elif tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:  # closes what was left open inside it as well
            del self._skipping[self._skipping.index(tag) :]
        elif tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.parts.append(data)

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """`<![...]>`; the one of the standard library fails on sections that it does not know."""
        end = self.rawdata.find(">", i)
        return end + 1 if end >= 0 else -1


def visible_text(html: str) -> str:
    """The text of a page: blocks on lines of their own, white space collapsed."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return "\n".join(line for line in lines if line)


def passages(text: str, words: int = 200, overlap: int = 20) -> list[str]:
    """The text in pieces of `words` words, each sharing `overlap` words with the one before."""
    tokens = text.split()
    starts = range(0, max(len(tokens) - overlap, 1), words - overlap)
    return [" ".join(tokens[start : start + words]) for start in starts] if tokens else []


def best_passages(query: str, pieces: Sequence[str], limit: int) -> list[int]:
    """Indices of the `limit` pieces that fit the query best (BM25 over the pieces), in order of the text.

    The beginning when no word of the query occurs; empty only for no pieces.
    """
    counts = [Counter(_terms(piece)) for piece in pieces]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths) if pieces else 0.0
    scores = [0.0] * len(pieces)
    for term in set(_terms(query)):
        present = sum(term in count for count in counts)
        weight = math.log(1 + (len(pieces) - present + 0.5) / (present + 0.5))
        for i, count in enumerate(counts):
            if count[term]:
                norm = K1 * (1 - B + B * lengths[i] / mean)
                scores[i] += weight * count[term] * (K1 + 1) / (count[term] + norm)
    ranked = sorted((i for i in range(len(pieces)) if scores[i] > 0), key=lambda i: (-scores[i], i))
    return sorted(ranked[:limit]) or list(range(len(pieces)))[:1]


def _terms(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
