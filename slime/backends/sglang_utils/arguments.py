"""Command-line flags of the SGLang backend, and the server and router options that follow from them.

Every entry of `SERVER_FLAGS` becomes `--sglang-<name>` and is handed to the server as it is when given; entries of
`ROUTER_FLAGS` become `--router-<name>` for the router we start. What slime controls itself (model path, ports, seed,
tensor-parallel size, ...) has no flag. On a machine without a GPU the flags of `default_cpu_options` come first and
anything given here replaces them.

Leaves out: `--sglang-config`, prefill/decode disaggregation and external engines.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from slime.backends.sglang_utils.owned_process import check_port_free
from slime.backends.sglang_utils.server import default_cpu_options

SWITCH = None
# name -> type (SWITCH: a flag without a value)
SERVER_FLAGS: dict[str, type | None] = {
    "context-length": int,
    "dtype": str,
    "kv-cache-dtype": str,
    "quantization": str,
    "load-format": str,
    "device": str,
    "log-level": str,
    "log-requests": SWITCH,
    "mem-fraction-static": float,
    "max-total-tokens": int,
    "max-running-requests": int,
    "max-prefill-tokens": int,
    "chunked-prefill-size": int,
    "page-size": int,
    "schedule-policy": str,
    "schedule-conservativeness": float,
    "attention-backend": str,
    "sampling-backend": str,
    "grammar-backend": str,
    "watchdog-timeout": float,
    "stream-interval": int,
    "pp-size": int,
    "dp-size": int,
    "ep-size": int,
    "enable-dp-attention": SWITCH,
    "enable-deterministic-inference": SWITCH,
    "enable-torch-compile": SWITCH,
    "disable-radix-cache": SWITCH,
    "disable-cuda-graph": SWITCH,
    "disable-custom-all-reduce": SWITCH,
    "disable-overlap-schedule": SWITCH,
    "sleep-on-idle": SWITCH,
}
# name -> (type, default)
ROUTER_FLAGS: dict[str, tuple[type, Any]] = {
    "policy": (str, "cache_aware"),
    "log-level": (str, "warn"),
    "cache-threshold": (float, None),
    "balance-abs-threshold": (int, 10),
    "balance-rel-threshold": (float, 1.2),
    "max-tree-size": (int, None),
    "retry-max-retries": (int, None),
}


def add_sglang_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this backend to slime's parser."""
    group = parser.add_argument_group("sglang", "rollout engines (SGLang) and their router")
    group.add_argument(
        "--sglang-router-ip", type=str, help="use this running router; without it one is started for the run"
    )
    group.add_argument("--sglang-router-port", type=int, help="port of the router (default: a free one)")
    group.add_argument(
        "--sglang-router-request-timeout-secs",
        type=int,
        default=14400,
        help="seconds after which the router gives up a request",
    )
    group.add_argument(
        "--sglang-server-concurrency", type=int, default=512, help="requests in flight per engine at most"
    )
    group.add_argument(
        "--sglang-startup-timeout-secs", type=float, default=600.0, help="seconds an engine may take to become ready"
    )
    group.add_argument(
        "--sglang-log-dir", type=str, help="folder of the engines' and the router's logs (default: a temporary one)"
    )
    for name, kind in SERVER_FLAGS.items():
        text = f"passed to every SGLang server as --{name}"
        if kind is SWITCH:
            group.add_argument(f"--sglang-{name}", action="store_true", default=None, help=text)
        else:
            group.add_argument(f"--sglang-{name}", type=kind, help=text)
    for name, (kind, default) in ROUTER_FLAGS.items():
        text = f"passed to the router as --{name}"
        group.add_argument(f"--router-{name}", type=kind, default=default, help=text)


def _attribute(prefix: str, name: str) -> str:
    return f"{prefix}_{name}".replace("-", "_")


def validate_sglang_args(args: argparse.Namespace) -> None:
    """Checks the flags and derives `args.sglang_tp_size`. Raises ValueError naming flag, value and remedy."""
    for flag in ("sglang_server_concurrency", "sglang_startup_timeout_secs", "sglang_router_request_timeout_secs"):
        if getattr(args, flag) <= 0:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: give a number above 0")
    if args.sglang_router_ip is not None and args.sglang_router_port is None:
        raise ValueError(f"--sglang-router-ip {args.sglang_router_ip} needs --sglang-router-port as well")
    if args.sglang_router_ip is not None and ":" in args.sglang_router_ip.strip("[]"):
        args.sglang_router_ip = f"[{args.sglang_router_ip.strip('[]')}]"
    starts_router = args.sglang_router_ip is None and not getattr(args, "debug_train_only", False)
    if starts_router and args.sglang_router_port is not None:
        try:
            check_port_free("127.0.0.1", args.sglang_router_port)
        except ValueError as error:
            raise ValueError(f"--sglang-router-port {args.sglang_router_port}: {error}") from None
    _validate_parallel_sizes(args)


def _validate_parallel_sizes(args: argparse.Namespace) -> None:
    gpus, pipeline = args.rollout_num_gpus_per_engine, args.sglang_pp_size or 1
    if not args.use_gpu and gpus != 1:
        raise ValueError(
            f"--rollout-num-gpus-per-engine is {gpus}: without a GPU an engine is one process, give 1 "
            "(more engines: --rollout-num-gpus)"
        )
    if gpus % pipeline:
        raise ValueError(
            f"--rollout-num-gpus-per-engine {gpus} is not divisible by --sglang-pp-size {pipeline}: change one of them"
        )
    if (args.sglang_dp_size or 1) > 1 and not args.sglang_enable_dp_attention:
        raise ValueError(
            f"--sglang-dp-size {args.sglang_dp_size} needs --sglang-enable-dp-attention "
            "(for independent replicas use more engines: --rollout-num-gpus)"
        )
    args.sglang_tp_size = gpus // pipeline


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of a policy engine for `ServerSpec.options`: CPU defaults, what slime forces, then the flags given."""
    options = {} if args.use_gpu else default_cpu_options()
    options |= {
        "trust-remote-code": True,
        # The first weight update comes before the first request, and `wait_ready` generates a token by itself.
        "skip-server-warmup": True,
        "enable-metrics": True,
        "tp-size": args.sglang_tp_size,
    }
    if args.use_gpu:
        options["enable-memory-saver"] = bool(getattr(args, "offload_rollout", False))
    given = {name: getattr(args, _attribute("sglang", name)) for name in SERVER_FLAGS}
    return options | {name: value for name, value in given.items() if value is not None}


def router_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options for `Router`."""
    given = {name: getattr(args, _attribute("router", name)) for name in ROUTER_FLAGS}
    options = {name: value for name, value in given.items() if value is not None}
    return options | {"request-timeout-secs": args.sglang_router_request_timeout_secs}


def log_dir(args: argparse.Namespace) -> str:
    """Folder for the logs of engines and router."""
    return args.sglang_log_dir or os.path.join(tempfile.gettempdir(), f"slime-sglang-{os.getuid()}")
