"""Synchronous training: generate a rollout, train on it, save, send the weights to the engines, evaluate.

    python train.py --train-backend fsdp --hf-checkpoint MODEL --prompt-data DATA.jsonl ...

Invariants: the engines hold the trainer's weights before the first rollout; a checkpoint is written before its weights are
sent, together with the data position of the same rollout id; data are trained on by the weights that generated them.
Left out: how anything is started or cleaned up (`slime/ray/session.py`).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import ray
from tqdm import tqdm

from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking
from slime.observability.timer import timer
from slime.ray.loop_steps import TrainGroup, evaluate, log_times, report_outputs, save, train_on, update_weights
from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from slime.ray.session import run_with_ray
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action


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


def train_on_rollout(args: Namespace, actor_model: TrainGroup, manager: Any, rollout_id: int) -> dict[str, float]:
    """Generate, then train; with `--offload-rollout` the engines lend their memory to the trainer. Returns its timings."""
    with timer("rollout"):
        data = ray.get(manager.generate.remote(rollout_id))
    if args.offload_rollout:
        ray.get(manager.offload.remote())
    return train_on(actor_model, rollout_id, data)


if __name__ == "__main__":
    configure_logger()
    sys.exit(run_with_ray(train, parse_args()))
