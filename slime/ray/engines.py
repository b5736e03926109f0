"""The inference side of a run on Ray: one router, one actor per engine, each owning one server process.

Inputs: `args` and the engines' bundles. Invariants: an engine is registered with the router only when it generates; all
engines start at the same time; whatever was started here is ended by `RolloutServer.stop`, and a router named by
`--sglang-router-ip` is left alone. On a single node everything listens on 127.0.0.1 only.
Left out: several models, prefill/decode groups, engines over several nodes.
"""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.backends.sglang_utils.arguments import log_dir, router_options
from slime.backends.sglang_utils.router import Router
from slime.backends.sglang_utils.sglang_engine import LOCALHOST, SGLangEngine
from slime.ray.ray_actor import RayActor
from slime.ray.train_actor import get_local_gpu_id
from slime.ray.utils import add_default_ray_env_vars, as_actor, wait_all
from slime.utils.http_utils import find_available_port, get_rollout_num_engines
from slime.utils.misc import get_current_node_ip

logger = logging.getLogger(__name__)

ROUTER_PORTS = range(3000, 4000)
# A server binds its port seconds after it was found free, so runs on one machine start looking at different places,
# and so do the engines of a run, which look at the same time.
ENGINE_PORTS = range(15000, 25000)
PORTS_PER_ENGINE = 50
ENGINE_SHARE = 0.2
STOP_TIMEOUT_S = 15.0


class EngineActor(RayActor, SGLangEngine):
    """An engine that finds its own port on the node it landed on."""

    def start(self, router_ip: str, router_port: int, base_port: int, local: bool) -> str:
        """Start the server and register it; returns its url. `local`: listen on the loopback interface only."""
        if self.base_gpu_id is not None:
            # SGLang counts among the devices this process can see, Ray among all of the machine.
            self.base_gpu_id = get_local_gpu_id()
        port = find_available_port(base_port + PORTS_PER_ENGINE * self.rank)
        host = LOCALHOST if local else get_current_node_ip()
        return self.init(None, port, None, host, router_ip=router_ip, router_port=router_port)


@dataclass
class RolloutServer:
    """The engines of one model behind one router. `num_new_engines`: those the trainer has not connected to yet."""

    engines: list[Any]
    router_ip: str
    router_port: int
    num_gpus_per_engine: int = 1
    gpu_offset: int = 0
    model_name: str = "default"
    update_weights: bool = True
    num_new_engines: int = 0
    router: Router | None = field(default=None, repr=False)

    @property
    def engine_gpu_counts(self) -> list[int]:
        """Devices of each engine."""
        return [self.num_gpus_per_engine] * len(self.engines)

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """Position of each engine's first device among all bundles."""
        return [self.gpu_offset + i * self.num_gpus_per_engine for i in range(len(self.engines))]

    @property
    def engine_parallel_configs(self) -> list[dict[str, Any]]:
        """Parallel sizes of each engine."""
        return [{"tp_size": self.num_gpus_per_engine} for _ in self.engines]

    def offload(self) -> None:
        """Release device memory."""
        wait_all([engine.release_memory_occupation.remote() for engine in self.engines])

    def onload(self, tags: list[str] | None = None) -> None:
        """Take device memory back."""
        wait_all([engine.resume_memory_occupation.remote(tags) for engine in self.engines])

    def stop(self) -> None:
        """End the engines, then the router if it is ours. Engines that do not answer in time are killed."""
        leaving = {engine.shutdown.remote(): engine for engine in self.engines}
        if leaving:
            _, late = ray.wait(list(leaving), num_returns=len(leaving), timeout=STOP_TIMEOUT_S)
            if late:
                logger.warning("%d engines did not stop within %s s", len(late), STOP_TIMEOUT_S)
            for engine in self.engines:
                ray.kill(engine)
        self.engines = []
        if self.router is not None:
            self.router.stop()
            self.router = None


def start_rollout_servers(args: Namespace, pg: tuple[Any, list[int], list[int]]) -> dict[str, RolloutServer]:
    """Start router and engines; returns the servers by model name. Blocks until all engines generate.

    Sets `args.sglang_router_ip`, `args.sglang_router_port`, `args.sglang_model_routers`.
    """
    local = len(ray.nodes()) == 1
    router = start_router(args, local)
    logger.info("starting %d engines, logs are in %s", get_rollout_num_engines(args), log_dir(args))
    engines = [_create_engine(args, pg, rank) for rank in range(get_rollout_num_engines(args))]
    server = RolloutServer(
        engines=engines,
        router_ip=args.sglang_router_ip,
        router_port=args.sglang_router_port,
        num_gpus_per_engine=args.rollout_num_gpus_per_engine,
        gpu_offset=(
            0 if args.colocate or args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
        ),
        num_new_engines=len(engines),
        router=router,
    )
    base_port = random.SystemRandom().choice(ENGINE_PORTS)
    wait_all([engine.start.remote(server.router_ip, server.router_port, base_port, local) for engine in engines])
    args.sglang_model_routers = {server.model_name: (server.router_ip, server.router_port)}
    return {server.model_name: server}


def start_router(args: Namespace, local: bool) -> Router | None:
    """Start the router unless `--sglang-router-ip` names a running one; its address is in `args` afterwards."""
    if args.sglang_router_ip is not None:
        return None
    host = LOCALHOST if local else get_current_node_ip()
    port = args.sglang_router_port or find_available_port(random.SystemRandom().choice(ROUTER_PORTS))
    router = Router(host, port, Path(log_dir(args)) / f"router_{port}.log", router_options(args))
    router.start()
    router.wait_ready()
    args.sglang_router_ip, args.sglang_router_port = host, port
    return router


def _create_engine(args: Namespace, pg: tuple[Any, list[int], list[int]], rank: int) -> Any:
    group, bundle_indices, devices = pg
    first = rank * args.rollout_num_gpus_per_engine
    actor = as_actor(
        EngineActor,
        num_cpus=ENGINE_SHARE,
        num_gpus=ENGINE_SHARE if args.use_gpu else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle_indices[first]),
        runtime_env={"env_vars": add_default_ray_env_vars()},
    )
    return actor.remote(args, rank, base_gpu_id=devices[first] if args.use_gpu else None)
