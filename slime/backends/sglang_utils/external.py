"""Engines that were started by somebody else (`--rollout-external-engine-addrs host:port ...`).

Input: their addresses; everything else is asked of `/server_info`. Invariants: we register them with our router and
send them weights, but never start, restart, offload or end them. Left out: starting the router (`slime/ray`).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.errors import EngineError

LOGGER = logging.getLogger(__name__)


@dataclass
class ExternalEngineInfo:
    """What an engine says about itself. `num_gpus`: ranks it brings to a weight-update group."""

    url: str
    host: str
    port: int
    worker_type: str
    num_gpus: int
    disaggregation_bootstrap_port: int | None = None
    server_info: dict[str, Any] = field(default_factory=dict)

    @property
    def is_pd_worker(self) -> bool:
        """Whether the engine only prefills or only decodes."""
        return self.worker_type in ("prefill", "decode")

    @property
    def parallel_config(self) -> dict[str, int]:
        """Parallel sizes of the engine (`tp_size`, `pp_size`, `dp_size`, `ep_size`), 1 where it does not say."""
        return {name: int(self.server_info.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size", "ep_size")}

    def to_dict(self) -> dict[str, Any]:
        """Plain form, for `args`."""
        return asdict(self)


def normalize_external_engine_addr(addr: str) -> str:
    """`host:port` or `http://host:port` as `http://host:port`. Raises ValueError for another scheme or no port."""
    text = addr.strip().rstrip("/")
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme != "http":
        raise ValueError(f"--rollout-external-engine-addrs {addr}: only http is supported, not {parts.scheme}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"--rollout-external-engine-addrs {addr}: {error}") from error
    if not parts.hostname or port is None:
        raise ValueError(f"--rollout-external-engine-addrs {addr}: give host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


def external_engine_init_kwargs(info: ExternalEngineInfo) -> dict[str, Any]:
    """Arguments of `SGLangEngine.init` for this engine."""
    return {
        "dist_init_addr": None,
        "port": info.port,
        "nccl_port": None,
        "host": info.host,
        "disaggregation_bootstrap_port": info.disaggregation_bootstrap_port,
    }


def get_server_info(url: str, timeout: float = 30.0) -> dict[str, Any]:
    """`/server_info` of an engine (`/get_server_info` of older ones). Raises EngineError."""
    try:
        return server_control.request("GET", url, "/server_info", timeout_s=timeout)
    except EngineError as error:
        if error.status != 404:
            raise
        return server_control.request("GET", url, "/get_server_info", timeout_s=timeout)


def discover_external_engines(addrs: list[str], timeout: float = 30.0) -> list[ExternalEngineInfo]:
    """Asks every engine who it is, in the order of the addresses. Raises ValueError for a double address, EngineError."""
    urls = [normalize_external_engine_addr(addr) for addr in addrs]
    if len(set(urls)) != len(urls):
        raise ValueError(f"--rollout-external-engine-addrs: an address is given twice: {urls}")
    return [_describe(url, get_server_info(url, timeout)) for url in urls]


def _describe(url: str, info: dict[str, Any]) -> ExternalEngineInfo:
    parts = urlsplit(url)
    worker_type = _worker_type(info)
    bootstrap = info.get("disaggregation_bootstrap_port") if worker_type == "prefill" else None
    return ExternalEngineInfo(
        url=url,
        host=str(parts.hostname),
        port=int(parts.port or 0),
        worker_type=worker_type,
        num_gpus=_num_gpus(info),
        disaggregation_bootstrap_port=bootstrap,
        server_info=info,
    )


def _worker_type(info: dict[str, Any]) -> str:
    if info.get("encoder_only"):
        return "encoder"
    mode = info.get("disaggregation_mode")
    return str(mode) if mode in ("prefill", "decode") else "regular"


def _num_gpus(info: dict[str, Any]) -> int:
    for name in ("num_gpus", "num_gpus_per_engine"):
        if info.get(name):
            return int(info[name])
    return int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)


def apply_external_engine_info_to_args(args: Namespace, logger: logging.Logger | None = None) -> None:
    """Sets `rollout_external_engine_infos`, `rollout_num_engines`, `rollout_num_gpus` from the engines.

    Raises ValueError when an engine cannot be asked; the error names it.
    """
    try:
        infos = discover_external_engines(args.rollout_external_engine_addrs)
    except EngineError as error:
        raise ValueError(f"--rollout-external-engine-addrs: {error}") from error
    args.rollout_external_engine_infos = [info.to_dict() for info in infos]
    args.rollout_num_engines = len(infos)
    args.rollout_num_gpus = sum(info.num_gpus for info in infos)
    (logger or LOGGER).info("external engines: %s", [(info.url, info.worker_type, info.num_gpus) for info in infos])


def external_engine_infos_from_args(args: Namespace) -> list[ExternalEngineInfo]:
    """The engines that `apply_external_engine_info_to_args` found."""
    return [ExternalEngineInfo(**info) for info in args.rollout_external_engine_infos]


@dataclass
class ExternalRolloutServer:
    """The external engines as one model; everything that would start, free or end them does nothing."""

    engines: list[Any]
    engine_gpu_counts: list[int]
    engine_gpu_offsets: list[int]
    engine_parallel_configs: list[dict[str, int]]
    router_ip: str | None = None
    router_port: int | None = None
    model_name: str = "default"
    update_weights: bool = True
    num_new_engines: int = 0
    server_groups: list[Any] = field(default_factory=list)
    router: Any = field(default=None, repr=False)  # ours, when we had to start one

    @property
    def all_engines(self) -> list[Any]:
        """Same as `engines`."""
        return self.engines

    def recover(self) -> None:
        """Nothing: a dead engine is its owner's to restart."""

    def offload(self) -> None:
        """Nothing: the engines are not on our devices."""

    def onload(self, tags: list[str] | None = None) -> None:
        """Nothing."""

    def onload_weights(self) -> None:
        """Nothing."""

    def onload_kv(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Forgets the handles, and ends the router if it is ours; the engines go on."""
        self.engines = []
        if self.router is not None:
            self.router.stop()
            self.router = None


def start_external_rollout_servers(
    args: Namespace, *, start_router: Callable[..., tuple[str, int]], create_engine: Callable[..., Any] | None = None
) -> tuple[dict[str, ExternalRolloutServer], list[Any]]:
    """Starts a router and registers the engines; returns the servers by name and references that tell when it is done.

    Args:
        start_router: `(args, has_pd_disaggregation=...) -> (host, port)`.
        create_engine: `(args, number, info, router_ip, router_port) -> (handle, reference)`; without one the engines are
            registered only and there is no handle for weight updates.
    """
    infos = external_engine_infos_from_args(args)
    host, port = start_router(args, has_pd_disaggregation=any(info.is_pd_worker for info in infos))
    args.sglang_router_ip, args.sglang_router_port = host, port
    args.sglang_model_routers = {"default": (host, port)}
    offset, offsets = 0, []
    for info in infos:
        offsets.append(offset)
        offset += info.num_gpus
    engines, references = [], []
    for number, info in enumerate(infos):
        if create_engine is not None:
            engine, reference = create_engine(args, number, info, host, port)
            engines.append(engine)
            references.append(reference)
    server = ExternalRolloutServer(
        engines=engines,
        engine_gpu_counts=[info.num_gpus for info in infos],
        engine_gpu_offsets=offsets,
        engine_parallel_configs=[info.parallel_config for info in infos],
        router_ip=host,
        router_port=port,
        num_new_engines=len(engines),
    )
    return {"default": server}, references
