"""Placement: how many bundles, who gets which, in which order; environment of the ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray
from helpers_ray import manager_args

from slime.ray import placement_group
from slime.ray.actor_group import get_train_env_vars
from slime.ray.engines import EngineActor
from slime.ray.placement_group import _get_placement_group_layout, get_num_bundles, sort_key
from slime.ray.utils import Lock, add_default_ray_env_vars, ray_noset_visible_devices


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, (4, 2)),
        ({"debug_train_only": True}, (2, 0)),
        ({"debug_rollout_only": True}, (2, 0)),
        ({"colocate": True}, (2, 0)),
        ({"colocate": True, "rollout_num_gpus": 5}, (5, 0)),
        ({"rollout_external": True}, (2, 2)),
        ({"rollout_external": True, "debug_rollout_only": True}, (2, 0)),
        ({"rollout_num_gpus": 0}, (2, 2)),
        ({"rollout_num_gpus": None, "debug_train_only": True}, (2, 0)),
    ],
)
def test_layout(changes: dict, expected: tuple[int, int]) -> None:
    args = manager_args(**{"actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, **changes})
    assert _get_placement_group_layout(args) == expected
    assert get_num_bundles(args) == expected[0]


def test_bundles_are_ordered_by_node_then_by_number_not_by_text() -> None:
    entries = [(0, "10.0.0.10", 1), (1, "10.0.0.9", 10), (2, "10.0.0.9", 9), (3, "10.0.0.9", "2")]
    assert [entry[0] for entry in sorted(entries, key=sort_key)] == [3, 2, 1, 0]


class FakeManager:
    """Handle of a rollout manager that only notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        answer = {"start_servers": {}, "load_inputs": 3}.get(name)
        return SimpleNamespace(remote=lambda *_: self.calls.append(name) or answer)


@pytest.mark.parametrize("offload", [False, True])
def test_engines_that_lend_their_memory_start_without_it(monkeypatch: pytest.MonkeyPatch, offload: bool) -> None:
    """The first weight update takes it back, and an engine dies when it never gave it away."""
    manager = FakeManager()
    remote = SimpleNamespace(remote=lambda *_: manager)
    monkeypatch.setattr(placement_group, "as_actor", lambda *_, **__: remote)
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    args = manager_args(num_rollout=1, offload_rollout=offload)
    assert placement_group.create_rollout_manager(args, (None, [], [])) == (manager, 3)
    assert manager.calls == ["load_inputs", "start_servers"] + ["offload"] * offload


def test_an_engine_counts_devices_among_those_it_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [6])
    monkeypatch.setattr(EngineActor, "init", lambda self, *_, **__: self.base_gpu_id)
    assert EngineActor(manager_args(), 0, base_gpu_id=6).start("127.0.0.1", 3000, 20000, local=True) == 2
    assert EngineActor(manager_args(), 0).start("127.0.0.1", 3000, 20000, local=True) is None


def test_ranks_that_share_a_cpu_machine_use_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    args = manager_args(train_env_vars={})
    assert get_train_env_vars(args, ranks_per_node=2)["OMP_NUM_THREADS"] == "1"
    assert get_train_env_vars(args, ranks_per_node=1)["OMP_NUM_THREADS"] == "7"
    given = manager_args(train_env_vars={"OMP_NUM_THREADS": 3, "A": "b"})
    env = get_train_env_vars(given, ranks_per_node=2)
    assert (env["OMP_NUM_THREADS"], env["A"], env["OMP_WAIT_POLICY"]) == ("3", "b", "PASSIVE")
    assert "OMP_NUM_THREADS" not in get_train_env_vars(manager_args(use_gpu=True), ranks_per_node=2)


def test_actors_find_the_repository_and_see_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/somewhere{os.pathsep}")
    env = add_default_ray_env_vars({"EXTRA": "1"})
    root, inherited = env["PYTHONPATH"].split(os.pathsep)
    assert os.path.isfile(os.path.join(root, "train.py")) and inherited == "/somewhere"
    assert env["EXTRA"] == "1" and ray_noset_visible_devices(env) and not ray_noset_visible_devices({})


def test_lock_is_held_by_one() -> None:
    lock = Lock()
    assert lock.acquire() and not lock.acquire()
    lock.release()
    assert lock.acquire()
    lock.release()
    with pytest.raises(RuntimeError, match="nobody holds"):
        lock.release()
