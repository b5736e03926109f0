"""Command-line flags of the SGLang backend, and the server and router options that follow from them.

Every option of the installed SGLang server is a flag `--sglang-<name>`, and every option of the installed router a flag
`--router-<name>`; they are handed on when given. The common ones (`SERVER_FLAGS`) are always registered; the others are
read from SGLang only when one of them is on the command line, because importing its definitions takes seconds. What slime
controls itself (model path, ports, seed, tensor-parallel size, ...) has no flag. On a machine without a GPU the flags of
`default_cpu_options` come first and anything given here replaces them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from slime.backends.sglang_utils.owned_process import check_port_free
from slime.backends.sglang_utils.server import default_cpu_options
from slime.backends.sglang_utils.sglang_config import resolve_sglang_config
from slime.utils.arguments.parser import FlagError

logger = logging.getLogger(__name__)

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
# Attributes with the servers' prefix that are ours.
_NOT_FOR_SERVERS = frozenset(
    "router_ip router_port router_request_timeout_secs server_concurrency config startup_timeout_secs log_dir tp_size "
    "model_routers".split()
)
# Server options that slime sets itself.
CONTROLLED = frozenset(
    "model-path config trust-remote-code random-seed enable-memory-saver tp-size tensor-parallel-size port host nnodes "
    "node-rank dist-init-addr gpu-id-step base-gpu-id nccl-port skip-server-warmup enable-return-routed-experts".split()
)
ROUTER_DEFAULTS: dict[str, Any] = {
    "policy": "cache_aware",
    "log-level": "warn",
    "balance-abs-threshold": 10,
    "balance-rel-threshold": 1.2,
}
# Router options that slime sets itself, or that belong to another way of running it.
ROUTER_CONTROLLED = frozenset(
    "host port prometheus-port prometheus-host request-timeout-secs worker-urls prefill decode pd-disaggregation "
    "mini-lb disable-circuit-breaker disable-health-check".split()
)


def add_sglang_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where the router is, how it is used, and every option of the installed sglang-router."""
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
    for action in _router_actions():
        name = action.option_strings[0].removeprefix("--")
        _add_like(group, f"--router-{name}", action, ROUTER_DEFAULTS.get(name), f"passed to the router as --{name}")


def _router_actions() -> list[argparse.Action]:
    from sglang_router.router_args import RouterArgs

    scratch = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(scratch)
    return [a for a in scratch._actions if a.option_strings[0].removeprefix("--") not in ROUTER_CONTROLLED]


def _add_like(group: Any, flag: str, action: argparse.Action, default: Any, text: str) -> None:
    """Registers `flag` as `action` takes its value, but None unless given, and with values still as simple types."""
    if flag in group._option_string_actions:
        return
    if action.nargs == 0:
        group.add_argument(flag, action="store_true", default=default, help=text)
        return
    kind = action.type if action.type in (int, float, str) else str
    # The router lists some of its choices in another order in every process.
    choices = sorted(action.choices) if action.choices and kind is action.type else None
    group.add_argument(flag, type=kind, nargs=action.nargs, choices=choices, default=default, help=text)


def add_sglang_arguments(parser: argparse.ArgumentParser, all_flags: bool = False) -> None:
    """Adds the flags of this backend to slime's parser; `all_flags` also those that only the installed SGLang knows."""
    add_sglang_router_arguments(parser)
    group = parser.add_argument_group("sglang servers", "options of every engine")
    group.add_argument(
        "--sglang-server-concurrency", type=int, default=512, help="requests in flight per engine at most"
    )
    group.add_argument(
        "--prefill-num-servers", type=int, help="engines that only prefill; all others then only decode"
    )
    group.add_argument("--sglang-config", type=str, help="YAML file with several models or groups of engines")
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
    if all_flags:
        for action in _server_actions():
            for option in action.option_strings:
                name = option.removeprefix("--")
                if option.startswith("--") and name not in CONTROLLED:
                    _add_like(group, f"--sglang-{name}", action, None, f"passed to every SGLang server as --{name}")


def _server_actions() -> list[argparse.Action]:
    """Every option of the installed SGLang. Importing its definitions takes seconds."""
    from sglang.srt.server_args import ServerArgs

    scratch = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(scratch)
    return scratch._actions


def needs_all_flags(argv: Sequence[str]) -> bool:
    """Whether the command line has a `--sglang-` flag that is not among the common ones."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_sglang_arguments(parser)
    flags = {word.split("=", 1)[0] for word in argv if word.startswith("--sglang-")}
    return bool(flags - set(parser._option_string_actions))


def sglang_parse_args() -> argparse.Namespace:
    """Only the flags of this backend, from the command line; everything else on it is ignored."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_sglang_arguments(parser, all_flags=needs_all_flags(sys.argv[1:]))
    return parser.parse_known_args()[0]


def validate_sglang_args(args: argparse.Namespace) -> None:
    """Checks the flags and derives `args.sglang_tp_size`.

    Raises ValueError, for parallel sizes that do not fit AssertionError; both name flag, value and remedy.
    """
    for flag in ("sglang_server_concurrency", "sglang_startup_timeout_secs", "sglang_router_request_timeout_secs"):
        if getattr(args, flag, 1) <= 0:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: give a number above 0")
    _check_router_port(args)
    validate_args(args)
    _read_models(args)


# The name of the public interface.
def validate_args(args: argparse.Namespace) -> None:
    """The rules of the public interface, without a look at files and ports. Sets `args.sglang_tp_size`; an IPv6 router gets `[...]`.

    Raises ValueError for flags that exclude each other, AssertionError for parallel sizes that do not fit.
    """
    ip = getattr(args, "sglang_router_ip", None)
    if ip is not None and ":" in ip.strip("[]"):
        args.sglang_router_ip = f"[{ip.strip('[]')}]"
    _validate_parallel_sizes(args)
    config, prefill = getattr(args, "sglang_config", None), getattr(args, "prefill_num_servers", None)
    if config is not None and prefill is not None:
        raise FlagError("--sglang-config and --prefill-num-servers exclude each other: list the groups in the file")
    if getattr(args, "rollout_external", False) and (config is not None or prefill is not None):
        raise FlagError("--rollout-external-engine-addrs: the engines exist, --sglang-config cannot shape them")


def _check_router_port(args: argparse.Namespace) -> None:
    ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if ip is not None and port is None:
        raise ValueError(f"--sglang-router-ip {ip} needs --sglang-router-port as well")
    starts_router = ip is None and not getattr(args, "debug_train_only", False)
    if starts_router and port is not None:
        try:
            check_port_free("127.0.0.1", port)
        except ValueError as error:
            raise ValueError(f"--sglang-router-port {port}: {error}") from None


def _read_models(args: argparse.Namespace) -> None:
    """Reads `--sglang-config` now, so that a mistake in it is found before anything starts."""
    config, prefill = getattr(args, "sglang_config", None), getattr(args, "prefill_num_servers", None)
    if config is not None or prefill is not None:
        models = resolve_sglang_config(args).models
        if not any(model.update_weights for model in models) and not args.debug_rollout_only:
            logger.warning("--sglang-config %s: no model has update_weights, so none follows the trainer", config)


def _validate_parallel_sizes(args: argparse.Namespace) -> None:
    for short, long in _ALIASES.items():
        _unify(args, short, long)
    gpus, pipeline = args.rollout_num_gpus_per_engine, getattr(args, "sglang_pp_size", None) or 1
    if not getattr(args, "use_gpu", True) and gpus != 1:
        raise ValueError(
            f"--rollout-num-gpus-per-engine is {gpus}: without a GPU an engine is one process, give 1 "
            "(more engines: --rollout-num-gpus)"
        )
    assert (
        gpus % pipeline == 0
    ), f"--rollout-num-gpus-per-engine {gpus} is not divisible by --sglang-pp-size {pipeline}: change one of them"
    data = getattr(args, "sglang_dp_size", None) or 1
    assert data == 1 or getattr(args, "sglang_enable_dp_attention", False), (
        f"--sglang-dp-size {data} needs --sglang-enable-dp-attention "
        "(for independent replicas use more engines: --rollout-num-gpus)"
    )
    args.sglang_tp_size = gpus // pipeline


_ALIASES = {
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
    "sglang_moe_dp_size": "sglang_moe_data_parallel_size",
}


def _unify(args: argparse.Namespace, short: str, long: str) -> None:
    """Both spellings of a size hold the same value afterwards; the short one wins. A size without a flag stays without."""
    if not (hasattr(args, short) or hasattr(args, long)):
        return
    value = getattr(args, short, None)
    if value is None:
        value = getattr(args, long, None)
    setattr(args, short, value)
    setattr(args, long, value)


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
    return options | _given(
        args, "sglang_", _NOT_FOR_SERVERS | {long.removeprefix("sglang_") for long in _ALIASES.values()}
    )


def _given(args: argparse.Namespace, prefix: str, ours: Iterable[str]) -> dict[str, Any]:
    """Options by name (dashes) of the attributes with a prefix that are set; `ours` are names we read ourselves."""
    own = set(ours)
    return {
        name.removeprefix(prefix).replace("_", "-"): value
        for name, value in vars(args).items()
        if name.startswith(prefix) and value is not None and name.removeprefix(prefix) not in own
    }


def router_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options for `Router`."""
    return _given(args, "router_", ()) | {"request-timeout-secs": args.sglang_router_request_timeout_secs}


def log_dir(args: argparse.Namespace) -> str:
    """Folder for the logs of engines and router."""
    return args.sglang_log_dir or os.path.join(tempfile.gettempdir(), f"slime-sglang-{os.getuid()}")
