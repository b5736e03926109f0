"""One rollout engine of a run: a server process, its place in the router, and the control calls on it.

The class is plain: `slime.ray` wraps it into an actor. It owns the server it starts, so the server ends with the actor;
an external engine (`args.rollout_external`) is only registered, and left running.
All methods block. Configuration errors are ValueError or FileNotFoundError, everything later ServerStartError,
EngineError or TimeoutError.

Leaves out: engines over several nodes; encoder engines; serialising tensors for shared-memory updates.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import router, server_control
from slime.backends.sglang_utils.arguments import log_dir, server_options
from slime.backends.sglang_utils.errors import EngineError
from slime.backends.sglang_utils.owned_process import base_url
from slime.backends.sglang_utils.server import ServerSpec, SGLangServer
from slime.utils.http_utils import terminate_process

logger = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"
LAUNCH_TIMEOUT_S = 600.0
POLL_S = 2.0
WORKER_TYPES = ("regular", "prefill", "decode")
# Options of an external engine that must be as ours, for its log-probs and weights to be usable.
CHECKED_OPTIONS = ("trust-remote-code", "quantization", "kv-cache-dtype")


def get_base_gpu_id(args: argparse.Namespace, rank: int) -> int:
    """First GPU, on its node, of engine number `rank`; in a run with its own training GPUs engines come behind those."""
    per_node = args.num_gpus_per_node
    offset = 0
    if not (args.colocate or args.debug_rollout_only):
        offset = args.actor_num_nodes * args.actor_num_gpus_per_node
    return int((offset + rank * args.rollout_num_gpus_per_engine) % per_node)


def launch_server_process(server_args: Any) -> multiprocessing.Process:
    """A server from SGLang's own `ServerArgs`, in a process of ours; returns when it generates.

    Only the first node of an engine answers requests, so for another `node_rank` it returns at once. The caller ends the process
    (`http_utils.terminate_process`). Raises RuntimeError when it ends before it is ready, TimeoutError after ten minutes.
    """
    spec = ServerSpec(
        server_args.model_path, server_args.host, server_args.port, {"device": server_args.device}, Path()
    )
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(server_args,))
    inherited = dict(os.environ)
    os.environ.update(spec.environment(inherited))
    try:
        process.start()  # an interpreter of its own, which finds the stand-ins of a CPU machine through its environment
    finally:
        os.environ.clear()
        os.environ.update(inherited)
    url, deadline = base_url(server_args.host, server_args.port), time.monotonic() + LAUNCH_TIMEOUT_S
    while server_args.node_rank == 0 and not server_control.health_generate(url):
        if not process.is_alive():
            raise RuntimeError(f"SGLang server {url} ended with status {process.exitcode} before it was ready")
        if time.monotonic() > deadline:
            terminate_process(process)  # type: ignore[arg-type]
            raise TimeoutError(f"SGLang server {url} was not ready after {LAUNCH_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return process  # type: ignore[return-value]


def _serve(server_args: Any) -> None:
    # multiprocessing gives a child its parent's search path in the place of the one from the environment.
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    from sglang.launch_server import run_server

    run_server(server_args)


class SGLangEngine:
    """An engine; nothing runs before `init`.

    Args:
        args: the run's arguments.
        rank: number of this engine in the run.
        worker_type: `regular`, or `prefill` / `decode` behind a router that pairs them.
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
        if worker_type not in WORKER_TYPES:
            raise ValueError(
                f"worker type {worker_type!r} is not available in this version: use one of {WORKER_TYPES}"
            )
        self.worker_type = worker_type
        self.args, self.rank, self.base_gpu_id = args, rank, base_gpu_id
        self.sglang_overrides = sglang_overrides or {}
        self.num_gpus_per_engine = num_gpus_per_engine or args.rollout_num_gpus_per_engine
        self.server: SGLangServer | None = None
        self.external_url: str | None = None
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
        if (disaggregation_bootstrap_port is not None) != (self.worker_type == "prefill"):
            raise ValueError("disaggregation_bootstrap_port belongs to a prefill engine, and to no other")
        if getattr(self.args, "rollout_external", False):
            self._attach(base_url(host or LOCALHOST, port))
        else:
            spec = self._spec(host or LOCALHOST, port, dist_init_addr, nccl_port, disaggregation_bootstrap_port)
            self.server = SGLangServer(spec)
            self.server.start()
        try:
            if self.server is not None:
                self.server.wait_ready(self.args.sglang_startup_timeout_secs)
            if router_ip is not None and router_port is not None:
                router_url = base_url(router_ip, router_port)
                router.add_worker(router_url, self.get_url(), **self._router_role(disaggregation_bootstrap_port))
                self.router_url = router_url
        except (RuntimeError, TimeoutError):
            self.shutdown()
            raise
        logger.info("engine %d is ready at %s", self.rank, self.get_url())
        return self.get_url()

    def _attach(self, url: str) -> None:
        """Takes a running server as this engine. Raises ValueError when it cannot be used."""
        if not server_control.health_generate(url, timeout_s=self.args.sglang_startup_timeout_secs):
            raise ValueError(f"--rollout-external-engine-addrs: {url} does not generate; is the server up?")
        self.external_url = url
        given, wanted = server_control.request("GET", url, "/server_info"), server_options(self.args)
        for name in CHECKED_OPTIONS:
            theirs = given.get(name.replace("-", "_"))
            if name in wanted and theirs is not None and theirs != wanted[name]:
                raise ValueError(f"external engine {url}: --{name} is {theirs!r}, this run needs {wanted[name]!r}")

    def _router_role(self, bootstrap_port: int | None) -> dict[str, Any]:
        if self.worker_type == "regular":
            return {}
        return {"worker_type": self.worker_type, "bootstrap_port": bootstrap_port}

    def _spec(
        self,
        host: str,
        port: int,
        dist_init_addr: str | None,
        nccl_port: int | None,
        bootstrap_port: int | None = None,
    ) -> ServerSpec:
        options = server_options(self.args)
        options["tp-size"] = self.num_gpus_per_engine // (self.args.sglang_pp_size or 1)
        options |= {"dist-init-addr": dist_init_addr, "nccl-port": nccl_port, "base-gpu-id": self.base_gpu_id}
        if self.worker_type != "regular":
            options |= {"disaggregation-mode": self.worker_type, "disaggregation-bootstrap-port": bootstrap_port}
        overrides = {name.replace("_", "-"): value for name, value in self.sglang_overrides.items()}
        model_path = overrides.pop("model-path", None) or self.args.hf_checkpoint
        options |= overrides
        return ServerSpec(
            model_path=str(model_path),
            host=host,
            port=port,
            options=options,
            log_path=Path(log_dir(self.args)) / f"engine_{self.rank}_{port}.log",
            seed=self.args.seed + self.rank,
        )

    def get_url(self) -> str:
        """Base url of the server. Raises RuntimeError before `init`."""
        if self.external_url is not None:
            return self.external_url
        if self.server is None:
            raise RuntimeError(f"engine {self.rank} has no server: call init() first")
        return self.server.url

    def health_generate(self, timeout: float = 5.0) -> bool:
        """Whether the server generates within `timeout` seconds."""
        return server_control.health_generate(self.get_url(), timeout)

    def shutdown(self) -> None:
        """Leaves the router and ends the server's processes; may be called again. An external engine goes on."""
        self.external_url = None
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

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """See `server_control.update_weights_from_tensor`."""
        server_control.update_weights_from_tensor(
            self.get_url(), serialized_named_tensors, load_format, flush_cache, weight_version
        )

    def check_weights(self, action: str) -> dict[str, Any]:
        """See `server_control.check_weights`."""
        return server_control.check_weights(self.get_url(), action)

    def pull_weights(self, target_version: int) -> str:
        """Brings the copy of the model on this host to `target_version` (0: the original) and returns its directory.

        The server goes on meanwhile; `update_weights_from_disk` loads the directory. Raises ValueError for a version that is
        missing, does not follow the local one, or whose checksum is wrong; the copy then stays as it was.
        """
        # Imported here: the owner of an engine needs torch for nothing else.
        from slime.backends.common.delta_files import LocalCheckpoint

        local = LocalCheckpoint(self.args.update_weight_local_checkpoint_dir, self.args.hf_checkpoint)
        return str(local.pull(self.args.update_weight_disk_dir, target_version))

    def post_process_weights(
        self, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> None:
        """Asks a server with the `/post_process_weights` extension to undo or redo its quantisation.

        Raises EngineError (404) on a server without it; SGLang itself does this inside the update session.
        """
        payload = {
            "restore_weights_before_load": restore_weights_before_load,
            "post_process_quantization": post_process_quantization,
        }
        server_control.request(
            "POST", self.get_url(), "/post_process_weights", payload, server_control.UPDATE_TIMEOUT_S
        )

    def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: list[str] | None = None,
        profile_by_stage: bool = False,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
    ) -> None:
        """Starts the server's profiler."""
        payload = {
            "output_dir": output_dir,
            "start_step": start_step,
            "num_steps": num_steps,
            "activities": activities,
            "profile_by_stage": profile_by_stage,
            "with_stack": with_stack,
            "record_shapes": record_shapes,
        }
        given = {name: value for name, value in payload.items() if value is not None}
        server_control.request("POST", self.get_url(), "/start_profile", given)

    def stop_profile(self) -> None:
        """Stops the server's profiler, which then writes its files."""
        server_control.request("POST", self.get_url(), "/stop_profile", {}, server_control.UPDATE_TIMEOUT_S)

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
