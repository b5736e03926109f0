"""Profiles of a training rank: which passes are recorded, and when."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.observability.profile_utils import TrainProfiler


def arguments(folder: Path, **changes: Any) -> Namespace:
    values = {
        "use_pytorch_profiler": True,
        "profile_target": ["train_overall"],
        "profile_step_start": 1,
        "profile_step_end": 2,
        "record_memory_history": False,
        "memory_recorder": "torch",
        "memory_snapshot_num_steps": None,
        "memory_snapshot_dir": str(folder / "profiles"),
    }
    return Namespace(**{**values, **changes})


def run(args: Namespace, rollouts: int = 3) -> None:
    profiler = TrainProfiler(args)
    profiler.on_init_end()
    for rollout_id in range(rollouts):
        assert [work(i) for i in profiler.iterate_train_log_probs(range(2))] == [0, 1]
        assert [work(i) for i in profiler.iterate_train_actor(range(2))] == [0, 1]
        profiler.step(rollout_id)


def work(index: int) -> int:
    torch.ones(8, 8) @ torch.ones(8, 8)
    return index


def test_one_trace_of_the_chosen_rollouts(tmp_path: Path) -> None:
    run(arguments(tmp_path))
    (trace,) = (tmp_path / "profiles").iterdir()
    assert trace.name.startswith("train_overall") and trace.name.endswith(".json.gz")
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("aten::mm") == 4


def test_single_passes(tmp_path: Path) -> None:
    run(arguments(tmp_path, profile_target=["train_actor", "train_log_probs"]))
    names = sorted(path.name.split("_rollout")[0] for path in (tmp_path / "profiles").iterdir())
    assert names == ["train_actor", "train_log_probs"]


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    run(arguments(tmp_path, use_pytorch_profiler=False))
    assert not (tmp_path / "profiles").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a recorder")
def test_a_recorder_that_does_not_work_here_is_an_error(tmp_path: Path) -> None:
    profiler = TrainProfiler(arguments(tmp_path, record_memory_history=True))
    with pytest.raises(RuntimeError, match="memray"):
        profiler.on_init_end()
