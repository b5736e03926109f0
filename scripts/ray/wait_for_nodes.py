"""`python scripts/ray/wait_for_nodes.py N`: returns when the Ray cluster at RAY_ADDRESS has N nodes; exit code 1 if not in time."""

from __future__ import annotations

import argparse
import sys
import time

import ray


def alive() -> int:
    """Nodes of the cluster, 0 while it cannot be reached."""
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError):
        return 0
    return sum(node["Alive"] for node in ray.nodes())


def main() -> int:
    parser = argparse.ArgumentParser(description="Wait until a Ray cluster is complete.", allow_abbrev=False)
    parser.add_argument("nodes", type=int, help="how many there must be")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    args = parser.parse_args()
    deadline = time.monotonic() + args.timeout_s
    while (count := alive()) < args.nodes:
        if time.monotonic() > deadline:
            print(f"error: {count} of {args.nodes} nodes after {args.timeout_s:g} s", file=sys.stderr)
            return 1
        time.sleep(2.0)
    print(f"{count} nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
