"""Entry point of the router process: sglang-router with its own command-line flags. Started as a script by router.py.

Why not `python -m sglang_router.launch_router`: that module imports its debugging load balancer, which imports all of
SGLang where it is installed, about five CPU seconds before the router (ready in 0.1 s without) can listen.

Leaves out: that load balancer (`--mini-lb`).
"""

from __future__ import annotations

import argparse
import sys

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="sglang-router", allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args(argv))).start()


if __name__ == "__main__":
    main(sys.argv[1:])
