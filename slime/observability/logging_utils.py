"""Where metrics go: an append-only JSONL file, Weights & Biases, TensorBoard - each only when asked for.

Input: flat dicts of numbers with their step under `step_key`. Invariants: one line per call, written with one system
call on a file opened for appending, so several processes may share the file; the line is strict JSON (a value that is
not finite becomes null); heavy trackers are imported when they are initialised, never before.
Left out: aggregation over ranks - only the process that holds the final numbers logs them.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"
_tensorboard: Any = None


def configure_logger(prefix: str = "") -> None:
    """Sends log records of level INFO and above to stderr, each line starting with `prefix`."""
    logging.basicConfig(level=logging.INFO, format=prefix + _FORMAT, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


def init_tracking(args: Namespace, primary: bool = True, **kwargs: Any) -> None:
    """Opens the trackers asked for; the driver is the primary process. `role` names a secondary one."""
    if path := getattr(args, "metrics_jsonl", None):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if getattr(args, "use_wandb", False):
        _require("wandb", "--use-wandb")
        from slime.observability import wandb_utils

        if primary:
            wandb_utils.init_wandb_primary(args)
        else:
            wandb_utils.init_wandb_secondary(args, role=kwargs.get("role"))
    if getattr(args, "use_tensorboard", False):
        _init_tensorboard(args)


def _require(package: str, flag: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{flag} needs the package {package}: pip install {package}, or leave the flag out")


def _init_tensorboard(args: Namespace) -> None:
    global _tensorboard
    _require("tensorboard", "--use-tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    root = args.tb_project_name or os.environ.get("TENSORBOARD_DIR")
    if not root:
        raise ValueError("--use-tensorboard needs a directory: set --tb-project-name or TENSORBOARD_DIR")
    _tensorboard = SummaryWriter(str(Path(root) / (args.tb_experiment_name or "")))


def log(args: Namespace, metrics: dict[str, Any], step_key: str) -> None:
    """Sends one set of metrics to every tracker.

    Raises ValueError when `metrics` does not hold its step, TypeError for a value that is no number or text.
    """
    if step_key not in metrics:
        raise ValueError(f"metrics to be logged need their step under {step_key!r}; got {sorted(metrics)}")
    values = {name: _plain(name, value) for name, value in metrics.items()}
    if path := getattr(args, "metrics_jsonl", None):
        _append_line(path, {"step_key": step_key, "time": time.time(), **values})
    if getattr(args, "use_wandb", False):
        import wandb

        wandb.log(values)
    if _tensorboard is not None:
        for name, value in values.items():
            if isinstance(value, int | float):
                _tensorboard.add_scalar(name, value, values[step_key])


def _plain(name: str, value: Any) -> bool | int | float | str | None:
    """A JSON value of a Python, numpy or torch scalar."""
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()  # raises for anything but one element
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"metric {name!r} must be a number or text, got {type(value).__name__}")


def _append_line(path: str, record: dict[str, Any]) -> None:
    line = json.dumps(record, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def finish_tracking(args: Namespace) -> None:
    """Closes the trackers of this process."""
    global _tensorboard
    if _tensorboard is not None:
        _tensorboard.close()
        _tensorboard = None
    if getattr(args, "use_wandb", False):
        import wandb

        wandb.finish()
