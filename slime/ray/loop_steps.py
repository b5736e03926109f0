"""The steps that the training loops (`train.py`, `train_async.py`) are made of.

Each blocks until it is done and adds its seconds to the timer. Left out: their order, which is what the loops differ in.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils.arguments import log_dir
from slime.observability.logging_utils import log
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.timer import Timer, timer
from slime.ray.actor_critic import ActorCriticGroup
from slime.ray.actor_group import RayTrainGroup
from slime.ray.utils import wait_all

logger = logging.getLogger(__name__)

TrainGroup = RayTrainGroup | ActorCriticGroup


def train_on(actor_model: TrainGroup, rollout_id: int, data: Any) -> dict[str, float]:
    """Train on one rollout's data; returns the trainer's own timings."""
    with timer("train"):
        metrics = wait_all(actor_model.async_train(rollout_id, data))
    return {name: value for name, value in metrics[0].items() if name.startswith("perf/")} if metrics else {}


def save(args: Namespace, actor_model: TrainGroup, manager: Any, rollout_id: int) -> None:
    """Data position, then checkpoint: a run killed in between resumes from the previous checkpoint with its own position."""
    save_position(args, manager, rollout_id)
    save_model(args, actor_model, rollout_id)


def save_position(args: Namespace, manager: Any, rollout_id: int) -> None:
    """Write where the data source stands; the next rollout must not have begun."""
    if args.save:
        ray.get(manager.save.remote(rollout_id))


def save_model(args: Namespace, actor_model: TrainGroup, rollout_id: int) -> None:
    """Write the checkpoint of this rollout."""
    with timer("save"):
        actor_model.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)


def update_weights(args: Namespace, actor_model: TrainGroup, manager: Any) -> None:
    """Bring the engines to the trainer's weights."""
    if args.offload_rollout:
        ray.get(manager.onload_weights.remote())
    actor_model.clear_memory()
    with timer("update_weights"):
        actor_model.update_weights()
    if args.offload_rollout:
        ray.get(manager.onload_kv.remote())


def evaluate(manager: Any, rollout_id: int) -> None:
    """Evaluate the weights the engines hold now."""
    with timer("eval"):
        ray.get(manager.eval.remote(rollout_id))


def log_times(args: Namespace, rollout_id: int, perf: dict[str, float]) -> None:
    """Log the seconds spent in each phase since the last call, with what the trainer measured inside its own."""
    seconds = {f"perf/{name}_time": value for name, value in Timer().log_dict().items()}
    Timer().reset()
    log(args, {**perf, **seconds, "rollout/step": compute_rollout_step(args, rollout_id)}, "rollout/step")


def report_outputs(args: Namespace) -> None:
    """Tell where the results are."""
    logs = None if args.debug_train_only else log_dir(args)
    for what, path in (("checkpoints", args.save), ("metrics", args.metrics_jsonl), ("engine logs", logs)):
        if path is not None:
            logger.info("%s: %s", what, Path(path).resolve())
