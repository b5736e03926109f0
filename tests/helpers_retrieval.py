"""A fast stand-in for the embedding model, small corpora, and a running retrieval service, for tests."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from agentic.toolorchestra.retrieval.build import build_index
from agentic.toolorchestra.retrieval.embedding import EmbedderSettings
from agentic.toolorchestra.retrieval.index import VectorIndex, unit
from agentic.toolorchestra.retrieval.serve import take_port
from agentic.toolorchestra.retrieval.service import Retriever, Service, ServiceSettings

WORDS = EmbedderSettings(embedder="words")


class WordEmbedder:
    """Each word has a random vector, a text their mean: texts that share words are near. Records its calls."""

    name, query_prompt = "words", ""

    def __init__(self, dimension: int = 16, delay_s: float = 0.0) -> None:
        self.dimension, self.delay_s = dimension, delay_s
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.calls.append(list(texts))
        time.sleep(self.delay_s)
        rows = [sum((self._word(word) for word in text.lower().split()), np.zeros(self.dimension)) for text in texts]
        return unit(np.array(rows, dtype=np.float32).reshape(len(texts), self.dimension))

    def _word(self, word: str) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(word.strip(".,?").encode())).standard_normal(self.dimension)


PASSAGES: list[dict[str, Any]] = [
    {"id": "paris", "content": "Paris is the capital of France."},
    {"id": "berlin", "contents": "Berlin is the capital of Germany.", "title": "Berlin"},
    {"id": 7, "content": "Plants turn light into sugar."},
    {"id": "rome", "content": "Rome is the capital of Italy."},
]


def write_corpus(path: Path, passages: Sequence[dict[str, Any]] = PASSAGES) -> Path:
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages), encoding="utf-8")
    return path


def make_index(folder: Path, passages: Sequence[dict[str, Any]] = PASSAGES, **settings: Any) -> VectorIndex:
    corpus = write_corpus(folder / "corpus.jsonl", passages)
    build_index(corpus, folder / "index", WORDS, embedder=settings.pop("embedder", WordEmbedder()), **settings)
    return VectorIndex(folder / "index")


@contextmanager
def running(
    index: VectorIndex, settings: ServiceSettings | None = None, embedder: Any = None, **more: Any
) -> Iterator[tuple[str, Service]]:
    """(URL, service) of a real HTTP server in a thread."""
    settings = settings or ServiceSettings()
    service = Service(Retriever(index, embedder or WordEmbedder(), settings), settings, **more)
    listening = take_port("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(service.app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()
