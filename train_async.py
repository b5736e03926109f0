"""Asynchronous training: while the trainer works on one rollout, the engines already generate the next.

    python train_async.py --train-backend fsdp --hf-checkpoint MODEL --prompt-data DATA.jsonl ...

Invariants: weights are sent only when no rollout is being generated, so a request never sees them change; what is trained
on is at most one rollout plus `--update-weights-interval` old; the data position of a checkpoint is that before the next
rollout, so a resumed run repeats nothing and skips nothing. Left out: evaluation before training; `--colocate`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import ray
from tqdm import tqdm

from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking
from slime.observability.timer import timer
from slime.ray.errors import BadInput
from slime.ray.loop_steps import (
    evaluate,
    log_times,
    report_outputs,
    save_model,
    save_position,
    train_on,
    update_weights,
)
from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from slime.ray.session import run_with_ray
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action


def train(args: Namespace) -> None:
    """The whole run, from an empty cluster to disposed engines."""
    if args.colocate:
        raise BadInput("train_async.py: --colocate shares GPUs that it needs at the same time; use train.py")
    pgs = create_placement_groups(args)
    init_tracking(args)
    manager, per_epoch = create_rollout_manager(args, pgs["rollout"])
    actor_model = create_training_models(args, pgs, manager)
    update_weights(args, actor_model, manager)

    rollout_ids = range(args.start_rollout_id, args.num_rollout)
    running = manager.generate.remote(rollout_ids[0]) if rollout_ids else None
    progress = tqdm(rollout_ids, "rollouts", args.num_rollout, initial=args.start_rollout_id)
    for rollout_id in progress:
        data = wait_for_rollout(running)
        saves = should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout)
        if saves:
            save_position(args, manager, rollout_id)
        running = manager.generate.remote(rollout_id + 1) if rollout_id + 1 in rollout_ids else None
        perf = train_on(actor_model, rollout_id, data)
        if saves:
            save_model(args, actor_model, rollout_id)
        if (rollout_id + 1) % args.update_weights_interval == 0:
            # The reference is kept, so that the next turn of the loop finds the finished rollout.
            wait_for_rollout(running)
            update_weights(args, actor_model, manager)
        if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch):
            evaluate(manager, rollout_id)
        log_times(args, rollout_id, perf)

    actor_model.release()
    ray.get(manager.dispose.remote())
    finish_tracking(args)
    report_outputs(args)


def wait_for_rollout(running: Any) -> Any:
    """Data of the rollout that is being generated; None when there is none."""
    with timer("rollout"):
        return None if running is None else ray.get(running)


if __name__ == "__main__":
    configure_logger()
    sys.exit(run_with_ray(train, parse_args()))
