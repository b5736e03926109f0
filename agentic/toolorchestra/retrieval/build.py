"""Build an index folder from a corpus: `python -m agentic.toolorchestra.retrieval.build --corpus FILE --output DIR`.

Inputs: a JSON Lines corpus (`corpus`) and an embedder (`embedding`), or a flat FAISS file that holds the vectors already.
Invariants: DIR appears complete or not at all; what a stopped build has embedded is kept in `.DIR.partial` beside it and
used by the next build with the same settings, which gives the same vectors; a folder that holds another index is never
overwritten; one build at a time. There is no randomness, so there is no seed.
Leaves out: approximate indexes; the vectors must fit into memory once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import orjson

from agentic.common.command_line import Parser
from agentic.common.errors import AgenticError, ConfigError
from agentic.toolorchestra.retrieval.corpus import DocumentStore, file_hash, write_documents
from agentic.toolorchestra.retrieval.embedding import DTYPES, Embedder, EmbedderSettings, load_embedder
from agentic.toolorchestra.retrieval.index import METADATA, VECTORS, Metadata, read_flat, unit, vectors_of

logger = logging.getLogger(__name__)

SETTINGS, RAW_VECTORS = "settings.json", "vectors.f32"
# Passages between two writes; sorted by length inside, so the number also decides how much is padded.
SHARD = 1024
REPORT_S = 10.0
Vectors = Callable[[int, int], np.ndarray]


def build_index(
    corpus: Path,
    output: Path,
    settings: EmbedderSettings,
    min_text_chars: int = 0,
    faiss_file: Path | None = None,
    embedder: Embedder | None = None,
) -> Metadata:
    """Make the index, or return at once when `output` holds the one that is asked for.

    `embedder` is loaded from `settings` unless it is given. Raises FileNotFoundError, ConfigError (a wrong line, a folder
    in the way), or the InfrastructureError of an embedding service.
    """
    corpus_hash = file_hash(corpus)
    vectors_from = "embedder" if faiss_file is None else file_hash(faiss_file)
    embedder = embedder or load_embedder(settings)
    wanted = Metadata(
        documents=0,
        dimension=embedder.dimension,
        left_out=0,
        min_text_chars=min_text_chars,
        embedder=settings.embedder,
        embedding_model=embedder.name,
        embedder_dtype=settings.dtype,
        vectors_from=vectors_from,
        corpus_sha256=corpus_hash,
        corpus=corpus.name,
    )
    present = _present(output, wanted)
    if present is not None:
        logger.info("%s: up to date, %d passages", output, present.documents)
        return present
    with _partial_folder(output) as partial:
        metadata = _fill(partial, corpus, wanted, embedder, faiss_file)
        partial.rename(output)
    logger.info("%s: %d passages, %d left out", output, metadata.documents, metadata.left_out)
    return metadata


def _present(output: Path, wanted: Metadata) -> Metadata | None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / METADATA).is_file():
        raise ConfigError(f"{output}: exists and holds no index; choose another folder")
    present = Metadata.load(output)
    found, asked = present.settings(), wanted.settings()
    for key, value in asked.items():
        if found[key] != value:
            raise ConfigError(
                f"{output}: holds an index with {key} {found[key]}, asked for is {value}; "
                "remove the folder or choose another one"
            )
    return present


@contextmanager
def _partial_folder(output: Path) -> Iterator[Path]:
    """The folder of the unfinished index, locked against a second build."""
    partial = output.with_name(f".{output.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, output)
        yield partial
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{output}: another process is building it; wait for that one") from error


def _fill(partial: Path, corpus: Path, wanted: Metadata, embedder: Embedder, faiss_file: Path | None) -> Metadata:
    _keep_or_clear(partial, wanted)
    summary = write_documents(corpus, partial, wanted.min_text_chars)
    vectors = _made_vectors(DocumentStore(partial), embedder)
    if faiss_file is not None:
        vectors = _given_vectors(faiss_file, summary.kept_rows, summary.left_out, wanted.dimension)
    _write_raw(partial / RAW_VECTORS, vectors, summary.documents, wanted.dimension)
    _write_faiss(partial, summary.documents, wanted.dimension)
    metadata = replace(wanted, documents=summary.documents, left_out=summary.left_out)
    metadata.save(partial)
    for name in (RAW_VECTORS, SETTINGS):
        (partial / name).unlink()
    return metadata


def _keep_or_clear(partial: Path, wanted: Metadata) -> None:
    """Drop vectors that an earlier build with other settings left."""
    settings = orjson.dumps(wanted.settings())
    path = partial / SETTINGS
    if not path.is_file() or path.read_bytes() != settings:
        (partial / RAW_VECTORS).unlink(missing_ok=True)
        path.write_bytes(settings)


def _made_vectors(store: DocumentStore, embedder: Embedder) -> Vectors:
    return lambda start, stop: embedder.encode([store.text(row) for row in range(start, stop)])


def _given_vectors(path: Path, kept_rows: np.ndarray, left_out: int, dimension: int) -> Vectors:
    index = read_flat(path)
    passages = len(kept_rows) + left_out
    if (index.ntotal, index.d) != (passages, dimension):
        raise ConfigError(
            f"--faiss-index {path}: {index.ntotal} vectors of dimension {index.d}, but the corpus has {passages} "
            f"passages and the embedder dimension {dimension}; use the corpus and the model it was made of"
        )
    # The view does not keep the index alive; the function does.
    return lambda start, stop: unit(vectors_of(index)[kept_rows[start:stop]])


def _write_raw(path: Path, vectors: Vectors, count: int, dimension: int) -> None:
    """Append float32 rows in whole shards, beginning after those that are there."""
    shard_bytes = SHARD * dimension * 4
    with path.open("ab") as file:
        done = file.tell() // shard_bytes * SHARD
        file.truncate(done * dimension * 4)
        progress = _Progress(done, count)
        for start in range(done, count, SHARD):
            stop = min(start + SHARD, count)
            file.write(vectors(start, stop).tobytes())
            file.flush()
            progress.report(stop)


class _Progress:
    """A line in the log every few seconds."""

    def __init__(self, done: int, total: int) -> None:
        self.first, self.total = done, total
        self.start = self.last = time.monotonic()
        if done:
            logger.info("continuing at passage %d of %d", done, total)

    def report(self, done: int) -> None:
        now = time.monotonic()
        if now - self.last < REPORT_S and done < self.total:
            return
        self.last = now
        rate = (done - self.first) / max(now - self.start, 1e-9)
        share, left = 100 * done / self.total, (self.total - done) / rate
        logger.info("%d of %d passages (%.1f%%), %.0f/s, %.0f s left", done, self.total, share, rate, left)


def _write_faiss(partial: Path, count: int, dimension: int) -> None:
    index = faiss.IndexFlatIP(dimension)
    if count:
        raw = np.memmap(partial / RAW_VECTORS, dtype=np.float32, mode="r", shape=(count, dimension))
        index.add(raw)
    faiss.write_index(index, str(partial / VECTORS))


# --------------------------------------------------------------------------------------------------------------------
# Command line.


def add_embedder_flags(parser: Parser, default: str | None, origin: str) -> None:
    """The flags that `build` and `serve` share; `origin` says where an omitted --embedder comes from."""
    add = parser.add_argument
    add("--embedder", default=default, help=f"minilm, a sentence-transformers folder, or a service's URL ({origin})")
    add("--embedding-model", default="", help="name of the model, for a service")
    add("--embedding-api-key-env", metavar="NAME", help="environment variable with the service's bearer token")
    add("--embedder-dtype", choices=DTYPES, default="float32", help="numbers of a model in this process")
    add("--device", default="cpu", help="device of a model in this process, such as cuda:0")
    add("--min-text-chars", type=int, default=0, metavar="N", help="leave out passages of at most N characters")
    add("--faiss-index", type=Path, metavar="FILE", help="take the vectors from this flat FAISS index")


def embedder_settings(args: Namespace) -> EmbedderSettings:
    return EmbedderSettings(
        embedder=args.embedder,
        model=args.embedding_model,
        dtype=args.embedder_dtype,
        device=args.device,
        api_key_env=args.embedding_api_key_env,
    )


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.toolorchestra.retrieval.build", description="Build a retrieval index.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON Lines with `content` or `contents`")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    add_embedder_flags(parser, "minilm", "default: minilm")
    return parser.parse_args(argv)


def run_program(main: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> int:
    """Exit code of a program: 2 and one line for a wrong command line or input, 1 for a service that failed."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("agentic", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        main(argv)
    except (ConfigError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except AgenticError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    build_index(args.corpus, args.output, embedder_settings(args), args.min_text_chars, args.faiss_index)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
