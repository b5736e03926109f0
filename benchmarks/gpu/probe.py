"""Short runs of `train.py`, as a user starts it, and what they wrote: metrics by name, seconds, peak of GPU memory.

Inputs: flags by name. Invariants: a run has a folder of its own; it is ended with us and at its deadline; nothing of the
product is replaced, the hooks in `hooks.py` only watch. Leaves out: what the figures must be (`checks.py`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.bounds import used_gpu_bytes

ROOT = Path(__file__).resolve().parents[2]
POLL_S, STOP_S = 1.0, 60.0
Flags = Mapping[str, Any]


class Failed(Exception):
    """A run failed; the text is its last error."""


@dataclass(frozen=True)
class ProbeResult:
    """A run that has ended. `metrics`: name -> its values in order."""

    code: int
    command: list[str]
    log: Path
    seconds: float
    peak_gpu_bytes: int
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def problem(self) -> str:
        """One line about what went wrong; empty when nothing did."""
        if self.code == 0:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or [line for line in lines if line.strip()]
        last = errors[-1] if errors else "no output"
        return f"train.py ended with {self.code}: {last} (log: {self.log})"


def run_train(folder: Path, flags: Flags, limit_s: float) -> ProbeResult:
    """Run train.py in `folder` to its end, or end it at the deadline (code -1)."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, log = folder / "metrics.jsonl", folder / "train.log"
    metrics.unlink(missing_ok=True)
    flags = {**flags, "metrics-jsonl": metrics, "sglang-log-dir": folder / "logs"}
    words = [word for name, value in flags.items() for word in ([f"--{name}"] + [str(value)] * (value is not None))]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        try:
            code, peak = _watch(process, start + limit_s)
        finally:
            _end(process)
    return ProbeResult(code, command, log, time.monotonic() - start, peak, _read(metrics))


def plain_seconds(model: Path, rows: int, tokens: int, log: Path) -> float:
    """Median seconds of a step of `plain_loop`, in a process of its own, which gives its memory back."""
    words = ["--model", str(model), "--rows", str(rows), "--tokens", str(tokens)]
    command = [sys.executable, "-m", "benchmarks.gpu.plain_loop", *words]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=output, check=False)
    if done.returncode:
        raise Failed(f"plain_loop ended with {done.returncode} (log: {log})")
    return float(json.loads(done.stdout.splitlines()[-1])["median"])


def _watch(process: subprocess.Popen[bytes], deadline: float) -> tuple[int, int]:
    """(exit code, most bytes seen on any GPU)."""
    peak = 0
    while process.poll() is None:
        peak = max([peak, *used_gpu_bytes()])
        if time.monotonic() > deadline:
            return -1, peak
        time.sleep(POLL_S)
    return process.returncode, peak


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(path: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        for name, value in json.loads(line).items():
            if isinstance(value, (int, float)):
                found.setdefault(name, []).append(float(value))
    return found


# --------------------------------------------------------------------------------------------------------------------
# Data.


def write_prompts(path: Path, count: int) -> Path:
    """Chats with one question each, a line a record."""
    draw = random.Random(0)
    questions = [
        f"Explain step by step what {draw.randint(11, 99)} times {draw.randint(11, 99)} is." for _ in range(count)
    ]
    return _write(path, [{"prompt": [{"role": "user", "content": question}]} for question in questions])


def write_long_chats(path: Path, count: int, tokens: int) -> Path:
    """Chats whose answer has more than `tokens` tokens under any tokenizer; the rollout cuts them to that length."""
    draw = random.Random(0)
    chats = []
    for _ in range(count):
        answer = " ".join(str(draw.randint(0, 999)) for _ in range(tokens))
        chats.append([{"role": "user", "content": "Count."}, {"role": "assistant", "content": answer}])
    return _write(path, [{"prompt": chat} for chat in chats])


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
