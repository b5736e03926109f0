"""Addresses of the frozen models that a run's own engines serve (`--sglang-config`).

Invariant: the policy is not among them; a role reaches it by `url: policy` only. Leaves out: starting engines.
"""

from __future__ import annotations

from argparse import Namespace

from slime.rollout.sglang_rollout import get_model_url


def engine_urls(args: Namespace) -> dict[str, str]:
    """Router address by model name, for `url: engine:NAME` in a role file."""
    policy = (args.sglang_router_ip, args.sglang_router_port)
    routers = getattr(args, "sglang_model_routers", None) or {}
    return {
        name: get_model_url(args, name, endpoint="") for name, router in routers.items() if tuple(router) != policy
    }
