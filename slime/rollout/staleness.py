"""The bound on how old a finished group may be when it is trained.

A group's version is the oldest weight version that produced any of its tokens (its version at admission when the
samples do not say). It may be handed out while `current version - version <= max_staleness`.

Invariants, for any order of arrivals and version changes: no group that is handed out exceeds the bound; every group
is handed out once, or reported stale once; what is not taken stays in the queue. Pure: no clock, no engine.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.rollout.base_types import iter_leaves

Finished = tuple[int, list[Any]]  # running number, group


@dataclass(frozen=True)
class Taken:
    """Groups within the bound, and groups that became too old while they waited."""

    fresh: list[Finished]
    stale: list[Finished]


def parse_version(text: Any) -> int:
    """A weight version as a number; what the engine calls itself before the first update ("default") is 0."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return 0


def group_version(group: Any, admission_version: int) -> int:
    """Oldest version of the group's tokens; `admission_version` when a sample does not name any."""
    versions = [[parse_version(v) for v in sample.weight_versions] for sample in iter_leaves(group)]
    if not versions or not all(versions):
        return admission_version
    return min(min(of_sample) for of_sample in versions)


def usual_version(samples: list[Any]) -> int | None:
    """The weight version that finished most of the samples; None when none names its versions."""
    finished = Counter(parse_version(sample.weight_versions[-1]) for sample in samples if sample.weight_versions)
    return finished.most_common(1)[0][0] if finished else None


def take_within_bound(
    finished: queue.Queue[Finished],
    limit: int | None,
    version_of: Callable[[int, list[Any]], int],
    current_version: int,
    max_staleness: int | None,
) -> Taken:
    """Takes up to `limit` (None: all) groups within the bound, oldest arrival first.

    `version_of(number, group)` tells a group's version; `max_staleness` None is no bound. Too old groups met on the
    way come back as `stale` and do not count towards the limit.
    """
    taken = Taken([], [])
    while limit is None or len(taken.fresh) < limit:
        try:
            number, group = finished.get_nowait()
        except queue.Empty:
            break
        age = current_version - version_of(number, group)
        (taken.fresh if max_staleness is None or age <= max_staleness else taken.stale).append((number, group))
    return taken
