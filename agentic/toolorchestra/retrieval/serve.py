"""Run the retrieval service: `python -m agentic.toolorchestra.retrieval.serve --port 8000 --corpus FILE | --index DIR`.

With `--corpus` the index is built first unless it exists (in `--index`, or beside the corpus as `FILE.index`).
Invariants: the port is taken before anything is loaded, so a used one is an error at once, but answers only when the
first query can be; the address is the loopback one unless another is asked for; only flags, never the environment,
decide (except the variables that flags name).
Leaves out: tau2's own server has the same usual port: do not run both on 8000.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Read when the libraries below are loaded: threads that spin while they wait for each other are worth having only on
    # processors that nobody else uses, and ruinous on others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import uvicorn

from agentic.common.command_line import Parser, positive
from agentic.common.errors import ConfigError
from agentic.toolorchestra.retrieval.build import add_embedder_flags, build_index, embedder_settings, run_program
from agentic.toolorchestra.retrieval.embedding import Embedder, load_embedder
from agentic.toolorchestra.retrieval.index import Metadata, VectorIndex
from agentic.toolorchestra.retrieval.service import Retriever, Service, ServiceSettings, load_eid_lists

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BACKLOG = 2048


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.toolorchestra.retrieval.serve", description="Serve a retrieval index.")
    add, defaults = parser.add_argument, ServiceSettings()
    add("--corpus", type=Path, help="JSON Lines with `content` or `contents`; builds the index if there is none")
    add("--index", type=Path, metavar="DIR", help="index folder (default: FILE.index beside the corpus)")
    add_embedder_flags(parser, None, "default: that of the index, or minilm for a new one")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--api-key-env", metavar="NAME", help="environment variable with the key that callers must send")
    add("--api-key-file", type=Path, metavar="FILE", help="file with that key")
    add("--eid-lists", type=Path, metavar="FILE", help="JSON object: the passage ids that each eid may see")
    add("--topk", type=positive, default=defaults.topk, help="hits if a request names no topk (default: %(default)s)")
    add("--max-topk", type=positive, default=defaults.max_topk, help="largest topk (default: %(default)s)")
    add("--min-score", type=float, help="drop hits whose cosine is not above (default: keep all)")
    add("--query-prefix", metavar="TEXT", help="text before every query (default: the model's own query prompt)")
    add("--max-batch", type=positive, default=defaults.max_batch, help="queries at once (default: %(default)s)")
    add("--window-ms", type=float, default=defaults.window_ms, help="wait for further queries (default: %(default)s)")
    add("--max-queue", type=positive, default=defaults.max_queue, help="waiting queries (default: %(default)s)")
    add("--request-timeout-s", type=float, default=defaults.request_timeout_s, help="default: %(default)s")
    args = parser.parse_args(argv)
    check_args(args)
    return args


def check_args(args: Namespace) -> None:
    """Raise ConfigError for flags that do not fit together."""
    if args.corpus is None and args.index is None:
        raise ConfigError("give --corpus FILE (to build or find its index) or --index DIR")
    if args.corpus is None and (args.min_text_chars or args.faiss_index):
        raise ConfigError("--min-text-chars and --faiss-index are for building: give --corpus FILE as well")
    if args.api_key_env and args.api_key_file:
        raise ConfigError("--api-key-env and --api-key-file: give one of them")
    if not 0 < args.port < 65536:
        raise ConfigError(f"--port {args.port}: must be from 1 to 65535")
    if args.window_ms < 0 or args.request_timeout_s <= 0:
        raise ConfigError("--window-ms must be at least 0 and --request-timeout-s above 0")
    if args.max_queue < args.max_batch:
        raise ConfigError(f"--max-queue {args.max_queue}: must be at least --max-batch ({args.max_batch})")
    if args.topk > args.max_topk:
        raise ConfigError(f"--topk {args.topk}: must not exceed --max-topk ({args.max_topk})")


def service_settings(args: Namespace) -> ServiceSettings:
    return ServiceSettings(
        topk=args.topk,
        max_topk=args.max_topk,
        min_score=args.min_score,
        query_prefix=args.query_prefix,
        max_batch=args.max_batch,
        window_ms=args.window_ms,
        max_queue=args.max_queue,
        request_timeout_s=args.request_timeout_s,
    )


def read_key(args: Namespace) -> str | None:
    """The key of the service; raises when a flag names a place that has none."""
    if args.api_key_env:
        key, place = os.environ.get(args.api_key_env, ""), f"--api-key-env {args.api_key_env}"
    elif args.api_key_file:
        if not args.api_key_file.is_file():
            raise FileNotFoundError(f"--api-key-file {args.api_key_file}: no such file")
        key, place = args.api_key_file.read_text(encoding="utf-8"), f"--api-key-file {args.api_key_file}"
    else:
        return None
    if not key.strip():
        raise ConfigError(f"{place}: holds no key; an empty one would let everybody in")
    return key.strip()


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        raise ConfigError(f"--port {port} on {host} {reason}; choose another --port or --host") from error
    return taken


def load_retriever(args: Namespace, settings: ServiceSettings) -> Retriever:
    """Open the index, building it first when a corpus is given and it does not exist."""
    folder = args.index or args.corpus.with_name(args.corpus.name + ".index")
    _choose_embedder(args, folder)
    embedder: Embedder = load_embedder(embedder_settings(args))
    if args.corpus is not None:
        wanted = embedder_settings(args)
        build_index(args.corpus, folder, wanted, args.min_text_chars, args.faiss_index, embedder)
    return Retriever(VectorIndex(folder), embedder, settings)


def _choose_embedder(args: Namespace, folder: Path) -> None:
    """Without --embedder: that of the existing index, or minilm for a new one."""
    if args.embedder is not None:
        return
    if args.corpus is not None and not folder.exists():
        args.embedder = "minilm"
        return
    metadata = Metadata.load(folder)
    args.embedder = metadata.embedder
    args.embedder_dtype = metadata.embedder_dtype
    args.embedding_model = args.embedding_model or metadata.embedding_model


def serve(service: Service, listening: socket.socket) -> None:
    """Answer until a stop signal; requests that were taken are finished."""
    config = uvicorn.Config(
        service.app,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        proxy_headers=False,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    key = read_key(args)
    listening = take_port(args.host, args.port)
    settings = service_settings(args)
    retriever = load_retriever(args, settings)
    lists = load_eid_lists(args.eid_lists, retriever.index) if args.eid_lists else None
    if key is None and args.host not in LOOPBACK:
        logger.warning("--host %s without a key: everybody who reaches port %d can search", args.host, args.port)
    retriever.embedder.encode(["warm up"])
    logger.info("%d passages on http://%s:%d", len(retriever.index.documents), args.host, args.port)
    serve(Service(retriever, settings, lists, key), listening)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
