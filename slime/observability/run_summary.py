"""What a finished run has to show: one row per optimiser step, and success rates with their intervals.

Inputs: the metrics file of a run (`logging_utils`, one JSON object a line, appended by several processes and possibly by
several attempts of the same run). Invariants: where a step was logged twice (a run was resumed) the later line counts;
a number is never made up: what was not logged is None. Leaves out: drawing (`report`).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

BEFORE = 0
"""Step of the evaluation before training; rollout 0 itself is evaluated only when every rollout is."""
PHASES = ("rollout", "train", "update_weights", "eval", "save")
TRAIN_FIELDS = {
    "loss": "train/loss",
    "kl": "train/kl_loss",
    "entropy": "train/entropy_loss",
    "grad_norm": "train/grad_norm",
    "logprob_diff": "train/train_rollout_logprob_abs_diff",
    "clip_fraction": "train/pg_clipfrac",
    "tokens": "train/num_tokens",
    "lr": "train/lr",
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a metrics file, in order; [] when there is none yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def step_rows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per optimiser step, in order: its own numbers, and reward and seconds by phase of its rollout."""
    rollouts: dict[int, dict[str, Any]] = defaultdict(dict)
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["step_key"] == "rollout/step":
            rollouts[line["rollout/step"]].update(line)
        elif line["step_key"] == "train/step":
            steps[line["train/step"]] = line
    rows = []
    for number in sorted(steps):
        line = steps[number]
        rollout = rollouts[line["train/rollout_id"]]
        row = {"step": number, "rollout": line["train/rollout_id"], "reward": rollout.get("rollout/raw_reward")}
        row |= {name: line.get(key) for name, key in TRAIN_FIELDS.items()}
        row["seconds"] = {phase: rollout.get(f"perf/{phase}_time") for phase in PHASES}
        rows.append(row)
    return rows


def eval_results(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Success rate by data set, one entry per evaluation in the order they were made."""
    return [_rates(line) for line in lines if line["step_key"] == "eval/step"]


def eval_by_rollout(lines: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Success rate by data set for every rollout after which was evaluated, and for `BEFORE`."""
    return {line["eval/step"]: _rates(line) for line in lines if line["step_key"] == "eval/step"}


def _rates(line: dict[str, Any]) -> dict[str, float]:
    names = [key for key in line if key.startswith("eval/") and key.count("/") == 1 and key != "eval/step"]
    return {name.removeprefix("eval/"): line[name] for name in names}


def wilson_interval(rate: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a success rate over `n` trials (E. B. Wilson, 1927); ValueError for n < 1."""
    if n < 1:
        raise ValueError(f"an interval needs at least one trial, got n={n}")
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
