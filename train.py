"""Synchronous training: generate a rollout, train on it, save, send the weights to the engines, evaluate.

    python train.py --train-backend fsdp --hf-checkpoint MODEL --prompt-data DATA.jsonl ...

Invariants: the engines hold the trainer's weights before the first rollout; a checkpoint is written before its weights are
sent, together with the data position of the same rollout id; data are trained on by the weights that generated them.
Left out: how anything is started or cleaned up (`slime/ray/session.py`).
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import ray
from tqdm import tqdm

from slime.backends.sglang_utils.arguments import log_dir
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.timer import Timer, timer
from slime.ray.actor_group import RayTrainGroup
from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from slime.ray.session import run_with_ray
from slime.ray.utils import wait_all
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger("train")


def train(args: Namespace) -> None:
    """The whole run, from an empty cluster to disposed engines."""
    pgs = create_placement_groups(args)
    init_tracking(args)
    manager, per_epoch = create_rollout_manager(args, pgs["rollout"])
    actor_model = create_training_models(args, pgs, manager)
    update_weights(args, actor_model, manager)

    if args.num_rollout == 0 and args.eval_interval is not None:
        evaluate(manager, 0)
    rollout_ids = range(args.start_rollout_id, args.num_rollout)
    progress = tqdm(rollout_ids, "rollouts", args.num_rollout, initial=args.start_rollout_id)
    for rollout_id in progress:
        if rollout_id == 0 and args.eval_interval is not None and not args.skip_eval_before_train:
            evaluate(manager, 0)
        perf = train_on_rollout(args, actor_model, manager, rollout_id)
        if should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout):
            save(args, actor_model, manager, rollout_id)
        update_weights(args, actor_model, manager)
        if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch):
            evaluate(manager, rollout_id)
        log_times(args, rollout_id, perf)
        progress.set_postfix(ray.get(manager.latest.remote()))

    actor_model.release()
    ray.get(manager.dispose.remote())
    finish_tracking(args)
    report_outputs(args)


def train_on_rollout(args: Namespace, actor_model: RayTrainGroup, manager: Any, rollout_id: int) -> dict[str, float]:
    """Generate, then train; with `--offload-rollout` the engines lend their memory to the trainer. Returns its timings."""
    with timer("rollout"):
        data = ray.get(manager.generate.remote(rollout_id))
    if args.offload_rollout:
        ray.get(manager.offload.remote())
    with timer("train"):
        metrics = wait_all(actor_model.async_train(rollout_id, data))
    return {name: value for name, value in metrics[0].items() if name.startswith("perf/")} if metrics else {}


def save(args: Namespace, actor_model: RayTrainGroup, manager: Any, rollout_id: int) -> None:
    """Data position, then checkpoint: a run killed in between resumes from the previous checkpoint with its own position."""
    with timer("save"):
        if args.save:
            ray.get(manager.save.remote(rollout_id))
        actor_model.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)


def update_weights(args: Namespace, actor_model: RayTrainGroup, manager: Any) -> None:
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


if __name__ == "__main__":
    configure_logger()
    sys.exit(run_with_ray(train, parse_args()))
