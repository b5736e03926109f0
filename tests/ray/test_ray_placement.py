"""Placement: how many bundles, who gets which, in which order; environment of the ranks."""

from __future__ import annotations

import os

import pytest
from helpers_ray import manager_args

from slime.ray.actor_group import get_train_env_vars
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
