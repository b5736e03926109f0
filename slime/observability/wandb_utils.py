"""Starts Weights & Biases runs: one run per training, joined by every process that logs.

Inputs: the `--wandb-*` flags. Invariant: wandb is imported only when `--use-wandb` is set.
Left out: offline runs of several processes are separate runs of one group, because offline files cannot be shared.
"""

from __future__ import annotations

import os
import random
import string
from argparse import Namespace
from typing import Any


def _settings(args: Namespace, primary: bool, label: str) -> dict[str, Any]:
    import wandb

    mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
    if args.wandb_mode:
        os.environ["WANDB_MODE"] = args.wandb_mode
    if args.wandb_key:
        wandb.login(key=args.wandb_key, host=args.wandb_host)
    settings = {"dir": args.wandb_dir, "entity": args.wandb_team, "project": args.wandb_project}
    if mode == "online":
        settings["settings"] = wandb.Settings(mode="shared", x_primary=primary, x_label=label)
    else:
        settings["mode"] = mode
    return settings


def init_wandb_primary(args: Namespace) -> None:
    """Creates the run and stores its id in `args.wandb_run_id` for the other processes."""
    if not args.use_wandb:
        args.wandb_run_id = None
        return
    import wandb

    group = args.wandb_group
    name = group
    if group and args.wandb_random_suffix:
        name = f"{group}_{''.join(random.choices(string.ascii_lowercase + string.digits, k=6))}"
    settings = _settings(args, primary=True, label="driver")
    run = wandb.init(id=args.wandb_run_id, group=group, name=name, config=vars(args), resume="allow", **settings)
    args.wandb_run_id = run.id
    _define_axes()


def init_wandb_secondary(args: Namespace, role: str | None = None) -> None:
    """Joins the run of the driver."""
    if not args.use_wandb:
        return
    import wandb

    settings = _settings(args, primary=False, label=role or f"process-{os.getpid()}")
    shared = "mode" not in settings
    wandb.init(id=args.wandb_run_id if shared else None, group=args.wandb_group, **settings)
    _define_axes()


def _define_axes() -> None:
    import wandb

    for axis, groups in {"train/step": ["train"], "rollout/step": ["rollout", "perf"], "eval/step": ["eval"]}.items():
        wandb.define_metric(axis)
        for group in groups:
            wandb.define_metric(f"{group}/*", step_metric=axis)
