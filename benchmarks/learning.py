"""Does the policy learn, over seeds and settings? Runs the quickstart for each and checks the gain on held-out problems.

    python benchmarks/learning.py [METHOD] [--seeds 0 1 2] [--variants agentflow_turn_weighting=token_mean ...] [--output DIR]

Prints one JSON line per variant (without --variants: the method's defaults): success before and after for every seed, greedy
and at temperature 1, with the mean gain and the smallest one. A variant with several settings has a `+` between them. Exit code 1 unless for every variant, in both, the mean gain
and every seed's gain reach the limits of the method. All variants of a seed start from the same warm start. A finished run
in --output is not run again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Smallest mean gain and smallest gain of a seed, by method.
LIMITS = {"agentflow": (0.30, 0.20), "memagent": (0.25, 0.20), "toolorchestra": (0.25, 0.20)}
WARM_START = ("tiny", "world", "warm")


def run_folder(seed: int, variant: str, output: Path, flags: Sequence[str] = ()) -> Path:
    """Where `run_seed` puts the quickstart's output."""
    return output / f"seed_{seed}" / ("".join([variant, *flags]).replace("/", "_") or "default")


def run_seed(method: str, seed: int, variant: str, output: Path, flags: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of the quickstart with this seed, these settings and `flags`; CalledProcessError when it fails."""
    folder, shared = run_folder(seed, variant, output, flags), output / f"seed_{seed}"
    command = [sys.executable, str(ROOT / "tools" / "quickstart.py"), method, "--seed", str(seed)]
    settings = [word for pair in variant.split("+") if pair for word in ("--setting", pair)]
    command += ["--output", str(folder), *settings, *flags]
    if not (folder / "summary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        parts = (*WARM_START, *importlib.import_module(f"agentic.{method}.quickstart").FURTHER_MODELS)
        copy_parts(shared, folder, parts)
        subprocess.run(command, check=True, stdout=sys.stderr)
        copy_parts(folder, shared, parts)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def copy_parts(source: Path, target: Path, parts: Sequence[str]) -> None:
    """The warm start, what it was made of and what was made of it, where it is there and not yet here."""
    for name in parts:
        if (source / name).exists() and not (target / name).exists():
            shutil.copytree(source / name, target / name)


def gains(summaries: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
    """Before, after and gain by seed for one way of decoding (`suffix` of the summary's keys)."""
    before = [s[f"eval_before{suffix}"] for s in summaries]
    after = [s[f"eval_after{suffix}"] for s in summaries]
    gain = [round(a - b, 4) for a, b in zip(after, before, strict=True)]
    return {"before": before, "after": after, "gain": gain, "mean_gain": statistics.mean(gain), "min_gain": min(gain)}


def measure(args: argparse.Namespace, variant: str) -> bool:
    """Run all seeds of a variant and print its line; whether the limits hold."""
    mean_gain, smallest = LIMITS[args.method]
    summaries = [run_seed(args.method, seed, variant, args.output) for seed in args.seeds]
    result = {name: gains(summaries, suffix) for name, suffix in (("greedy", ""), ("sampled", "_sampled"))}
    holds = all(r["mean_gain"] >= mean_gain and r["min_gain"] >= smallest for r in result.values())
    line = {"metric": "held-out success, tiny world", "method": args.method, "variant": variant or "default"}
    line |= {"seeds": args.seeds, "n": summaries[0]["n_eval"], **result, "holds": holds}
    line |= {"seconds": [s["seconds"] for s in summaries], "load": os.getloadavg()[0]}
    print(json.dumps(line), flush=True)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", choices=LIMITS, default="agentflow")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=[""], metavar="NAME=VALUE", help="settings to compare")
    parser.add_argument("--output", type=Path, help="default: outputs/learning/METHOD")
    args = parser.parse_args()
    args.output = args.output or ROOT / "outputs" / "learning" / args.method
    return 0 if all([measure(args, variant) for variant in args.variants]) else 1


if __name__ == "__main__":
    sys.exit(main())
