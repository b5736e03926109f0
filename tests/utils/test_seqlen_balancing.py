import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.dp_schedule import _pack_under_cap
from slime.utils.seqlen_balancing import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
)

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=60)


def flat(groups):
    return sorted(i for group in groups for i in group)


@pytest.mark.parametrize("partition", [karmarkar_karp, greedy_partition])
@given(lengths=LENGTHS, k=st.integers(1, 6))
def test_partition_covers_every_sequence_once(partition, lengths, k):
    groups = partition(lengths, k, False)
    assert len(groups) == k
    assert flat(groups) == list(range(len(lengths)))


@pytest.mark.parametrize("partition", [karmarkar_karp, greedy_partition])
@given(width=st.integers(1, 8), k=st.integers(1, 6), data=st.data())
def test_equal_size_groups(partition, width, k, data):
    lengths = data.draw(st.lists(st.integers(0, 500), min_size=width * k, max_size=width * k))
    groups = partition(lengths, k, True)
    assert [len(group) for group in groups] == [width] * k
    assert flat(groups) == list(range(len(lengths)))


def test_karmarkar_karp_balances_a_known_case():
    lengths = [8, 7, 6, 5, 4]
    sums = sorted(sum(lengths[i] for i in group) for group in karmarkar_karp(lengths, 2, False))
    assert sums == [14, 16]  # the differencing method's known answer for this list


def test_balance_over_ranks_is_within_two_percent():
    rng = random.Random(0)
    lengths = [min(int(rng.lognormvariate(7, 1)) + 1, 16384) for _ in range(512)]
    for equal_size in (False, True):
        sums = [sum(lengths[i] for i in group) for group in get_seqlen_balanced_partitions(lengths, 8, equal_size)]
        assert max(sums) <= 1.02 * sum(lengths) / 8


@given(lengths=LENGTHS, k=st.integers(1, 6))
def test_balanced_partitions_are_never_empty(lengths, k):
    if len(lengths) < k:
        with pytest.raises(ValueError, match="non-empty"):
            get_seqlen_balanced_partitions(lengths, k, False)
    else:
        groups = get_seqlen_balanced_partitions(lengths, k, False)
        assert all(groups) and flat(groups) == list(range(len(lengths)))


def test_equal_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="5 sequences cannot be split into 2 groups of equal size"):
        karmarkar_karp([1, 2, 3, 4, 5], 2, True)


def naive_first_fit(lengths, cap):
    bins = []
    for i, length in enumerate(lengths):
        for members in bins:
            if sum(lengths[j] for j in members) + length <= cap:
                members.append(i)
                break
        else:
            bins.append([i])
    return bins


@given(lengths=st.lists(st.integers(1, 120), max_size=50), cap=st.integers(1, 150))
def test_first_fit_equals_the_textbook_loop(lengths, cap):
    assert first_fit_pack(lengths, cap) == naive_first_fit(lengths, cap)


def test_first_fit_gives_an_oversized_sequence_its_own_bin():
    assert first_fit_pack([5, 100, 5, 6], 10) == [[0, 2], [1], [3]]


def test_packing_reaches_the_lower_bound_on_nearly_all_draws():
    hits = 0
    for seed in range(40):
        rng = random.Random(seed)
        lengths = [min(int(rng.lognormvariate(7, 1.1)) + 1, 16384) for _ in range(512)]
        bins = _pack_under_cap(lengths, 16384)
        assert all(sum(lengths[i] for i in members) <= 16384 for members in bins)
        hits += len(bins) == math.ceil(sum(lengths) / 16384)
    assert hits >= 38


def test_splitting_cuts_the_largest_bin_in_two_nearly_equal_parts():
    lengths = [4, 3, 3, 2, 9]
    bins = [[0, 1, 2, 3], [4]]
    expand_bins_by_splitting(bins, 3, lengths)
    assert flat(bins) == [0, 1, 2, 3, 4] and len(bins) == 3
    assert sorted(sum(lengths[i] for i in members) for members in bins) == [6, 6, 9]


def test_splitting_single_sequences_is_refused():
    with pytest.raises(ValueError, match="cannot make 3 micro-batches out of 2 sequences"):
        expand_bins_by_splitting([[0], [1]], 3, [5, 5])


@given(st.permutations(list(range(12))))
def test_reverse_index_is_the_inverse(order):
    reverse = get_reverse_idx(order)
    assert [order[i] for i in reverse] == list(range(12))
