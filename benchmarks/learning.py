"""Does the planner learn, over seeds? Runs the quickstart once per seed and checks the gain on held-out problems.

    python benchmarks/learning.py [--seeds 0 1 2] [--output DIR]

Prints one JSON line: success before and after for every seed, greedy and at temperature 1, with the mean gain and the
smallest one. Exit code 1 unless, in both, the mean gain is at least 0.30 and no seed gains less than 0.20. A finished
seed in --output is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEAN_GAIN, SMALLEST_GAIN = 0.30, 0.20


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """The summary of the quickstart with this seed; CalledProcessError when it fails."""
    command = [sys.executable, str(ROOT / "tools" / "quickstart.py"), "--seed", str(seed), "--output", str(folder)]
    if not (folder / "summary.json").exists():
        subprocess.run(command, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def gains(summaries: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
    """Before, after and gain by seed for one way of decoding (`suffix` of the summary's keys)."""
    before = [s[f"eval_before{suffix}"] for s in summaries]
    after = [s[f"eval_after{suffix}"] for s in summaries]
    gain = [round(a - b, 4) for a, b in zip(after, before, strict=True)]
    return {"before": before, "after": after, "gain": gain, "mean_gain": statistics.mean(gain), "min_gain": min(gain)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "learning")
    args = parser.parse_args()
    summaries = [run_seed(seed, args.output / f"seed_{seed}") for seed in args.seeds]
    result = {name: gains(summaries, suffix) for name, suffix in (("greedy", ""), ("sampled", "_sampled"))}
    holds = all(r["mean_gain"] >= MEAN_GAIN and r["min_gain"] >= SMALLEST_GAIN for r in result.values())
    line = {"metric": "held-out success, tiny world", "seeds": args.seeds, "n": summaries[0]["n_eval"], **result}
    line |= {"seconds": [s["seconds"] for s in summaries], "load": os.getloadavg()[0], "holds": holds}
    print(json.dumps(line))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
