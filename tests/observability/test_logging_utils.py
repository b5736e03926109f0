"""Trackers: JSONL lines, TensorBoard, Weights & Biases (a fake module), strictness of values."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
import threading
import types
from argparse import Namespace

import numpy as np
import pytest
import torch

from slime.observability import logging_utils
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log


def tracking_args(tmp_path, **overrides):
    values = {"metrics_jsonl": str(tmp_path / "deep" / "metrics.jsonl"), "use_wandb": False, "use_tensorboard": False}
    return Namespace(**{**values, **overrides})


def lines(args):
    with open(args.metrics_jsonl) as file:
        return [json.loads(line) for line in file]


def test_one_line_per_call_with_its_step(tmp_path):
    args = tracking_args(tmp_path)
    init_tracking(args)
    log(args, {"train/step": 3, "train/loss": torch.tensor(0.5), "train/n": np.int64(7)}, step_key="train/step")
    log(args, {"train/step": 4, "train/loss": float("nan"), "note": "x"}, step_key="train/step")
    first, second = lines(args)
    assert first.pop("time") > 1e9
    assert first == {"step_key": "train/step", "train/step": 3, "train/loss": 0.5, "train/n": 7}
    assert second["train/loss"] is None and second["note"] == "x"


def test_several_writers_do_not_mix_their_lines(tmp_path):
    args = tracking_args(tmp_path)
    init_tracking(args)

    def write(worker):
        for i in range(50):
            log(args, {"s": i, "worker": worker, "text": "x" * 500}, step_key="s")

    threads = [threading.Thread(target=write, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [(line["worker"], line["s"]) for line in lines(args)]
    assert sorted(seen) == [(w, i) for w in range(4) for i in range(50)]


def test_no_tracker_no_output(tmp_path):
    args = Namespace(metrics_jsonl=None, use_wandb=False, use_tensorboard=False)
    init_tracking(args)
    log(args, {"s": 1}, step_key="s")
    finish_tracking(args)
    assert list(tmp_path.iterdir()) == []


def test_bad_metrics_are_errors(tmp_path):
    args = tracking_args(tmp_path)
    init_tracking(args)
    with pytest.raises(ValueError, match="train/step"):
        log(args, {"loss": 1.0}, step_key="train/step")
    with pytest.raises(TypeError, match="'values' must be a number"):
        log(args, {"s": 1, "values": [1, 2]}, step_key="s")


class FakeWriter:
    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, [], False

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True


def install_fake(monkeypatch, name, module):
    """Makes `module` importable as `name` and visible to `find_spec`."""
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard(tmp_path, monkeypatch):
    backend = types.ModuleType("torch.utils.tensorboard")
    backend.SummaryWriter = FakeWriter
    install_fake(monkeypatch, "tensorboard", types.ModuleType("tensorboard"))
    install_fake(monkeypatch, "torch.utils.tensorboard", backend)
    args = tracking_args(tmp_path, use_tensorboard=True, tb_project_name=str(tmp_path / "tb"), tb_experiment_name="e")
    init_tracking(args)
    writer = logging_utils._tensorboard
    log(args, {"s": 1, "loss": 0.5, "note": "text"}, step_key="s")
    finish_tracking(args)
    assert writer.folder == str(tmp_path / "tb" / "e") and writer.closed
    assert writer.scalars == [("s", 1, 1), ("loss", 0.5, 1)] and logging_utils._tensorboard is None
    args.tb_project_name = None
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with pytest.raises(ValueError, match="--tb-project-name"):
        init_tracking(args)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_tracker_package_is_a_clear_error(tmp_path, monkeypatch, package):
    monkeypatch.setattr(logging_utils.importlib.util, "find_spec", lambda name: None)
    args = tracking_args(tmp_path, **{f"use_{package}": True})
    with pytest.raises(ValueError, match=f"--use-{package} needs the package {package}"):
        init_tracking(args)


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.inits, self.logged, self.axes, self.finished = [], [], [], 0

    def init(self, **kwargs):
        self.inits.append(kwargs)
        return types.SimpleNamespace(id="run-1")

    def Settings(self, **kwargs):
        return kwargs

    def log(self, values):
        self.logged.append(values)

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("mode, shared", [(None, True), ("offline", False)])
def test_wandb_processes_join_one_run(tmp_path, monkeypatch, mode, shared):
    fake = FakeWandb()
    install_fake(monkeypatch, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "online")
    values = dict(wandb_mode=mode, wandb_key=None, wandb_host=None, wandb_dir=None, wandb_team=None, wandb_run_id=None)
    values |= {"wandb_project": "p", "wandb_group": "g", "wandb_random_suffix": True, "use_wandb": True}
    args = tracking_args(tmp_path, **values)
    init_tracking(args)
    assert args.wandb_run_id == "run-1" and fake.inits[0]["name"].startswith("g_")
    init_tracking(args, primary=False, role="rollout")
    assert fake.inits[1]["id"] == ("run-1" if shared else None)
    assert fake.inits[1].get("mode") == mode
    log(args, {"rollout/step": 0, "a": 1.0}, step_key="rollout/step")
    finish_tracking(args)
    assert fake.logged == [{"rollout/step": 0, "a": 1.0}] and fake.finished == 1
    assert ("perf/*", "rollout/step") in fake.axes


def test_log_records_carry_the_prefix(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logger("[actor 3] ")
        logging.getLogger("some.module").info("hello")
        assert "[actor 3] " in (err := capsys.readouterr().err) and "some.module: hello" in err
        assert logging.getLogger("httpx").level == logging.WARNING
    finally:
        root.handlers, root.level = handlers, level
