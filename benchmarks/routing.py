"""Does money in the reward change whom the policy asks? Runs ToolOrchestra's quickstart with the preference reward.

    python benchmarks/routing.py [--seeds 0] [--output DIR]

Each seed is run at the usual prices and with those of the two experts exchanged that know some kinds of questions equally
well. Prints one JSON line per seed, held-out questions, greedy: success and microdollars per solved question before and
after, and for the kinds that both experts know the share of their calls that the dearer one gets. Exit code 1 unless in
each run what a solved question costs falls, success does not, and most of these calls go to the cheaper one. Warm starts
and finished runs in --output are used again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from learning import ROOT, run_seed

from agentic.toolorchestra.tiny_world import HISTORIAN, RESTORER

SWAPPED = "agentic/toolorchestra/tiny_aliases_swapped.yaml"
VARIANTS = {
    "usual": ("orchestra_reward=preference", HISTORIAN),
    "swapped": (f"orchestra_reward=preference+orchestra_aliases={ROOT / SWAPPED}", RESTORER),
}
"""Settings, and the dearer of the two experts."""


def routing(summary: dict[str, Any], dearer: str) -> dict[str, Any]:
    """Before and after: success, microdollars per solved question, share of the dearer expert."""
    moments = {when: summary["routing"]["greedy"][when] for when in ("before", "after")}
    return {when: moment(figures, dearer) for when, figures in moments.items()}


def moment(figures: dict[str, Any], dearer: str) -> dict[str, Any]:
    calls = figures["calls_shared_kinds"]
    both = sum(calls.get(alias, 0) for alias in (HISTORIAN, RESTORER))
    return {
        "success": figures["success"],
        "microdollars_per_solved": figures["microdollars_per_solved"],
        "share_of_dearer": round(calls.get(dearer, 0) / both, 4) if both else None,
        "calls": both,
    }


def holds(found: dict[str, Any]) -> bool:
    """Whether this run shows what the benchmark asks for."""
    before, after = found["before"], found["after"]
    cheaper = after["microdollars_per_solved"] < before["microdollars_per_solved"]
    return bool(cheaper and after["success"] >= before["success"] and after["share_of_dearer"] < 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "learning" / "toolorchestra")
    args = parser.parse_args()
    good = True
    for seed in args.seeds:
        line: dict[str, Any] = {"metric": "routing under prices, tiny world", "seed": seed}
        for name, (variant, dearer) in VARIANTS.items():
            summary = run_seed("toolorchestra", seed, variant, args.output)
            line[name] = {**routing(summary, dearer), "n": summary["n_eval"], "seconds": summary["seconds"]}
            good &= holds(line[name])
        print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
