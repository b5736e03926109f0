"""A training rank as a Ray actor: a thin shell around a back end's trainer, which knows nothing of Ray.

It fetches this rank's share of the rollout data and asks the rollout manager for the engines; everything else is the trainer's.
The back end is imported in the rank's own process, when it is used.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import ray

from slime.backends.common.trainer import Trainer
from slime.observability.logging_utils import configure_logger, init_tracking
from slime.ray.train_actor import TrainRayActor
from slime.utils.data import process_rollout_data


def trainer_class(backend: str, role: str) -> type[Trainer]:
    """The trainer of `--train-backend` for a role."""
    if backend == "fsdp":
        from slime.backends.fsdp_utils.critic import CriticTrainer
        from slime.backends.fsdp_utils.trainer import FSDPTrainer

        return CriticTrainer if role == "critic" else FSDPTrainer
    from slime.backends.megatron_utils.critic import MegatronCriticTrainer
    from slime.backends.megatron_utils.trainer import MegatronTrainer

    return MegatronCriticTrainer if role == "critic" else MegatronTrainer


class BackendTrainRayActor(TrainRayActor):
    """One rank of either back end."""

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """See the base class. Raises ValueError for what the back end does not have."""
        configure_logger()
        self.args = args
        self.rollout_manager: Any = None
        if self.rank == 0:
            init_tracking(args, primary=False, role=role)
        self.trainer = trainer_class(args.train_backend, role)()
        return self.trainer.init(args, role, with_ref)

    def parallel_config(self) -> dict[str, int]:
        """See the base class."""
        return self.trainer.parallel_config()

    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> dict[str, Any] | None:
        """See the base class. `external_data`: what the critic's rank of the same number returned, its `values`.

        A critic returns `values` on every rank, in the order of the rank's rows.
        """
        data = process_rollout_data(self.args, rollout_data_ref, *self.trainer.data_rank_and_size())
        if external_data is not None:
            data["values"] = external_data["values"]
        metrics: dict[str, Any] = dict(self.trainer.train(rollout_id, data))
        if self.trainer.role == "critic":
            return {**metrics, "values": self.trainer.values}
        return metrics if self.rank == 0 else None

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """See the base class."""
        self.trainer.save_model(rollout_id, force_sync)

    def update_weights(self) -> None:
        """See the base class; engines that are new since the last call are connected first."""
        engines, _, num_new, gpu_counts, _, _ = ray.get(self.rollout_manager.get_updatable_engines_and_lock.remote())
        self.trainer.update_weights(engines, gpu_counts, num_new)
        # Sending is collective, so every rank has read the number of new engines by now.
        if self.rank == 0 and num_new:
            ray.get(self.rollout_manager.clear_updatable_num_new_engines.remote())

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        """See the base class."""
        self.rollout_manager = rollout_manager

    def clear_memory(self) -> None:
        """See the base class."""
        self.trainer.clear_memory()

    def sleep(self) -> None:
        """See the base class."""
        self.trainer.sleep()

    def wake_up(self) -> None:
        """See the base class."""
        self.trainer.wake_up()

    def shutdown(self) -> None:
        """See the base class."""
        self.trainer.shutdown()
        logging.shutdown()
