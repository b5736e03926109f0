"""Seconds of a training step without a framework: one GPU, one model, one loop. The limit for the trainer's own overhead.

    python -m benchmarks.gpu.plain_loop --model FOLDER --rows N --tokens L [--steps K]

Prints one JSON line. The same work as a supervised step of the FSDP back end: float32 weights, forward and backward in bf16 on a
GPU, one row at a time, the log-prob head of `slime/utils/logprobs.py`, gradient clipping, AdamW. Left out: everything else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slime.utils.logprobs import selected_log_probs_and_entropy

CHUNK = 1024


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows_RL: torch.Tensor) -> None:
    """One optimiser step over all rows. R rows, L tokens."""
    device = rows_RL.device.type
    for row_L in rows_RL:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden_LD = model.base_model(input_ids=row_L[None], use_cache=False).last_hidden_state[0]  # type: ignore[operator]
        weight_VD = model.get_output_embeddings().weight  # type: ignore[operator]
        log_probs, _ = selected_log_probs_and_entropy(
            hidden_LD[:-1], weight_VD.to(hidden_LD.dtype), row_L[1:], 1.0, CHUNK, with_entropy=False
        )
        (-log_probs.mean() / len(rows_RL)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(folder: Path, rows: int, tokens: int, steps: int) -> list[float]:
    """Seconds of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = "flash_attention_2" if device == "cuda" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows_RL = torch.randint(model.config.vocab_size, (rows, tokens), device=device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step(model, optimizer, rows_RL)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.plain_loop", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    seconds = measure(args.model, args.rows, args.tokens, args.steps)
    print(json.dumps({"seconds": seconds, "median": statistics.median(seconds[1:])}))


if __name__ == "__main__":
    main(sys.argv[1:])
