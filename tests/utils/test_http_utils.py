"""http_utils against a small real HTTP server: retries, errors, limits, several event loops."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from slime.utils import http_utils
from slime.utils.http_utils import get, init_http_client, post


class Server(ThreadingHTTPServer):
    """Answers with the queued (status, body) pairs, then with an echo; counts what it sees."""

    daemon_threads = True
    answers: list[tuple[int, str]]
    seen: list[Any]
    active = peak = 0
    release: threading.Event


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("X-Key")))
        self.server.active += 1
        self.server.peak = max(self.server.peak, self.server.active)
        if self.path == "/slow":
            self.server.release.wait(60)
        self.server.active -= 1
        self.answer(*(self.server.answers.pop(0) if self.server.answers else (200, json.dumps({"echo": body}))))

    def do_GET(self) -> None:
        self.answer(*(self.server.answers.pop(0) if self.server.answers else (200, '{"got": 1}')))

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.answers, server.seen, server.release = [], [], threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(http_utils, "_FIRST_DELAY_S", 0.001)
    init_http_client(engines(8))
    yield server
    server.shutdown()
    server.server_close()


def engines(concurrency: int, gpus: int = 1) -> SimpleNamespace:
    return SimpleNamespace(sglang_server_concurrency=concurrency, rollout_num_gpus=gpus, rollout_num_gpus_per_engine=1)


def url(server: Server, path: str = "/generate") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{path}"


async def test_post_sends_json_and_headers_and_decodes(server: Server) -> None:
    answer = await post(url(server), {"ids": np.arange(3), 1: "x"}, headers={"X-Key": "k"})
    assert answer == {"echo": {"ids": [0, 1, 2], "1": "x"}}
    assert server.seen[0][2] == "k"
    assert await post(url(server), None) == {"echo": {}}


async def test_answers_that_are_no_json_come_back_as_text(server: Server) -> None:
    server.answers = [(200, "Cache flushed.")]
    assert await post(url(server), {}) == "Cache flushed."


@pytest.mark.parametrize("status", [500, 503, 408, 429])
async def test_transient_errors_are_retried(server: Server, status: int) -> None:
    server.answers = [(status, "busy")] * 2
    assert await post(url(server), {"a": 1}) == {"echo": {"a": 1}}
    assert len(server.seen) == 3


async def test_client_errors_are_raised_at_once_with_the_body(server: Server) -> None:
    server.answers = [(400, "input is longer than the context")] * 2
    with pytest.raises(httpx.HTTPStatusError, match="answered 400: input is longer than the context"):
        await post(url(server), {})
    assert len(server.seen) == 1


@pytest.mark.parametrize(("max_retries", "attempts"), [(0, 1), (1, 1), (3, 3)])
async def test_max_retries_bounds_the_attempts(server: Server, max_retries: int, attempts: int) -> None:
    server.answers = [(500, "broken")] * 9
    with pytest.raises(httpx.HTTPStatusError, match="broken"):
        await post(url(server), {}, max_retries=max_retries)
    assert len(server.seen) == attempts


async def test_refused_connection_is_retried_then_raised(server: Server) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(httpx.ConnectError):
            await post(f"http://127.0.0.1:{unused.getsockname()[1]}/", {}, max_retries=2)


async def test_get_is_not_retried(server: Server) -> None:
    server.answers = [(500, "broken")]
    with pytest.raises(httpx.HTTPStatusError):
        await get(url(server))
    assert await get(url(server)) == {"got": 1}


async def test_connection_limit_holds_and_abort_overtakes(server: Server) -> None:
    init_http_client(engines(1, gpus=2))
    slow = [asyncio.create_task(post(url(server, "/slow"), {"i": i})) for i in range(6)]
    while server.active < 2:
        await asyncio.sleep(0.01)
    await post(url(server, "/abort_request"), {"abort_all": True})
    assert sum(task.done() for task in slow) == 0
    server.release.set()
    assert len(await asyncio.gather(*slow)) == 6
    assert server.peak <= 3  # two generations and the abort


def test_posts_from_several_event_loops(server: Server) -> None:
    results = []

    def work() -> None:
        results.append(asyncio.run(post(url(server), {"a": 1})))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert results == [{"echo": {"a": 1}}] * 4


async def test_post_before_init_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_utils, "_max_connections", None)
    http_utils._clients.clear()
    init_http_client(engines(8, gpus=0))
    with pytest.raises(RuntimeError, match="call init_http_client"):
        await post("http://127.0.0.1:1/", {})


def test_num_engines() -> None:
    args = SimpleNamespace(rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert http_utils.get_rollout_num_engines(args) == 2
    args.rollout_num_engines = 7
    assert http_utils.get_rollout_num_engines(args) == 7
    assert http_utils.get_rollout_num_engines(engines(1, gpus=0)) == 0


def test_back_off_grows_and_is_capped() -> None:
    assert max(http_utils._back_off(1) for _ in range(50)) <= 0.1
    assert all(0.5 <= http_utils._back_off(k) <= 1.0 for k in (6, 60, 6000))


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not http_utils.is_port_available(port)
        free = http_utils.find_available_port(port)
    assert free > port and http_utils.is_port_available(free)
    assert not http_utils.is_port_available(70000)


def test_host_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.2.3")
    assert http_utils.get_host_info() == (socket.gethostname(), "10.1.2.3")
    monkeypatch.delenv("SLIME_HOST_IP")
    socket.inet_aton(http_utils.get_host_info()[1])


@pytest.mark.parametrize(
    ("host", "wrapped"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("node-1", "node-1")],
)
def test_wrap_ipv6(host: str, wrapped: str) -> None:
    assert http_utils._wrap_ipv6(host) == wrapped
