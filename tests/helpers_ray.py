"""Shared by tests of the training loop: a tiny model with data on disk, `train.py` as a process, and what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from helpers_sglang import save_tiny_model

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "train.py"
TRAIN_ASYNC = ROOT / "train_async.py"
RUN_LIMIT_S = 400


@dataclass
class World:
    """A folder with `model/` (tiny random Qwen2), `chats.jsonl` and `prompts.jsonl`."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def common_flags(self, run: str) -> list[str]:
        """Flags every run of these tests shares; metrics go to `<run>.jsonl`."""
        return [
            *("--train-backend", "fsdp", "--hf-checkpoint", str(self.model), "--lr", "1e-3"),
            *("--metrics-jsonl", str(self.folder / f"{run}.jsonl"), "--sglang-log-dir", str(self.folder / "logs")),
        ]

    def metrics(self, run: str, step_key: str) -> list[dict[str, Any]]:
        """Metric lines of a run with the given step key, in order."""
        lines = (self.folder / f"{run}.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["step_key"] == step_key]


def make_world(folder: Path) -> World:
    """Write model and data."""
    save_tiny_model(folder / "model")
    chats = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} " * (1 + i % 5)}]
        for i in range(16)
    ]
    write_jsonl(folder / "chats.jsonl", [{"input": chat} for chat in chats])
    write_jsonl(folder / "prompts.jsonl", [{"input": f"count to {i}", "label": str(i)} for i in range(16)])
    return World(folder)


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def start_train(flags: list[str], log: Path, program: Path = TRAIN) -> subprocess.Popen[bytes]:
    """Start `train.py` (or another loop); its output goes to `log`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    env.pop("RAY_ADDRESS", None)
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, str(program), *flags], stdout=output, stderr=output, env=env)


def run_train(flags: list[str], log: Path, limit_s: float = RUN_LIMIT_S, program: Path = TRAIN) -> int:
    """Run `train.py` (or another loop) to its end; returns the exit code and checks that every process it started is gone."""
    process = start_train(flags, log, program)
    seen = watch(process, limit_s)
    assert living(seen) == [], "processes are left"
    return process.returncode


def watch(process: subprocess.Popen[bytes], limit_s: float) -> set[psutil.Process]:
    """Wait for the end of `process`; returns all descendants seen on the way."""
    seen: set[psutil.Process] = set()
    driver = psutil.Process(process.pid)
    waited = 0.0
    while process.poll() is None:
        seen |= descendants(driver)
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            waited += 0.5
        if waited > limit_s:
            process.kill()
            process.wait()
            raise TimeoutError(f"train.py ran longer than {limit_s} s")
    return seen


def descendants(driver: psutil.Process) -> set[psutil.Process]:
    """All processes below `driver`; empty when it has ended."""
    try:
        return set(driver.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def living(processes: set[psutil.Process]) -> list[str]:
    """Command lines of those that still run."""
    alive = [process for process in processes if process.is_running()]
    return [" ".join(command) for process in alive if (command := _command_line(process))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.NoSuchProcess:
        return []


def manager_args(**changes: Any) -> Namespace:
    """Arguments as `RolloutManager` and the placement functions need them, for tests without Ray."""
    from slime.utils.arguments import get_slime_extra_args_provider
    from slime.utils.arguments.parser import SlimeArgumentParser

    parser = SlimeArgumentParser()
    get_slime_extra_args_provider()(parser)
    args = parser.parse_args(["--rollout-batch-size", "2"])
    defaults = {"use_gpu": False, "eval_datasets": [], "n_samples_per_prompt": 2, "global_batch_size": 4}
    vars(args).update(defaults | changes)
    return args


async def length_reward(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """Reward of the GRPO test: the share of even token ids, so that a random model's groups have a spread."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(len(response), 1)


async def judged_reward(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """`length_reward`, after asking the engine of the model `judge` of `--sglang-config` for a token."""
    from slime.rollout.sglang_rollout import get_model_url
    from slime.utils.http_utils import post

    payload = {"input_ids": sample.tokens[:4], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    answer = await post(get_model_url(args, "judge"), payload)
    sample.metadata["judge_version"] = answer["meta_info"]["weight_version"]
    return await length_reward(args, sample)


def hanging_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function that never returns."""
    time.sleep(10_000)


def failing_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function with a bug."""
    raise RuntimeError("the hook is broken")
