"""Small pure functions behind the metrics: prefixes, statistics, pass@k, repetition, the x-axis.

Left out: anything that knows samples (see `rollout_metrics`) or trackers (see `logging_utils`).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import statistics
import zlib
from collections.abc import Sequence
from typing import Any, Literal

_REPETITION_TAIL = 10_000
_REPETITION_RATIO = 10


def dict_add_prefix(d: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The same values under prefixed keys."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """`{"pass@1": ..., "pass@2": ..., "pass@4": ...}` up to the group size; a reward of 1 is a pass.

    Unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021). A group of one gives no metrics.
    Raises ValueError when the rewards do not fill the groups.
    """
    if group_size <= 1:
        return {}
    num_groups = len(flat_rewards) // group_size if num_groups is None else num_groups
    if len(flat_rewards) != num_groups * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {num_groups} groups of {group_size}")
    if num_groups == 0:
        return {}
    passes = [
        sum(reward == 1 for reward in flat_rewards[i * group_size : (i + 1) * group_size]) for i in range(num_groups)
    ]
    rates = {}
    for k in (2**power for power in range(group_size.bit_length())):
        total = math.comb(group_size, k)
        rates[f"pass@{k}"] = statistics.fmean(1 - math.comb(group_size - c, k) / total for c in passes)
    return rates


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """mean, median, max and min; empty for no values."""
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values),
        "median": float(statistics.median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def compression_ratio(
    data: str | bytes,
    *,
    encoding: str = "utf-8",
    algorithm: Literal["zlib", "gzip", "bz2", "lzma"] = "zlib",
    level: int = 9,
) -> tuple[float, float]:
    """(original size / compressed size, percent saved); (inf, 0) for no data."""
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return math.inf, 0.0
    compressors = {
        "zlib": lambda: zlib.compress(raw, level),
        "gzip": lambda: gzip.compress(raw, compresslevel=level),
        "bz2": lambda: bz2.compress(raw, compresslevel=level),
        "lzma": lambda: lzma.compress(raw, preset=level),
    }
    if algorithm not in compressors:
        raise ValueError(f"unknown algorithm {algorithm!r}; use one of {', '.join(compressors)}")
    size = len(compressors[algorithm]())
    return len(raw) / size, 100.0 * (1 - size / len(raw))


def has_repetition(text: str) -> bool:
    """True when the last 10,000 characters of a longer text compress more than tenfold."""
    return len(text) > _REPETITION_TAIL and compression_ratio(text[-_REPETITION_TAIL:])[0] > _REPETITION_RATIO


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """x-axis of rollout metrics: the rollout id, or with `--wandb-always-use-train-step` the optimiser step."""
    if getattr(args, "wandb_always_use_train_step", False):
        return rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    return rollout_id
