"""Statistics, pass@k against a brute-force oracle, repetition, x-axis."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.observability.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4))
def test_pass_rate_is_the_share_of_subsets_with_a_pass(rewards):
    rates = compute_pass_rate(rewards, group_size=4)
    assert list(rates) == ["pass@1", "pass@2", "pass@4"]
    for k in (1, 2, 4):
        subsets = list(itertools.combinations(rewards, k))
        assert rates[f"pass@{k}"] == pytest.approx(sum(1.0 in s for s in subsets) / len(subsets))


def test_pass_rate_averages_over_groups_and_checks_its_input():
    assert compute_pass_rate([1, 0, 0, 0], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    assert compute_pass_rate([1, 0], 1) == {} and compute_pass_rate([], 2) == {}
    with pytest.raises(ValueError, match="3 rewards"):
        compute_pass_rate([1, 0, 0], 2)


def test_statistics():
    assert compute_statistics([1, 2, 6, 3]) == {"mean": 3.0, "median": 2.5, "max": 6.0, "min": 1.0}
    assert compute_statistics([]) == {}


@pytest.mark.parametrize("algorithm", ["zlib", "gzip", "bz2", "lzma"])
def test_compression_ratio(algorithm):
    ratio, saved = compression_ratio("a" * 10_000, algorithm=algorithm)
    assert ratio > 50 and saved == pytest.approx(100 * (1 - 1 / ratio))
    assert compression_ratio(b"") == (math.inf, 0.0)


def test_unknown_compression_is_an_error():
    with pytest.raises(ValueError, match="zlib"):
        compression_ratio("a", algorithm="zip")


def test_repetition_looks_at_the_end_of_long_texts():
    varied = " ".join(str(i * 7919 % 10_007) for i in range(4000))
    assert not has_repetition(varied) and not has_repetition("ab" * 4000)
    assert has_repetition(varied + "ab" * 6000)


def test_prefix_and_step():
    assert dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}
    args = Namespace(rollout_batch_size=4, n_samples_per_prompt=8, global_batch_size=16)
    assert compute_rollout_step(args, 5) == 5
    args.wandb_always_use_train_step = True
    assert compute_rollout_step(args, 5) == 10
