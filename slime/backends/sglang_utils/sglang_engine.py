"""One rollout engine of a run: a server process, its place in the router, and the control calls on it.

The class is plain: `slime.ray` wraps it into an actor. It owns the server it starts, so the server ends with the actor.
All methods block. Configuration errors are ValueError or FileNotFoundError, everything later ServerStartError,
EngineError or TimeoutError.

Leaves out: tensor (shared memory) updates, engines over several nodes, and worker types other than `regular`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import router, server_control
from slime.backends.sglang_utils.arguments import log_dir, server_options
from slime.backends.sglang_utils.errors import EngineError
from slime.backends.sglang_utils.owned_process import base_url
from slime.backends.sglang_utils.server import ServerSpec, SGLangServer

logger = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"


class SGLangEngine:
    """An engine; nothing runs before `init`.

    Args:
        args: the run's arguments.
        rank: number of this engine in the run.
        worker_type: only `regular`.
        base_gpu_id: first GPU of the engine on its node; None on CPU or when the visible devices are already its own.
        sglang_overrides: server options that win over those of `args`.
        num_gpus_per_engine: tensor-parallel size times pipeline size; None takes it from `args`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        rank: int,
        worker_type: str = "regular",
        base_gpu_id: int | None = None,
        sglang_overrides: dict[str, Any] | None = None,
        num_gpus_per_engine: int | None = None,
    ) -> None:
        if worker_type != "regular":
            raise ValueError(f"worker type {worker_type!r} is not available in this version: use 'regular'")
        self.args, self.rank, self.base_gpu_id = args, rank, base_gpu_id
        self.sglang_overrides = sglang_overrides or {}
        self.num_gpus_per_engine = num_gpus_per_engine or args.rollout_num_gpus_per_engine
        self.server: SGLangServer | None = None
        self.router_url: str | None = None

    def init(
        self,
        dist_init_addr: str | None,
        port: int,
        nccl_port: int | None,
        host: str | None = None,
        disaggregation_bootstrap_port: int | None = None,
        router_ip: str | None = None,
        router_port: int | None = None,
    ) -> str:
        """Starts the server, waits until it generates, registers it with the router. Returns its url.

        Args:
            dist_init_addr: `host:port` where the engine's own ranks meet, or None for SGLang's choice.
            port, host: where the server listens; host is 127.0.0.1 when not given.
            nccl_port: port of the engine's own process group, or None for a free one.
            router_ip, router_port: the router to register with; None registers nowhere.
        """
        if disaggregation_bootstrap_port is not None:
            raise ValueError("disaggregation_bootstrap_port: prefill/decode engines are not available in this version")
        self.server = SGLangServer(self._spec(host or LOCALHOST, port, dist_init_addr, nccl_port))
        self.server.start()
        try:
            self.server.wait_ready(self.args.sglang_startup_timeout_secs)
            if router_ip is not None and router_port is not None:
                router_url = base_url(router_ip, router_port)
                router.add_worker(router_url, self.server.url)
                self.router_url = router_url
        except (RuntimeError, TimeoutError):
            self.shutdown()
            raise
        logger.info("engine %d is ready at %s", self.rank, self.server.url)
        return self.server.url

    def _spec(self, host: str, port: int, dist_init_addr: str | None, nccl_port: int | None) -> ServerSpec:
        options = server_options(self.args)
        options["tp-size"] = self.num_gpus_per_engine // (self.args.sglang_pp_size or 1)
        options |= {"dist-init-addr": dist_init_addr, "nccl-port": nccl_port, "base-gpu-id": self.base_gpu_id}
        options |= {name.replace("_", "-"): value for name, value in self.sglang_overrides.items()}
        return ServerSpec(
            model_path=str(self.args.hf_checkpoint),
            host=host,
            port=port,
            options=options,
            log_path=Path(log_dir(self.args)) / f"engine_{self.rank}_{port}.log",
            seed=self.args.seed + self.rank,
        )

    def get_url(self) -> str:
        """Base url of the server. Raises RuntimeError before `init`."""
        if self.server is None:
            raise RuntimeError(f"engine {self.rank} has no server: call init() first")
        return self.server.url

    def health_generate(self, timeout: float = 5.0) -> bool:
        """Whether the server generates within `timeout` seconds."""
        return server_control.health_generate(self.get_url(), timeout)

    def shutdown(self) -> None:
        """Leaves the router and ends the server's processes; may be called again."""
        server, self.server = self.server, None
        if server is None:
            return
        if self.router_url is not None:
            try:
                router.remove_worker(self.router_url, server.url)
            except (EngineError, TimeoutError) as error:
                # The router may have ended first; the server must end in any case.
                logger.warning("engine %d could not leave the router: %s", self.rank, error)
        server.stop()

    def pause_generation(self, mode: str = "abort") -> None:
        """See `server_control.pause_generation`."""
        server_control.pause_generation(self.get_url(), mode)

    def continue_generation(self) -> None:
        """See `server_control.continue_generation`."""
        server_control.continue_generation(self.get_url())

    def flush_cache(self) -> None:
        """See `server_control.flush_cache`."""
        server_control.flush_cache(self.get_url())

    def abort_all(self) -> None:
        """See `server_control.abort_all`."""
        server_control.abort_all(self.get_url())

    def begin_weight_update(self) -> None:
        """See `server_control.begin_weight_update`."""
        server_control.begin_weight_update(self.get_url())

    def end_weight_update(self) -> None:
        """See `server_control.end_weight_update`."""
        server_control.end_weight_update(self.get_url())

    def get_weight_version(self) -> str:
        """See `server_control.get_weight_version`."""
        return server_control.get_weight_version(self.get_url())

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """See `server_control.init_weights_update_group`."""
        server_control.init_weights_update_group(
            self.get_url(), master_address, master_port, rank_offset, world_size, group_name, backend
        )

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leaves the group; an error is only logged, since the group may never have been made."""
        try:
            server_control.destroy_weights_update_group(self.get_url(), group_name)
        except EngineError as error:
            logger.warning("group %s: %s", group_name, error)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        load_format: str | None = None,
    ) -> None:
        """See `server_control.update_weights_from_distributed`; `dtypes` may be torch dtypes or their names."""
        server_control.update_weights_from_distributed(
            self.get_url(),
            names,
            [str(dtype) for dtype in dtypes],
            shapes,
            group_name,
            flush_cache,
            weight_version,
            load_format,
        )

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, weight_version: str | None = None
    ) -> None:
        """See `server_control.update_weights_from_disk`."""
        server_control.update_weights_from_disk(self.get_url(), model_path, load_format, weight_version)

    def release_memory_occupation(self) -> None:
        """See `server_control.release_memory_occupation`."""
        server_control.release_memory_occupation(self.get_url())

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """See `server_control.resume_memory_occupation`."""
        server_control.resume_memory_occupation(self.get_url(), tags)

    def simulate_crash(self) -> None:
        """Ends the server without telling the router, to test recovery."""
        if self.server is not None:
            self.server.stop()
