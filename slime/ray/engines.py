"""The inference side of a run on Ray: for each model one router and its groups of engines, each owning one server process.

Inputs: `args`, the engines' bundles, and what `--sglang-config` asks for. Invariants: an engine is registered with its model's
router only when it generates; all engines start at the same time; whatever was started here is ended by `RolloutServer.stop`,
and a router named by `--sglang-router-ip` is left alone. On a single node everything listens on 127.0.0.1 only.
Left out: engines over several nodes, encoder engines.
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
from slime.backends.sglang_utils.errors import EngineError
from slime.backends.sglang_utils.external import (
    ExternalEngineInfo,
    ExternalRolloutServer,
    external_engine_init_kwargs,
    start_external_rollout_servers,
)
from slime.backends.sglang_utils.owned_process import base_url
from slime.backends.sglang_utils.router import Router, remove_worker
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, resolve_sglang_config
from slime.backends.sglang_utils.sglang_engine import LOCALHOST, SGLangEngine
from slime.ray.ray_actor import RayActor
from slime.ray.rollout_validation import validate_server_group_gpu_indices
from slime.ray.train_actor import get_local_gpu_id
from slime.ray.utils import add_default_ray_env_vars, as_actor, wait_all
from slime.utils.http_utils import find_available_port
from slime.utils.misc import get_current_node_ip

logger = logging.getLogger(__name__)

ROUTER_PORTS = range(3000, 4000)
# A server binds its port seconds after it was found free, so runs on one machine start looking at different places,
# and so do the engines of a run, which look at the same time.
ENGINE_PORTS = range(15000, 25000)
PORTS_PER_ENGINE = 50
BOOTSTRAP_PORT_DISTANCE = 25
ENGINE_SHARE = 0.2
STOP_TIMEOUT_S = 15.0


class EngineActor(RayActor, SGLangEngine):
    """An engine that finds its own port on the node it landed on."""

    def start(self, router_ip: str, router_port: int, base_port: int, local: bool) -> str:
        """Start the server and register it; returns its url. `local`: listen on the loopback interface only."""
        if self.base_gpu_id is not None:
            # SGLang counts among the devices this process can see, Ray among all of the machine.
            self.base_gpu_id = get_local_gpu_id()
        port = find_available_port(base_port)
        host = LOCALHOST if local else get_current_node_ip()
        prefill = self.worker_type == "prefill"
        bootstrap = find_available_port(port + BOOTSTRAP_PORT_DISTANCE) if prefill else None
        return self.init(None, port, None, host, bootstrap, router_ip=router_ip, router_port=router_port)

    def attach(self, init_kwargs: dict[str, Any], router_ip: str, router_port: int) -> str:
        """Take a running server as this engine (see `SGLangEngine.init`); returns its url."""
        return self.init(**init_kwargs, router_ip=router_ip, router_port=router_port)


@dataclass
class ServerGroup:
    """Equal engines of one model. A slot of `all_engines` is None until its engine is started, and again when it died.

    `gpu_offset`: position of the first GPU among those of all engines; `num_new_engines`: those the trainer has not
    connected to yet; `needs_offload`: the GPUs are shared with the trainer.
    """

    args: Any
    pg: Any
    all_engines: list[Any]
    num_gpus_per_engine: int
    num_new_engines: int
    worker_type: str = "regular"
    rank_offset: int = 0
    gpu_offset: int = 0
    sglang_overrides: dict[str, Any] = field(default_factory=dict)
    needs_offload: bool = False
    model_path: str | None = None
    router_ip: str | None = None
    router_port: int | None = None
    urls: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def nodes_per_engine(self) -> int:
        """Nodes that one engine covers."""
        return max(1, self.num_gpus_per_engine // self.args.num_gpus_per_node)

    @property
    def engines(self) -> list[Any]:
        """The actor that answers for each engine (that of its first node)."""
        return self.all_engines[:: self.nodes_per_engine]

    def parallel_config(self) -> dict[str, Any]:
        """Parallel sizes of an engine of this group."""

        def size(name: str) -> int:
            value = self.sglang_overrides.get(name) or getattr(self.args, f"sglang_{name}", None)
            return int(value or 1)

        pipeline = size("pp_size")
        return {
            "tp_size": self.num_gpus_per_engine // pipeline,
            "pp_size": pipeline,
            "dp_size": size("dp_size"),
            "ep_size": size("ep_size"),
        }

    def start_engines(self, port_cursors: dict[int, int] | None = None) -> tuple[list[Any], dict[int, int]]:
        """Start an engine in every empty slot; returns references that resolve when each generates, and the port cursors.

        `port_cursors`: node number -> where the next engine of the node looks for a port; updated in place.
        Raises ValueError when the engines do not fit on the reserved GPUs, or would cover several nodes.
        """
        cursors = {} if port_cursors is None else port_cursors
        self.num_new_engines = 0
        if self.worker_type == "placeholder" or self.args.debug_train_only:
            return [], cursors
        self._check_placement()
        local = len(ray.nodes()) == 1
        references = []
        for slot, engine in enumerate(self.all_engines):
            if engine is not None:
                continue
            actor = self.all_engines[slot] = self._create_engine(slot)
            node = (self.gpu_offset + slot * self.num_gpus_per_engine) // self.args.num_gpus_per_node
            port = cursors.setdefault(node, random.SystemRandom().choice(ENGINE_PORTS))
            cursors[node] = port + PORTS_PER_ENGINE
            references.append(actor.start.remote(self.router_ip, self.router_port, port, local))
            self.num_new_engines += 1
        return references, cursors

    def _check_placement(self) -> None:
        if self.nodes_per_engine > 1:
            raise ValueError(
                f"an engine of {self.num_gpus_per_engine} GPUs covers several nodes of --num-gpus-per-node "
                f"{self.args.num_gpus_per_node}, which is not available; lower --rollout-num-gpus-per-engine"
            )
        validate_server_group_gpu_indices(
            worker_type=self.worker_type,
            gpu_offset=self.gpu_offset,
            num_gpus_per_engine=self.num_gpus_per_engine,
            num_gpus_per_engine_on_node=self.num_gpus_per_engine,
            num_engines=len(self.all_engines),
            num_available_gpus=len(self.pg[1]),
            rollout_num_gpus=self.args.rollout_num_gpus,
            rollout_num_gpus_per_engine=self.args.rollout_num_gpus_per_engine,
        )

    def _create_engine(self, slot: int) -> Any:
        group, bundle_indices, devices = self.pg
        first = self.gpu_offset + slot * self.num_gpus_per_engine
        actor = as_actor(
            EngineActor,
            num_cpus=ENGINE_SHARE,
            num_gpus=ENGINE_SHARE if self.args.use_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle_indices[first]),
            runtime_env={"env_vars": add_default_ray_env_vars()},
        )
        return actor.remote(
            self.args,
            self.rank_offset + slot,
            worker_type=self.worker_type,
            base_gpu_id=devices[first] if self.args.use_gpu else None,
            sglang_overrides=self.sglang_overrides,
            num_gpus_per_engine=self.num_gpus_per_engine,
        )

    def note_urls(self) -> None:
        """Remember the address of every engine, to take it out of the router should it die."""
        living = {slot: engine for slot, engine in enumerate(self.all_engines) if engine is not None}
        urls = wait_all([engine.get_url.remote() for engine in living.values()])
        self.urls = dict(zip(living, urls, strict=True))

    def on_engine_dropped(self, slot: int) -> None:
        """The engine of this slot died: no further request may go to it."""
        url = self.urls.pop(slot, None)
        if url is None or self.router_ip is None or self.router_port is None:
            return
        try:
            remove_worker(base_url(self.router_ip, self.router_port), url)
        except (EngineError, TimeoutError) as error:
            logger.warning("the dead engine %s could not be taken out of the router: %s", url, error)

    def offload(self) -> None:
        """Release device memory, where the trainer needs it."""
        if self.needs_offload:
            wait_all([engine.release_memory_occupation.remote() for engine in self._living()])

    def onload(self, tags: list[str] | None = None) -> None:
        """Take device memory back."""
        if self.needs_offload:
            wait_all([engine.resume_memory_occupation.remote(tags) for engine in self._living()])

    def _living(self) -> list[Any]:
        return [engine for engine in self.engines if engine is not None]


@dataclass
class RolloutServer:
    """The engines of one model behind one router (which is ended with them when it is ours)."""

    server_groups: list[ServerGroup]
    router_ip: str | None = None
    router_port: int | None = None
    model_name: str = "default"
    update_weights: bool = True
    router: Router | None = field(default=None, repr=False)

    @property
    def engines(self) -> list[Any]:
        """One actor handle for each engine, over all groups."""
        return [engine for group in self.server_groups for engine in group.engines]

    @property
    def all_engines(self) -> list[Any]:
        """All actor handles."""
        return [engine for group in self.server_groups for engine in group.all_engines]

    @property
    def num_new_engines(self) -> int:
        """Engines the trainer has not connected to yet."""
        return sum(group.num_new_engines for group in self.server_groups)

    @num_new_engines.setter
    def num_new_engines(self, value: int) -> None:
        for group in self.server_groups:
            group.num_new_engines = value

    @property
    def engine_gpu_counts(self) -> list[int]:
        """Devices of each engine."""
        return [group.num_gpus_per_engine for group in self.server_groups for _ in group.engines]

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """Position of each engine's first device among those of all engines."""
        return [
            group.gpu_offset + i * group.num_gpus_per_engine
            for group in self.server_groups
            for i in range(len(group.engines))
        ]

    @property
    def engine_parallel_configs(self) -> list[dict[str, Any]]:
        """Parallel sizes of each engine."""
        return [group.parallel_config() for group in self.server_groups for _ in group.engines]

    @property
    def nodes_per_engine(self) -> int:
        """Nodes that one engine covers. Raises ValueError when the groups differ."""
        values = {group.nodes_per_engine for group in self.server_groups}
        if len(values) != 1:
            raise ValueError(f"the server groups of model {self.model_name!r} differ in nodes per engine: {values}")
        return values.pop()

    def recover(self) -> None:
        """Start engines in empty slots and wait until they generate; `num_new_engines` counts them."""
        cursors: dict[int, int] = {}
        for group in self.server_groups:
            if None not in group.all_engines:
                continue
            references, cursors = group.start_engines(cursors)
            wait_all(references)
            group.note_urls()
            logger.info("model %s: %d engines were started again", self.model_name, group.num_new_engines)

    def offload(self) -> None:
        """Release device memory."""
        for group in self.server_groups:
            group.offload()

    def onload(self, tags: list[str] | None = None) -> None:
        """Take device memory back."""
        for group in self.server_groups:
            group.onload(tags)

    def onload_weights(self) -> None:
        """Take back the memory of the weights."""
        self.onload(["weights"])

    def onload_kv(self) -> None:
        """Take back the rest."""
        self.onload(["kv_cache", "cuda_graph"])

    def stop(self) -> None:
        """End the engines, then the router if it is ours. Engines that do not answer in time are killed."""
        living = [engine for engine in self.all_engines if engine is not None]
        if living:
            leaving = [engine.shutdown.remote() for engine in living]
            _, late = ray.wait(leaving, num_returns=len(leaving), timeout=STOP_TIMEOUT_S)
            if late:
                logger.warning("%d engines did not stop within %s s", len(late), STOP_TIMEOUT_S)
            for engine in living:
                ray.kill(engine)
        self.server_groups = []
        if self.router is not None:
            self.router.stop()
            self.router = None


def start_rollout_servers(args: Namespace, pg: tuple[Any, list[int], list[int]]) -> tuple[dict[str, Any], list[Any]]:
    """Start routers and engines; returns the servers by model name, and references that resolve when engines generate.

    Sets `args.sglang_router_ip`, `args.sglang_router_port` (the first model's) and `args.sglang_model_routers`.
    """
    if getattr(args, "rollout_external", False):
        return _start_external(args)
    config = resolve_sglang_config(args)
    logger.info("starting engines of %s, logs are in %s", [m.name for m in config.models], log_dir(args))
    servers: dict[str, RolloutServer] = {}
    references: list[Any] = []
    cursors: dict[int, int] = {}
    gpu_offset = rank_offset = 0
    for position, model in enumerate(config.models):
        server = _make_server(args, pg, model, is_first=position == 0, gpu_offset=gpu_offset, rank_offset=rank_offset)
        for group in server.server_groups:
            started, cursors = group.start_engines(cursors)
            references += started
        servers[model.name] = server
        gpu_offset += model.total_num_gpus
        rank_offset += len(server.all_engines)
    args.sglang_model_routers = {name: (server.router_ip, server.router_port) for name, server in servers.items()}
    return servers, references


def _make_server(
    args: Namespace, pg: Any, model: ModelConfig, *, is_first: bool, gpu_offset: int, rank_offset: int
) -> RolloutServer:
    router = None
    if is_first and args.sglang_router_ip is not None:
        host, port = args.sglang_router_ip, args.sglang_router_port
    else:
        router = start_router(args, model.has_pd_disaggregation, args.sglang_router_port if is_first else None)
        host, port = router.host, router.port
    if is_first:
        args.sglang_router_ip, args.sglang_router_port = host, port
    groups = []
    for group_config in model.server_groups:
        group = _make_group(args, pg, model, group_config, gpu_offset, rank_offset)
        group.router_ip, group.router_port = host, port
        groups.append(group)
        gpu_offset += group_config.num_gpus
        rank_offset += len(group.all_engines)
    return RolloutServer(groups, host, port, model.name, bool(model.update_weights), router)


def _make_group(
    args: Namespace, pg: Any, model: ModelConfig, config: ServerGroupConfig, gpu_offset: int, rank_offset: int
) -> ServerGroup:
    if config.worker_type == "encoder":
        raise ValueError("--sglang-config: worker_type encoder is not available in this version, which has text only")
    per_engine = config.num_gpus_per_engine or args.rollout_num_gpus_per_engine
    count = 0 if config.worker_type == "placeholder" else config.num_gpus // per_engine
    trainer_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node if args.colocate else 0
    return ServerGroup(
        args=args,
        pg=pg,
        all_engines=[None] * count,
        num_gpus_per_engine=per_engine,
        num_new_engines=0,
        worker_type=config.worker_type,
        rank_offset=rank_offset,
        gpu_offset=gpu_offset,
        sglang_overrides=dict(config.overrides),
        needs_offload=bool(args.offload_rollout) and gpu_offset < trainer_gpus,
        model_path=model.model_path,
    )


def start_router(args: Namespace, has_pd_disaggregation: bool = False, port: int | None = None) -> Router:
    """Start a router and wait until it answers; `port` None takes a free one."""
    host = LOCALHOST if len(ray.nodes()) == 1 else get_current_node_ip()
    port = port or find_available_port(random.SystemRandom().choice(ROUTER_PORTS))
    options = router_options(args) | ({"pd-disaggregation": True} if has_pd_disaggregation else {})
    router = Router(host, port, Path(log_dir(args)) / f"router_{port}.log", options)
    router.start()
    router.wait_ready()
    return router


def _start_external(args: Namespace) -> tuple[dict[str, Any], list[Any]]:
    started: list[Router] = []

    def router_of(args: Namespace, has_pd_disaggregation: bool = False) -> tuple[str, int]:
        if args.sglang_router_ip is not None:
            return args.sglang_router_ip, args.sglang_router_port
        started.append(start_router(args, has_pd_disaggregation, args.sglang_router_port))
        return started[0].host, started[0].port

    servers, references = start_external_rollout_servers(args, start_router=router_of, create_engine=_attach_engine)
    server: ExternalRolloutServer = servers["default"]
    server.router = started[0] if started else None
    return dict(servers), references


def _attach_engine(
    args: Namespace, number: int, info: ExternalEngineInfo, router_ip: str, router_port: int
) -> tuple[Any, Any]:
    env = {"env_vars": add_default_ray_env_vars()}
    actor = as_actor(EngineActor, num_cpus=ENGINE_SHARE, num_gpus=0, runtime_env=env).remote(
        args, number, worker_type=info.worker_type, num_gpus_per_engine=info.num_gpus
    )
    return actor, actor.attach.remote(external_engine_init_kwargs(info), router_ip, router_port)
