"""The training side as one object: a list of rank actors that are always called together.

Inputs: bundles from `placement_group`. Invariants: rank i runs on bundle i; every call goes to all ranks and returns their
answers in rank order; the first rank that fails makes the call fail. With `--debug-rollout-only` there is no rank and every
call is empty. Left out: what a rank does (see the actor class).
"""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.ray.utils import add_default_ray_env_vars, as_actor, wait_all

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0


class RayTrainGroup:
    """Ranks of one role. The processes start in `create`."""

    def __init__(
        self,
        args: Namespace,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: tuple[Any, list[int], list[int]],
        num_gpus_per_actor: float = 1,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        actor_cls: type | None = None,
    ) -> None:
        self.args = args
        self.role = role
        self.with_ref = with_ref
        self.with_opd_teacher = with_opd_teacher
        self.world_size = 0 if args.debug_rollout_only else num_nodes * num_gpus_per_node
        self._ranks_per_node = num_gpus_per_node
        self._pg = pg
        self._share = num_gpus_per_actor
        self._actor_cls = actor_cls
        self._actor_handlers: list[Any] = []

    def create(self, rollout_manager: Any = None) -> list[int]:
        """Start all ranks and build their models; returns the first rollout id according to each rank."""
        if self.world_size == 0:
            return []
        self._actor_handlers = self._start_ranks()
        start_ids = self._call("init", self.args, self.role, self.with_ref, self.with_opd_teacher)
        if rollout_manager is not None:
            self.set_rollout_manager(rollout_manager)
            parallel = ray.get(self._actor_handlers[0].parallel_config.remote())
            ray.get(rollout_manager.set_train_parallel_config.remote(parallel))
        return start_ids

    def _start_ranks(self) -> list[Any]:
        actor_cls = self._actor_cls or get_actor_class()
        env_vars = get_train_env_vars(self.args, self._ranks_per_node)
        handlers: list[Any] = []
        address: tuple[str | None, int | None] = (None, None)
        for rank in range(self.world_size):
            options = self._options(rank, env_vars)
            handlers.append(as_actor(actor_cls, **options).remote(self.world_size, rank, *address))
            if rank == 0:
                address = ray.get(handlers[0].rendezvous.remote())
        return handlers

    def _options(self, rank: int, env_vars: dict[str, str]) -> dict[str, Any]:
        group, bundle_indices, _ = self._pg
        return {
            "num_cpus": self._share,
            "num_gpus": self._share if self.args.use_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle_indices[rank]),
            "runtime_env": {"env_vars": env_vars},
        }

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return wait_all([getattr(actor, method).remote(*arguments) for actor in self._actor_handlers])

    def async_train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> list[Any]:
        """Start training on one rollout; one reference per rank, rank 0's resolves to the metrics.

        `external_data`: one entry (or reference) per rank, or None.
        """
        extras = [None] * len(self._actor_handlers) if external_data is None else external_data
        return [
            actor.train.remote(rollout_id, rollout_data_ref, external_data=extra)
            for actor, extra in zip(self._actor_handlers, extras, strict=True)
        ]

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write the checkpoint; returns when all ranks are done."""
        self._call("save_model", rollout_id, force_sync)

    def update_weights(self) -> None:
        """Send the weights to the engines; nothing to do when a debug mode leaves out one of the sides."""
        if self.args.debug_train_only:
            return
        self._call("update_weights")

    def onload(self) -> None:
        """Bring the models back to their device."""
        self._call("wake_up")

    def offload(self) -> None:
        """Move the models off their device."""
        self._call("sleep")

    def clear_memory(self) -> None:
        """Return cached device memory."""
        self._call("clear_memory")

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """Give every rank the handle of the rollout manager."""
        self._call("set_rollout_manager", rollout_manager)

    def release(self) -> None:
        """End all ranks: each leaves its groups, then the process is killed, which skips the interpreter's finalisers.

        (FSDP2 over gloo aborts now and then in those: a communication thread takes the GIL too late.)
        """
        leaving = [actor.shutdown.remote() for actor in self._actor_handlers]
        _, late = ray.wait(leaving, num_returns=len(leaving), timeout=EXIT_TIMEOUT_S) if leaving else ([], [])
        if late:
            logger.warning("%d training ranks did not leave their group within %s s", len(late), EXIT_TIMEOUT_S)
        for actor in self._actor_handlers:
            ray.kill(actor)
        self._actor_handlers = []


def get_actor_class() -> type:
    """The rank actor, imported only when it is used."""
    from slime.ray.backend_actor import BackendTrainRayActor

    return BackendTrainRayActor


def get_train_env_vars(args: Namespace, ranks_per_node: int) -> dict[str, str]:
    """Environment of a rank: `--train-env-vars` wins; on a CPU machine the ranks share the cores without spinning."""
    given = args.train_env_vars
    given = json.loads(given) if isinstance(given, str) else dict(given or {})
    env_vars = {str(name): str(value) for name, value in given.items()}
    if not args.use_gpu:
        alone = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        env_vars.setdefault("OMP_NUM_THREADS", alone if ranks_per_node == 1 else "1")
    env_vars.setdefault("TQDM_DISABLE", "1")  # bars of several processes overwrite each other and the driver's
    return add_default_ray_env_vars(env_vars)
