"""Search tools against a local server, and that a tool is one file."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from helpers_agentflow import Play, plan, stage

from agentic.agentflow.config import AgentFlowConfig
from agentic.agentflow.tools import WebSettings, available_tools, execute, tool_class
from agentic.agentflow.tools._web import best_passages, is_blocked, passages, visible_text
from agentic.agentflow.tools.web_page import WebPage
from agentic.agentflow.tools.web_search import WebSearch
from agentic.agentflow.tools.wikipedia_search import WikipediaSearch
from agentic.common.errors import ConfigError, InfrastructureError

FIELDS = ("results", "title", "url", "content")
Answer = tuple[int, dict[str, str], bytes]
JSON = {"Content-Type": "application/json"}
HTML = {"Content-Type": "text/html; charset=utf-8"}


class Site:
    """A local server; `pages` maps a path to an answer or to a function of the query string."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pages: dict[str, Answer | Callable[[dict[str, list[str]]], Answer]] = {}
        self.seen: list[str] = []


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            local.seen.append(self.path)
            parts = urlsplit(self.path)
            page = local.pages.get(parts.path, (404, {}, b""))
            status, headers, body = page(parse_qs(parts.query)) if callable(page) else page
            self.send_response(status)
            for item in headers.items():
                self.send_header(*item)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                return  # the client had enough

        def log_message(self, *_: object) -> None:
            return

    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    local = Site(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield local
    server.shutdown()
    server.server_close()


def settings(site: Site, **changes: Any) -> WebSettings:
    given: dict[str, Any] = {"search_url": site.url + "/search?q={query}&format=json", "search_fields": FIELDS}
    given |= {"wikipedia_url": site.url + "/w/api.php", "private_addresses": True, "timeout_s": 30.0}
    return WebSettings(**(given | changes))


async def test_web_search_shows_what_is_not_blocked(site: Site) -> None:
    found = [("Answers", "http://leak.org/a"), ("Sub", "https://www.leak.org/b"), ("Paris", "http://fine.org/c")]
    site.pages["/search"] = lambda query: (
        200,
        JSON,
        json.dumps(
            {"results": [{"title": t, "url": u, "content": f"about {query['q'][0]}"} for t, u in found]}
        ).encode(),
    )
    tool = WebSearch(settings(site, blocked_domains=("leak.org",)))
    result = await execute(tool, {"query": "capital & of=France?"})
    assert result.text == "[1] Paris\nhttp://fine.org/c\nabout capital & of=France?" and result.ok
    assert result.meta == {"found": 3, "blocked": 2}
    site.pages["/search"] = (200, JSON, b'{"results": []}')
    assert not (await execute(tool, {"query": "x"})).ok
    site.pages["/search"] = (200, JSON, b'{"hits": []}')
    with pytest.raises(ConfigError, match="no list at 'results'"):
        await execute(tool, {"query": "x"})


async def test_a_search_service_that_fails_is_not_the_planners_fault(site: Site) -> None:
    answers = [(503, {}, b""), (200, JSON, b'{"results": [{"title": "t", "url": "u", "content": "c"}]}')]
    site.pages["/search"] = lambda query: answers.pop(0) if len(answers) > 1 else answers[0]
    assert (await execute(WebSearch(settings(site)), {"query": "x"})).ok and len(site.seen) == 2
    site.pages["/search"] = (500, {}, b"")
    with pytest.raises(InfrastructureError, match="web_search_unavailable: HTTP 500"):
        await execute(WebSearch(settings(site)), {"query": "x"})


async def test_wikipedia_search(site: Site) -> None:
    pages = {
        "7": {
            "index": 2,
            "title": "Paris Hilton",
            "fullurl": "https://en.wikipedia.org/wiki/Paris_Hilton",
            "extract": "",
        },
        "5": {
            "index": 1,
            "title": "Paris",
            "fullurl": "https://en.wikipedia.org/wiki/Paris",
            "extract": "The capital.",
        },
    }
    site.pages["/w/api.php"] = lambda query: (
        200,
        JSON,
        json.dumps({"query": {"pages": pages if query["gsrsearch"] == ["Paris"] else {}}}).encode(),
    )
    tool = WikipediaSearch(settings(site))
    result = await execute(tool, {"query": "Paris"})
    assert result.text.startswith("Paris\nhttps://en.wikipedia.org/wiki/Paris\nThe capital.\n\nParis Hilton\n")
    assert not (await execute(tool, {"query": "nothing"})).ok
    blocked = WikipediaSearch(settings(site, blocked_domains=("wikipedia.org",)))
    assert (await execute(blocked, {"query": "Paris"})).meta == {"titles": [], "blocked": 2}


async def test_web_page_returns_the_passages_that_fit(site: Site) -> None:
    filler = "".join(f"<p>{'lorem ipsum dolor ' * 60}{n}</p>" for n in range(20))
    html = f"<title>T</title><script>var secret</script>{filler}<p>The tower is 330&nbsp;metres high.</p>{filler}"
    site.pages["/tower"] = (200, HTML, html.encode())
    site.pages["/old"] = (302, {"Location": "/tower"}, b"")
    result = await execute(WebPage(settings(site)), {"url": site.url + "/old", "query": "How high is the tower?"})
    assert result.ok and result.text.startswith(site.url + "/tower\n") and "330 metres high" in result.text
    assert "secret" not in result.text and len(result.text.split()) < 5 * 210
    assert result.meta["passages"] > 20


@pytest.mark.parametrize(
    ("path", "answer", "changes", "message"),
    [
        ("/none", (404, {}, b""), {}, "HTTP 404"),
        ("/pdf", (200, {"Content-Type": "application/pdf"}, b"%PDF"), {}, "application/pdf, not text"),
        ("/loop", (302, {"Location": "/loop"}, b""), {}, "redirects"),
        ("/away", (302, {"Location": "http://leak.org/x"}, b""), {"blocked_domains": ("leak.org",)}, "is blocked"),
        ("/file", (302, {"Location": "file:///etc/passwd"}, b""), {}, "not a complete http"),
        ("/here", (200, HTML, b"text"), {"private_addresses": False}, "not a public address"),
        ("/empty", (200, HTML, b"<script>x</script>"), {}, "no text"),
    ],
)
async def test_pages_that_cannot_be_read(
    site: Site, path: str, answer: Answer, changes: dict[str, Any], message: str
) -> None:
    site.pages[path] = answer
    result = await execute(WebPage(settings(site, **changes)), {"url": site.url + path, "query": "x"})
    assert not result.ok and message in result.text and (path != "/here" or not site.seen)


async def test_size_and_time_of_a_fetch_are_bounded(site: Site) -> None:
    site.pages["/big"] = (200, HTML, b"word " * 400_000)
    result = await execute(WebPage(settings(site, max_bytes=1000)), {"url": site.url + "/big", "query": "word"})
    assert result.ok and result.meta == {"url": site.url + "/big", "passages": 1, "truncated": True}
    site.pages["/slow"] = lambda query: time.sleep(2) or (200, HTML, b"late")  # type: ignore[func-returns-value]
    slow = await execute(WebPage(settings(site, timeout_s=0.3)), {"url": site.url + "/slow", "query": "x"})
    assert "no answer within 0.3 s" in slow.text


def test_text_and_passages() -> None:
    html = "<h1>A</h1>one <b>two</b><br>three<nav><p>menu</nav><ul><li>x<li>y</ul><style>s</style>&amp;"
    assert visible_text(html).splitlines() == ["A", "one two", "three", "x", "y", "&"]
    pieces = passages(" ".join(map(str, range(450))))
    assert [piece.split()[0] for piece in pieces] == ["0", "180", "360"] and pieces[-1].endswith("449")
    assert passages("") == [] and best_passages("x", [], 3) == []
    texts = ["cats and dogs", "dogs", "a long text about many things", "cats"]
    assert best_passages("cats", texts, 1) == [3] and best_passages("cats", texts, 2) == [0, 3]
    assert best_passages("zebra", texts, 2) == [0]
    assert is_blocked("http://A.Leak.org.:80/x", ["leak.org"]) and not is_blocked("http://notleak.org", ["leak.org"])


def test_search_tools_are_off_and_need_their_address() -> None:
    assert available_tools() == ("base_generator", "python_coder", "web_page", "web_search", "wikipedia_search")
    assert AgentFlowConfig(roles="r").tools == ("base_generator", "python_coder")
    with pytest.raises(ConfigError, match="agentflow_web_search_url is ''"):
        WebSearch(WebSettings(search_fields=FIELDS))
    with pytest.raises(ConfigError, match="needs 4 paths"):
        WebSearch(WebSettings(search_url="http://x/{query}"))
    with pytest.raises(ConfigError, match="agentflow_wikipedia_url is ''"):
        WikipediaSearch(WebSettings())
    config = AgentFlowConfig(roles="r", tools=("web_page", "web_search"), blocked_domains=("a.org",))
    assert "web_page" not in config.required_roles and config.web.blocked_domains == ("a.org",)


ONE_FILE = """
from agentic.agentflow.tools import Kit, ToolResult, ToolSpec


class Reverse:
    spec = ToolSpec(
        name="reverse",
        aliases=("backwards",),
        description="writes a text backwards",
        parameters={"text": "the text"},
        limitation="letters only, no meaning",
        best_practice="one word at a time",
    )

    @classmethod
    def build(cls, kit: Kit) -> "Reverse":
        return cls()

    async def run(self, text: str) -> ToolResult:
        return ToolResult(True, text[::-1])
"""


@pytest.fixture
def one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "house_tools").mkdir()
    (tmp_path / "house_tools" / "reverse.py").write_text(ONE_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "house_tools.reverse"
    for name in ("house_tools", "house_tools.reverse"):
        sys.modules.pop(name, None)


async def test_a_new_tool_is_one_file(one_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(next_step=plan("Backwards Tool"), command='execution = tool.execute(text="stressed")')
    with stage(tmp_path, monkeypatch, play, tools=["base_generator", one_file]) as s:
        sample = await s.run()
    tool = next(entry for entry in sample.metadata["trace"] if entry["role"] == "tool")
    assert (tool["tool_name"], tool["text"], tool["ok"]) == ("reverse", "desserts", True)
    assert any("reverse: writes a text backwards" in prompt for prompt in s.policy.prompts())


def test_the_file_of_the_page_is_the_file_that_is_tested() -> None:
    page = Path(__file__).parents[2] / "docs" / "en" / "methods" / "agentflow_tools.md"
    assert ONE_FILE.strip() in page.read_text(encoding="utf-8")


def test_a_module_without_exactly_one_tool_is_an_error(one_file: str) -> None:
    assert tool_class(one_file).spec.name == "reverse"
    for name, message in (
        ("calculator", "choose from base_generator"),
        ("house_tools.none", "No module named"),
        ("agentic.common.errors", "0 classes"),
    ):
        with pytest.raises(ConfigError, match=message):
            tool_class(name)


async def test_malformed_pages_and_results_end_no_run(site: Site) -> None:
    odd = b"<p>one<![if IE]>two<![endif]><![foo[x]]>three<![%y]>four</p><![unclosed"
    site.pages["/odd"] = (200, {"Content-Type": "text/html; charset=no-such-charset"}, odd)
    result = await execute(WebPage(settings(site)), {"url": site.url + "/odd", "query": "one"})
    assert result.ok and "onetwothreefour" in result.text
    found = {"results": [{"title": "t", "url": "http://[bad", "content": "c"}]}
    site.pages["/search"] = (200, JSON, json.dumps(found).encode())
    assert (await execute(WebSearch(settings(site)), {"query": "x"})).meta == {"found": 1, "blocked": 1}


async def test_an_error_that_wikipedia_reports_is_not_an_empty_result(site: Site) -> None:
    site.pages["/w/api.php"] = (200, JSON, json.dumps({"error": {"code": "ratelimited"}}).encode())
    with pytest.raises(InfrastructureError, match="wikipedia_search_unavailable.*ratelimited"):
        await execute(WikipediaSearch(settings(site)), {"query": "Paris"})
