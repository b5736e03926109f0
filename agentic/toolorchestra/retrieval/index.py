"""The index: exact cosine neighbours of query vectors, found by FAISS and ordered by us.

Legend: N passages, D dimensions, Q queries, K wanted hits. Vectors are float32 of length 1, so the inner product is the
cosine; they lie in `vectors.faiss` (a flat FAISS index), mapped into memory when opened.
Invariants:
* hits equal those of a brute-force search: cosines in float64, rounded to 6 digits, descending, equal ones by id.
  FAISS only proposes candidates; whenever its float32 error could have hidden a better one, all vectors are scanned;
* so an answer does not depend on which other queries were in the batch;
* batches of 4 and more take FAISS's matrix product, which reads the vectors once for the batch, not once per query
  (the builds of FAISS have limits of their own, up to 128,000; it is a setting of the process).
Leaves out: approximate indexes, writing (`build`), and texts of queries (`embedding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import orjson

from agentic.common.errors import ConfigError
from agentic.toolorchestra.retrieval.corpus import ID_RANK, DocumentStore

METADATA, VECTORS = "metadata.json", "vectors.faiss"
FORMAT = 1
DIGITS = 6
# Below, one scan per query is faster than the matrix product. FAISS compares queries x dimension with its limit.
GEMM_FROM = 4
THREADS = faiss.omp_get_max_threads()
# Several threads share the scan of one query by another routine, which takes about 2.5 times the processor time.
SHARED_SCAN_THREADS = 4
EXTRA_CANDIDATES = 16
SCAN_ROWS = 4096


@dataclass(frozen=True)
class Metadata:
    """What an index was made of; equal fields mean an equal index."""

    documents: int
    dimension: int
    left_out: int
    """Passages that were too short."""
    min_text_chars: int
    embedder: str
    """`minilm`, a sentence-transformers path or the URL of an embedding service, as given to `build`."""
    embedding_model: str
    """Name of the model, for a URL the one that is asked for."""
    embedder_dtype: str
    vectors_from: str
    """`embedder`, or the sha256 of the FAISS file they were taken from."""
    corpus_sha256: str
    corpus: str
    """File name of the corpus (not compared)."""
    dtype: str = "float32"
    metric: str = "cosine"
    format: int = FORMAT

    @classmethod
    def load(cls, folder: Path) -> Metadata:
        """Raises FileNotFoundError (no index) or ConfigError (another format)."""
        path = folder / METADATA
        if not path.is_file():
            raise FileNotFoundError(f"{folder}: no index there ({METADATA} is missing); build it with --corpus FILE")
        try:
            data = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON ({error}); remove the folder and build again") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names or data["format"] != FORMAT:
            raise ConfigError(f"{path}: not of format {FORMAT}; remove the folder and build again")
        return cls(**data)

    def save(self, folder: Path) -> None:
        (folder / METADATA).write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2) + b"\n")

    def settings(self) -> dict[str, Any]:
        """What was asked for, without what came out of it."""
        return {k: v for k, v in asdict(self).items() if k not in ("documents", "left_out", "corpus")}


class Hits(NamedTuple):
    """Neighbours of one query: rows (int64) and cosines (float64), best first."""

    rows: np.ndarray
    scores: np.ndarray


def unit(vectors: np.ndarray) -> np.ndarray:
    """Float32 rows of length 1 (a zero row stays zero). Raises ValueError for numbers that are not finite."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError("vectors with NaN or infinite numbers; the embedding model is broken or its dtype too narrow")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1.0)


def vectors_of(index: Any) -> np.ndarray:
    """The vectors of a flat FAISS index, N x D, without a copy and not to be written to."""
    count = index.ntotal * index.d
    if count == 0:
        return np.empty((0, index.d), dtype=np.float32)
    view = faiss.rev_swig_ptr(index.get_xb(), count).reshape(index.ntotal, index.d)
    view.flags.writeable = False
    return view


def read_flat(path: Path) -> Any:
    """A flat FAISS index, mapped into memory. Raises ConfigError for a file that is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such FAISS index")
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(f"{path}: FAISS cannot read it ({reason}); is the file complete?") from error
    if not isinstance(index, faiss.IndexFlat):
        raise ConfigError(f"{path}: {type(index).__name__} holds no plain vectors; only flat indexes can be used")
    return index


def _tune(queries: int, dimension: int) -> None:
    """FAISS's settings, which belong to the process and to the calling thread, for a batch of this size."""
    faiss.cvar.distance_compute_blas_threshold = GEMM_FROM * dimension
    alone = queries < GEMM_FROM and THREADS < SHARED_SCAN_THREADS
    faiss.omp_set_num_threads(1 if alone else THREADS)


class VectorIndex:
    """An opened index folder. `search` is for one thread at a time; nothing of the folder is read ahead."""

    def __init__(self, folder: str | Path) -> None:
        """Raises FileNotFoundError, ConfigError."""
        self.folder = Path(folder)
        self.metadata = Metadata.load(self.folder)
        self.documents = DocumentStore(self.folder)
        self._id_rank = np.load(self.folder / ID_RANK, mmap_mode="r").view(np.ndarray)
        self._index = read_flat(self.folder / VECTORS)
        self.vectors = vectors_of(self._index)
        sizes = {len(self.documents), len(self._id_rank), self._index.ntotal, self.metadata.documents}
        if len(sizes) != 1 or self._index.d != self.metadata.dimension:
            raise ConfigError(f"{self.folder}: its files are of different indexes; remove the folder and build again")
        # Largest error of FAISS's float32 sums of D products of unit vectors, and of our rounding.
        self._error = self.dimension * 2.0**-24 + 10.0**-DIGITS

    @property
    def dimension(self) -> int:
        return self.metadata.dimension

    def search(
        self, queries_QD: np.ndarray, topks: Sequence[int], visible: Sequence[np.ndarray | None] | None = None
    ) -> list[Hits]:
        """The `topks[q]` best hits of each query (float32, Q x D, length 1), fewer when there are fewer passages.

        `visible[q]` (int64 rows, or None for all) limits a query to these passages.
        """
        limits = visible if visible is not None else [None] * len(topks)
        hits: list[Hits | None] = [
            None if rows is None else self._scan(query, topk, rows)
            for query, topk, rows in zip(queries_QD, topks, limits, strict=True)
        ]
        open_ = [number for number, found in enumerate(hits) if found is None]
        for number, found in zip(open_, self._search_all(queries_QD[open_], [topks[n] for n in open_]), strict=True):
            hits[number] = found
        return [found for found in hits if found is not None]

    def _search_all(self, queries_QD: np.ndarray, topks: Sequence[int]) -> list[Hits]:
        total = self._index.ntotal
        if not topks or total == 0:
            return [Hits(np.empty(0, np.int64), np.empty(0)) for _ in topks]
        candidates = min(total, 2 * max(topks) + EXTRA_CANDIDATES)
        _tune(len(topks), self.dimension)
        scores_QC, rows_QC = self._index.search(np.ascontiguousarray(queries_QD), candidates)
        found = zip(queries_QD, topks, scores_QC[:, -1], rows_QC, strict=True)
        return [self._choose(query, topk, worst, rows) for query, topk, worst, rows in found]

    def _choose(self, query_D: np.ndarray, topk: int, worst: float, rows: np.ndarray) -> Hits:
        """The best of FAISS's candidates, whose last one it gave the score `worst`."""
        hits = self._best(rows, self._cosines(query_D, rows), topk)
        complete = len(rows) == self._index.ntotal
        if complete or hits.scores[-1] > worst + self._error:
            return hits
        return self._scan(query_D, topk, np.arange(self._index.ntotal))

    def _scan(self, query_D: np.ndarray, topk: int, rows: np.ndarray) -> Hits:
        """The best of `rows`, by looking at each of them."""
        parts = [self._cosines(query_D, rows[at : at + SCAN_ROWS]) for at in range(0, len(rows), SCAN_ROWS)]
        scores = np.concatenate(parts) if parts else np.empty(0)
        if len(rows) > topk:
            enough = scores >= np.partition(scores, -topk)[-topk]
            rows, scores = rows[enough], scores[enough]
        return self._best(rows, scores, topk)

    def _cosines(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # einsum sums each row alone and in one order; a matrix product's sums depend on how many rows there are.
        products = np.einsum("nd,d->n", self.vectors[rows].astype(np.float64), query_D.astype(np.float64))
        return np.round(products, DIGITS)

    def _best(self, rows: np.ndarray, scores: np.ndarray, topk: int) -> Hits:
        order = np.lexsort((self._id_rank[rows], -scores))[:topk]
        return Hits(rows[order], scores[order])
