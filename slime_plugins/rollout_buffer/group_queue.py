"""Groups of generated trajectories that wait to be trained: the state behind the rollout buffer service.

Input: items with `instance_id` (the prompt), `uid`, `messages`, `reward`, `extra_info`. Invariants: only groups that are
complete (`is_valid_group`) are handed out, once; an item is never lost before; `meta_info` covers everything written since
the last successful read. Safe to call from several threads. Left out: HTTP (`buffer`), making items (`generator`).
"""

from __future__ import annotations

import copy
import statistics
import threading
from collections.abc import Callable
from typing import Any

Item = dict[str, Any]
Group = tuple[str, list[Item]]


def default_is_valid_group(group_data: Group, min_valid_group_size: int, task_type: str) -> bool:
    """A group is complete when it has at least `min_valid_group_size` items."""
    return len(group_data[1]) >= min_valid_group_size


def default_get_group_data_meta_info(temp_data: dict[str, list[Item]]) -> dict[str, Any]:
    """Counts and the mean reward of all items, by group."""
    rewards = [float(item["reward"]) for items in temp_data.values() for item in items]
    sizes = [len(items) for items in temp_data.values()]
    return {
        "total_samples": len(rewards),
        "num_groups": len(sizes),
        "avg_group_size": statistics.fmean(sizes) if sizes else 0,
        "avg_reward": statistics.fmean(rewards) if rewards else 0,
    }


class BufferQueue:
    """Items by instance, complete groups first written first out."""

    def __init__(
        self,
        group_size: int,
        task_type: str = "math",
        transform_group_func: Callable[[Group, str], Group] | None = None,
        is_valid_group_func: Callable[[Group, int, str], bool] | None = None,
        get_group_data_meta_info_func: Callable[[dict[str, list[Item]]], dict[str, Any]] | None = None,
    ) -> None:
        self.group_size, self.task_type = group_size, task_type
        self.data: dict[str, list[Item]] = {}
        self.temp_data: dict[str, list[Item]] = {}  # everything since the last successful read
        self.transform_group_func = transform_group_func or (lambda group, task_type: group)
        self.is_valid_group_func = is_valid_group_func or default_is_valid_group
        self.get_group_data_meta_info_func = get_group_data_meta_info_func or default_get_group_data_meta_info

    def append(self, item: Item) -> None:
        """Adds an item to its group. Raises KeyError without `instance_id`."""
        instance_id = item["instance_id"]
        self.data.setdefault(instance_id, []).append(item)
        self.temp_data.setdefault(instance_id, []).append(copy.deepcopy(item))

    def get(self) -> dict[str, Any]:
        """`{"data": items of all complete groups, "meta_info": ...}`; the groups leave the queue."""
        finished = [name for name, items in self.data.items() if self._is_complete(name, items)]
        data: list[Item] = []
        meta_info = {**self.get_group_data_meta_info_func(self.temp_data), "finished_groups": finished}
        for name in finished:
            _, items = self.transform_group_func((name, self.data.pop(name)), self.task_type)
            data += items
        if data:
            self.temp_data = {}
        return {"data": data, "meta_info": meta_info}

    def _is_complete(self, name: str, items: list[Item]) -> bool:
        return bool(self.is_valid_group_func((name, items), self.group_size, self.task_type))

    def __len__(self) -> int:
        return sum(len(items) for items in self.data.values())


class RolloutBuffer:
    """A `BufferQueue` that several threads may use."""

    def __init__(
        self,
        group_size: int = 16,
        task_type: str = "math",
        transform_group_func: Callable[[Group, str], Group] | None = None,
        is_valid_group_func: Callable[[Group, int, str], bool] | None = None,
        get_group_data_meta_info_func: Callable[[dict[str, list[Item]]], dict[str, Any]] | None = None,
    ) -> None:
        self.buffer = BufferQueue(
            group_size, task_type, transform_group_func, is_valid_group_func, get_group_data_meta_info_func
        )
        self.lock = threading.RLock()
        self.total_written = self.total_read = 0

    def write(self, data: Item) -> Item:
        """Adds an item and returns it. Raises KeyError without `instance_id`."""
        with self.lock:
            self.buffer.append(data)
            self.total_written += 1
        return data

    def read(self) -> dict[str, Any]:
        """Takes all complete groups; see `BufferQueue.get`."""
        with self.lock:
            result = self.buffer.get()
            self.total_read += len(result["data"])
        return result
