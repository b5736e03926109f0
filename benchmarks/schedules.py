"""Is asynchronous training faster, and does it learn as much? AgentFlow's quickstart with each schedule.

    python benchmarks/schedules.py [--seeds 0] [--output DIR]

Prints one JSON line per seed: for `train.py`, `train_async.py` and the fully asynchronous rollout the held-out success
before and after (greedy, and at temperature 1), the median seconds from one rollout's training to the next one's, and their
ratio to `train.py`. Exit code 1 unless both asynchronous schedules are faster and their success at temperature 1 is no
further below that of `train.py` than chance explains (the 95% bound for two samples of n). All schedules of a seed start
from the same warm start; a finished run in --output is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from learning import ROOT, run_folder, run_seed

from slime.observability.run_summary import read_lines

METHOD = "agentflow"
SCHEDULES = ("sync", "async", "fully-async")
Z_95 = 1.96


def seconds_per_rollout(metrics: Path) -> float:
    """Median seconds between the last optimizer steps of consecutive rollouts."""
    lines = (line for line in read_lines(metrics) if line["step_key"] == "train/step")
    ends = list({line["train/rollout_id"]: line["time"] for line in lines}.values())
    return statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))


def measure(seed: int, schedule: str, output: Path) -> dict[str, Any]:
    """One quickstart: success before and after, and the seconds of a rollout."""
    flags = [] if schedule == "sync" else [f"--schedule={schedule}"]
    summary = run_seed(METHOD, seed, "", output, flags)
    metrics = run_folder(seed, "", output, flags) / "run" / "metrics_raw.jsonl"
    keys = ("n_eval", "eval_before", "eval_after", "eval_before_sampled", "eval_after_sampled")
    return {key: summary[key] for key in keys} | {"seconds_per_rollout": round(seconds_per_rollout(metrics), 3)}


def within_noise(found: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Whether success at temperature 1 is no further below the reference's than two samples of n differ by chance."""
    rates, n = (found["eval_after_sampled"], reference["eval_after_sampled"]), found["n_eval"]
    error = sum(rate * (1 - rate) / n for rate in rates) ** 0.5
    return bool(rates[0] >= rates[1] - Z_95 * error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "learning" / METHOD)
    args = parser.parse_args()
    good = True
    for seed in args.seeds:
        found = {schedule: measure(seed, schedule, args.output) for schedule in SCHEDULES}
        reference = found["sync"]
        for figures in found.values():
            figures["ratio"] = round(figures["seconds_per_rollout"] / reference["seconds_per_rollout"], 3)
        others = [figures for figures in found.values() if figures is not reference]
        good &= all(figures["ratio"] < 1 and within_noise(figures, reference) for figures in others)
        print(
            json.dumps({"metric": "schedules, tiny world", "seed": seed, **found, "load": os.getloadavg()[0]}),
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
