"""MemAgent on one very long document: `python benchmarks/long_document.py --tokenizer DIR [--tokens N] [--seed S]`.

Prints one JSON line. `tokenisation` is the processor time of encoding the document piece by piece, as the reader does, over
that of one encode of the whole text (`encode_s`; the best of several of both, in turns); `memory` the growth of the
process's peak resident size while reading, over the size of the id array; `first_request_s` the time from handing over the
loaded text to the arrival of the first request; `chunks` how often each chunk was seen by the engine. Exit code 1 unless
every figure is within LIMITS. The policy is a scripted HTTP server in this process: what is measured is the reader, not a
model. Left out: the prompts' own encoding (once a process), several documents at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentic.memagent.agent import MemAgent
from agentic.memagent.config import MemAgentConfig
from agentic.memagent.reader import Reader
from agentic.memagent.tokens import Document, TextEncoder

LIMITS = {"tokenisation": 1.05, "memory": 3.0, "first_request_s": 0.2}
MEMORY_IDS = [11, 12, 13]
REPEATS = 4


class TimedEncoder(TextEncoder):
    """Counts the processor time of its own thread."""

    seconds = 0.0

    def __call__(self, text: str) -> np.ndarray:
        start = time.thread_time()
        ids = super().__call__(text)
        self.seconds += time.thread_time() - start
        return ids


class Engine:
    """Answers every `/generate` with the same three ids; keeps when the first came and the sizes of all prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.first = 0.0

    async def generate(self, request: web.Request) -> web.Response:
        self.first = self.first or time.monotonic()
        prompt = (await request.json())["input_ids"]
        # Only what identifies a chunk, or the prompts would be most of the memory that is measured.
        self.prompts.append([len(prompt), hash(tuple(prompt))])
        meta = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(MEMORY_IDS),
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.1, token, None] for token in MEMORY_IDS],
            "weight_version": "0",
        }
        return web.json_response({"text": "", "output_ids": MEMORY_IDS, "meta_info": meta})

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}"


def make_text(encoder: TextEncoder, tokens: int, seed: int) -> str:
    """English-like text of about `tokens` tokens: words of Zipf-like frequency, sentences, paragraphs."""
    rng = random.Random(seed)
    syllables = [c + v for c in "bcdfghlmnprstvw" for v in ("a", "e", "i", "o", "u", "er", "an")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))

    def paragraph() -> str:
        sentences = (
            " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(6, 20))) for _ in range(rng.randint(3, 8))
        )
        return " ".join(f"{sentence.capitalize()}." for sentence in sentences)

    block = "\n\n".join(paragraph() for _ in range(400))
    blocks = max(round(tokens / len(encoder(block))), 1)
    return "\n\n".join("\n\n".join(paragraph() for _ in range(400)) for _ in range(blocks))


def compare_encoding(tokenizer: Any, text: str) -> tuple[float, float]:
    """Seconds of the fastest encoding piece by piece and of the fastest whole one, tried in turns."""
    encoder = TimedEncoder(tokenizer)
    seconds: tuple[list[tuple[float, int]], ...] = ([], [])
    for number in range(2 * REPEATS):
        encoder.seconds = 0.0
        count = len(encoder(text)) if number % 2 else Document(text, encoder).count()
        seconds[number % 2].append((encoder.seconds, count))
    (piecewise, pieces_count), (whole, whole_count) = (min(kind) for kind in seconds)
    assert pieces_count == whole_count, "pieces and whole differ"
    return piecewise, whole


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def read(tokenizer: Any, text: str) -> dict[str, Any]:
    """One reading; figures of it, and the sizes that were seen."""
    engine = Engine()
    runner, url = await engine.start()
    agent = MemAgent.build(MemAgentConfig(), tokenizer, url)
    document = agent.document(text)
    before, start = peak_bytes(), time.monotonic()
    sampling = {"temperature": 1.0, "max_new_tokens": 64}
    reader = Reader(agent, "Who lived there?", text, sampling, evaluation=True, keep_turns=False)
    reading = await reader.read()
    seconds = time.monotonic() - start
    await runner.cleanup()
    ids = document.count()
    return {
        "ids": ids,
        "memory": (peak_bytes() - before) / (ids * np.dtype(np.int32).itemsize),
        "first_request_s": engine.first - start,
        "seconds": seconds,
        "requests": len(engine.prompts),
        "distinct_prompts": len({number for _, number in engine.prompts}),
        "chunks_read": reading.counters["chunks"],
        "ids_read": reading.counters["context_tokens_read"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a model folder (tools/make_smollm2.py writes one)")
    parser.add_argument("--tokens", type=int, default=3_400_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    text = make_text(TextEncoder(tokenizer), args.tokens, args.seed)
    figures = asyncio.run(read(tokenizer, text))
    piecewise, whole = compare_encoding(tokenizer, text)
    chunks = -(-figures["ids"] // MemAgentConfig().chunk_tokens)
    once = (
        figures["chunks_read"] == figures["distinct_prompts"] - 1 == chunks and figures["ids_read"] == figures["ids"]
    )
    result = {
        "tokenisation": piecewise / whole,
        "encode_s": whole,
        **figures,
        "every_chunk_once": once,
    }
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}))
    return 0 if once and all(result[name] <= limit for name, limit in LIMITS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
