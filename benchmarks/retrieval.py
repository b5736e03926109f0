"""The retrieval service under load: `python benchmarks/retrieval.py {throughput,clients,open,exact} [--help]`.

Each mode prints one JSON line.
* throughput: queries per second of 64 clients (`ours`) and of the same service and load with one search per request
  (`anchor`), measured in turns A B A B; `ratio` is the median over the rounds and `spread` the least and the greatest;
  `limit` is what FAISS alone does in batches of 64 in the same run. `cpu_ms` is the processor time of
  the whole service for one query, which says more than the clock on a machine with other work.
* clients: 512 clients at once, three requests each; `ours` is the number of errors.
* open: seconds until an index answers its first query, `ours` the median in fresh processes (imports excluded);
  `limit` reads the same bytes from the file.
* exact: queries whose ids, order or scores differ from a brute-force search in float64, over a corpus with many equal
  passages.
The corpus is made up; with `--embedder table` (default) a query's vector costs nothing, so that the search is measured;
`--embedder minilm` embeds the queries with the real model. The clients run on the same machine.
Left out: GPUs and remote embedding services, which are not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `serve` does
# The anchors are one thread; read when the libraries below are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp
import numpy as np

from agentic.toolorchestra.retrieval.build import build_index
from agentic.toolorchestra.retrieval.embedding import EmbedderSettings, load_embedder
from agentic.toolorchestra.retrieval.index import VectorIndex, unit
from agentic.toolorchestra.retrieval.serve import serve, take_port
from agentic.toolorchestra.retrieval.service import Retriever, Service, ServiceSettings

TOPK = 10


class TableEmbedder:
    """A fixed vector for every text, made from its checksum. Texts that differ in a `#copy` only are equal."""

    name, query_prompt = "table", ""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        seeds = (zlib.crc32(text.partition("#")[0].encode()) for text in texts)
        rows = [np.random.default_rng(seed).standard_normal(self.dimension, dtype=np.float32) for seed in seeds]
        return unit(np.array(rows).reshape(len(texts), self.dimension))


class QueryEmbedder(TableEmbedder):
    """Passages have table vectors (embedding 100,000 texts takes minutes), queries those of the real model."""

    name = "minilm for queries"

    def __init__(self) -> None:
        self._model = load_embedder(EmbedderSettings())
        super().__init__(self._model.dimension)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        passages = all(text.startswith("passage") for text in texts)
        return super().encode(texts) if passages else self._model.encode(texts)


def embedder_of(args: argparse.Namespace) -> TableEmbedder:
    return QueryEmbedder() if args.embedder == "minilm" else TableEmbedder(args.dimension)


def make_index(folder: Path, args: argparse.Namespace, copies: int = 1) -> Path:
    """An index of `--passages` passages; each text occurs `copies` times."""
    corpus, index = folder / "corpus.jsonl", folder / "index"
    dimension = 384 if args.embedder == "minilm" else args.dimension
    with corpus.open("w") as file:
        for number in range(args.passages):
            text = f"passage {number // copies} of the corpus#{number % copies}"
            file.write(json.dumps({"id": f"p{number * 7919 % args.passages}", "content": text}) + "\n")
    build_index(corpus, index, EmbedderSettings("table"), embedder=TableEmbedder(dimension))
    return index


# --------------------------------------------------------------------------------------------------------------------
# Servers and clients.


def run_server(args: argparse.Namespace) -> None:
    settings = ServiceSettings(max_batch=args.max_batch, request_timeout_s=120.0)
    retriever = Retriever(VectorIndex(args.folder), embedder_of(args), settings)
    serve(Service(retriever, settings), take_port("127.0.0.1", args.port))


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(args: argparse.Namespace, folder: Path, max_batch: int) -> Iterator[Server]:
    """A service in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "server", "--folder", str(folder), "--port", str(port)]
    command += ["--max-batch", str(max_batch), "--embedder", args.embedder, "--dimension", str(args.dimension)]
    process = subprocess.Popen(command)
    try:
        started = Server(f"http://127.0.0.1:{port}", process.pid)
        asyncio.run(wait_ready(started.url, process))
        yield started
    finally:
        process.terminate()
        process.wait()


async def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
    raise RuntimeError("the service ended before it was ready")


class Load:
    """Clients that each send one query after the other; counts answers and what went wrong."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.number = 0

    async def client(self, session: aiohttp.ClientSession, until: float, requests: int) -> None:
        while requests > 0 and time.perf_counter() < until:
            requests -= 1
            self.number += 1
            query = f"who wrote book {self.number} about the history of town {self.number * 31 % 977}"
            start = time.perf_counter()
            self.outcomes[await self.ask(session, query)] += 1
            self.latencies.append(time.perf_counter() - start)

    async def ask(self, session: aiohttp.ClientSession, query: str) -> str:
        body = {"queries": [query], "topk": TOPK, "return_scores": True}
        try:
            async with session.post(f"{self.url}/retrieve", json=body) as answer:
                hits = await answer.json(content_type=None)
                right = answer.status == 200 and len(hits) == 1 and len(hits[0]) == TOPK
                return "ok" if right else f"HTTP {answer.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return type(error).__name__

    async def run(self, clients: int, seconds: float, requests: int) -> float:
        """Answers per second."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
            start = time.perf_counter()
            await asyncio.gather(*(self.client(session, start + seconds, requests) for _ in range(clients)))
            return self.outcomes["ok"] / (time.perf_counter() - start)


class Rate(NamedTuple):
    qps: float
    cpu_ms: float
    """Processor time of the service for one query."""


def measure(server: Server, clients: int, seconds: float) -> Rate:
    load, before = Load(server.url), server.cpu_seconds()
    rate = asyncio.run(load.run(clients, seconds, 10**9))
    if set(load.outcomes) != {"ok"}:
        raise RuntimeError(f"requests failed: {dict(load.outcomes)}")
    return Rate(rate, 1e3 * (server.cpu_seconds() - before) / load.outcomes["ok"])


def median(values: Iterable[float], digits: int = 2) -> float:
    return round(statistics.median(values), digits)


def health(url: str) -> dict[str, Any]:
    async def get() -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
            return await answer.json()

    return asyncio.run(get())


# --------------------------------------------------------------------------------------------------------------------
# Modes.


def throughput(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    index = make_index(folder, args)
    ours: list[Rate] = []
    anchor: list[Rate] = []
    with server(args, index, 128) as batched, server(args, index, 1) as single:
        for service in (batched, single):
            measure(service, 8, 1.0)
        for _ in range(args.rounds):
            ours.append(measure(batched, args.clients, args.seconds))
            anchor.append(measure(single, args.clients, args.seconds))
        counters = health(batched.url)["counters"]
        limit = raw_faiss(index)
    ratios = [a.qps / b.qps for a, b in zip(ours, anchor, strict=True)]
    cpu = {name: median(rate.cpu_ms for rate in rates) for name, rates in (("ours", ours), ("anchor", anchor))}
    return {
        "metric": f"retrieval_qps_{args.clients}_clients",
        "ours": median(rate.qps for rate in ours),
        "anchor": median(rate.qps for rate in anchor),
        "limit": round(limit, 1),
        "ratio": median(ratios),
        "n": args.rounds,
        "spread": [round(min(ratios), 2), round(max(ratios), 2)],
        "cpu_ms": cpu | {"ratio": round(cpu["anchor"] / cpu["ours"], 2)},
        "mean_batch": round(counters["items"] / counters["batches"], 1),
    }


def raw_faiss(folder: Path) -> float:
    """Queries per second of FAISS alone in batches of 64, best of three."""
    index = VectorIndex(folder)
    queries = TableEmbedder(index.dimension).encode([f"query {number}" for number in range(64)])
    index.search(queries, [TOPK] * len(queries))  # chooses FAISS's matrix product and brings the vectors into memory
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        index._index.search(queries, TOPK)
        seconds.append(time.perf_counter() - start)
    return len(queries) / min(seconds)


def clients(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with server(args, make_index(folder, args), 128) as service:
        load = Load(service.url)
        rate = asyncio.run(load.run(args.clients, 600.0, 3))
        largest = health(service.url)["counters"]["largest_batch"]
    errors = sum(load.outcomes.values()) - load.outcomes["ok"]
    ordered = sorted(load.latencies)
    return {
        "metric": f"retrieval_errors_{args.clients}_clients",
        "ours": errors,
        "anchor": None,
        "limit": 0,
        "ratio": None,
        "n": sum(load.outcomes.values()),
        "spread": [round(ordered[int(len(ordered) * share)], 2) for share in (0.05, 0.95)],
        "spread_is": "seconds of an answer, 5th and 95th percentile",
        "qps": round(rate, 1),
        "largest_batch": largest,
        "outcomes": dict(load.outcomes),
    }


_OPEN = """import sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from agentic.toolorchestra.retrieval.index import VectorIndex
start = time.perf_counter()
index = VectorIndex(sys.argv[2])
hits = index.search(np.eye(1, index.dimension, dtype=np.float32), [10])
index.documents.raw(int(hits[0].rows[0]))
print(time.perf_counter() - start)
"""


def open_index(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    index = make_index(folder, args)
    seconds, reads = [], []
    for _ in range(args.rounds):
        ran = subprocess.run([sys.executable, "-c", _OPEN, ROOT, index], capture_output=True, text=True, check=True)
        seconds.append(float(ran.stdout))
        start = time.perf_counter()
        (index / "vectors.faiss").read_bytes()
        reads.append(time.perf_counter() - start)
    ours, limit = median(seconds, 6), median(reads, 6)
    return {
        "metric": f"retrieval_open_{args.passages}_seconds",
        "ours": round(ours, 3),
        "anchor": None,
        "limit": round(limit, 3),
        "ratio": round(limit / ours, 2),
        "n": args.rounds,
        "spread": [round(min(seconds), 3), round(max(seconds), 3)],
    }


def exact(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    index = VectorIndex(make_index(folder, args, copies=3))
    embedder = TableEmbedder(index.dimension)
    # Half of the queries are passages, so that their first hits are equal.
    texts = [f"passage {n * 17} of the corpus" if n % 2 else f"query {n}" for n in range(args.queries)]
    queries = embedder.encode(texts)
    everything = index.vectors.astype(np.float64)
    ids = np.array(["p0"] * len(everything), dtype=object)
    for name, row in index.documents.row_of_id().items():
        ids[row] = name
    wrong = 0
    for at in range(0, len(queries), 64):
        batch = queries[at : at + 64]
        for query, hits in zip(batch, index.search(batch, [TOPK] * len(batch)), strict=True):
            cosines = np.round(everything @ query.astype(np.float64), 6)
            order = sorted(np.argsort(-cosines)[: 20 * TOPK], key=lambda row: (-cosines[row], ids[row]))[:TOPK]
            wrong += hits.rows.tolist() != order or not np.allclose(hits.scores, cosines[order], atol=1e-6)
    return {
        "metric": "retrieval_answers_unlike_brute_force",
        "ours": wrong,
        "anchor": None,
        "limit": 0,
        "ratio": None,
        "n": args.queries,
        "spread": None,
    }


MODES = {"throughput": throughput, "clients": clients, "open": open_index, "exact": exact}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*MODES, "server"], nargs="?", default="throughput")
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=768, help="of table vectors")
    parser.add_argument("--embedder", choices=("table", "minilm"), default="table", help="of the queries")
    parser.add_argument("--clients", type=int, help="default: 64 (throughput), 512 (clients)")
    parser.add_argument("--rounds", type=int, default=3, help="throughput, open")
    parser.add_argument("--seconds", type=float, default=5.0, help="one measurement of throughput")
    parser.add_argument("--queries", type=int, default=256, help="exact")
    parser.add_argument("--folder", type=Path, help="server (started by the other modes): the index")
    parser.add_argument("--port", type=int, help="server")
    parser.add_argument("--max-batch", type=int, help="server")
    args = parser.parse_args()
    args.clients = args.clients or (512 if args.mode == "clients" else 64)
    return args


def main() -> None:
    args = parse_args()
    if args.mode == "server":
        run_server(args)
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="retrieval-") as folder:
        line = MODES[args.mode](args, Path(folder))
    line |= {"passages": args.passages, "embedder": args.embedder, "threads": os.environ["OMP_NUM_THREADS"]}
    print(json.dumps(line | {"machine": f"{os.cpu_count()} cores", "load": [before, os.getloadavg()[0]]}))


if __name__ == "__main__":
    main()
