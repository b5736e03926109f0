"""Partitioning of sequence lengths: equal work per rank, and bins under a token budget.

Input is always a plain list of lengths; output is a list of groups of positions in that list.

Invariants: every position appears in exactly one group; the result depends on the input only (no randomness), so every
process that is given the same lengths computes the same partition. A bin holds at most the budget, except a bin with a
single sequence that is longer than the budget on its own.

Left out: what a length costs (tokens or FLOPs is the caller's choice) and which rank gets which group
(`slime.utils.dp_schedule`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Groups = list[tuple[int, list[int]]]


def _differencing_start(lengths: Sequence[int], k: int, equal_size: bool) -> list[Groups]:
    """Initial partial solutions: one sequence each, or k sequences each when all groups must have the same size."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    width = k if equal_size else 1
    states = []
    for start in range(0, len(order), width):
        chunk = [(lengths[i], [i]) for i in reversed(order[start : start + width])]
        states.append(chunk + [(0, []) for _ in range(k - len(chunk))])
    return states


def _merge(a: Groups, b: Groups) -> Groups:
    """Joins the heaviest group of `a` with the lightest of `b` and so on; groups are kept heaviest first."""
    joined = [(sum_a + sum_b, ids_a + ids_b) for (sum_a, ids_a), (sum_b, ids_b) in zip(a, reversed(b), strict=True)]
    return sorted(joined, key=lambda group: group[0], reverse=True)


def karmarkar_karp(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing method (Karmarkar and Karp, 1982) for `k_partitions` groups of nearly equal sum.

    With `equal_size` all groups hold the same number of sequences. Raises ValueError when that cannot be done.
    """
    _check_request(seqlen_list, k_partitions, equal_size)
    if not seqlen_list:
        return [[] for _ in range(k_partitions)]
    # The spread (heaviest - lightest) is negated because heapq pops the smallest; the counter breaks ties.
    heap = [
        (s[-1][0] - s[0][0], n, s) for n, s in enumerate(_differencing_start(seqlen_list, k_partitions, equal_size))
    ]
    heapq.heapify(heap)
    counter = len(heap)
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], counter, merged))
        counter += 1
    return [sorted(ids) for _, ids in heap[0][2]]


def greedy_partition(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Longest sequence first, always into the lightest group that still has room. Same contract as `karmarkar_karp`."""
    _check_request(seqlen_list, k_partitions, equal_size)
    room = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    groups: list[list[int]] = [[] for _ in range(k_partitions)]
    heap = [(0, rank) for rank in range(k_partitions)]
    for i in sorted(range(len(seqlen_list)), key=lambda i: (-seqlen_list[i], i)):
        total, rank = heapq.heappop(heap)
        groups[rank].append(i)
        if len(groups[rank]) < room:
            heapq.heappush(heap, (total + seqlen_list[i], rank))
    return [sorted(group) for group in groups]


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`k_partitions` non-empty, sorted groups of positions with nearly equal sums of length.

    Raises ValueError when there are fewer sequences than groups, or, with `equal_size`, when the count does not divide.
    """
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"cannot split {len(seqlen_list)} sequences into {k_partitions} non-empty groups")
    groups = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    if all(groups):
        return groups
    # Differencing may leave a group empty when some lengths are 0; greedy by count never does.
    return greedy_partition([length + 1 for length in seqlen_list], k_partitions, equal_size)


def _check_request(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> None:
    if k_partitions < 1:
        raise ValueError(f"the number of partitions must be at least 1, got {k_partitions}")
    if equal_size and len(seqlen_list) % k_partitions:
        raise ValueError(f"{len(seqlen_list)} sequences cannot be split into {k_partitions} groups of equal size")


class _FreeSpace:
    """Max tree over the free space of all bins: the first bin with enough room is found in O(log n)."""

    def __init__(self, bins: int, capacity: int) -> None:
        self.leaves = 1 << max(bins - 1, 0).bit_length()
        self.tree = [capacity] * (2 * self.leaves)

    def take_first(self, need: int) -> int:
        """Reserves `need` in the leftmost bin that has it; returns the bin number."""
        node = 1
        while node < self.leaves:
            node = 2 * node if self.tree[2 * node] >= need else 2 * node + 1
        self.tree[node] -= need
        found = node - self.leaves
        while node > 1:
            node //= 2
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])
        return found


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int) -> list[list[int]]:
    """First fit in input order: each sequence goes into the first bin with room for it.

    A sequence longer than `max_tokens_per_bin` gets a bin for itself. Raises ValueError when the budget is below 1.
    """
    if max_tokens_per_bin < 1:
        raise ValueError(f"the token budget of a bin must be at least 1, got {max_tokens_per_bin}")
    free = _FreeSpace(len(total_lengths), max_tokens_per_bin)
    bins: dict[int, list[int]] = {}
    for i, length in enumerate(total_lengths):
        # An oversized sequence is clipped to a whole bin: only an empty bin has that much room.
        bins.setdefault(free.take_first(min(length, max_tokens_per_bin)), []).append(i)
    return [bins[number] for number in sorted(bins)]


def expand_bins_by_splitting(bins: list[list[int]], target_count: int, lengths: Sequence[int]) -> None:
    """Splits, in place, the largest bin that holds several sequences until there are `target_count` bins.

    A bin is cut into two halves of nearly equal sum. Raises ValueError when only single-sequence bins are left.
    """
    while len(bins) < target_count:
        candidates = [n for n, members in enumerate(bins) if len(members) > 1]
        if not candidates:
            raise ValueError(
                f"cannot make {target_count} micro-batches out of {len(bins)} sequences; "
                "lower the number of data-parallel ranks or raise --global-batch-size"
            )
        largest = max(candidates, key=lambda n: sum(lengths[i] for i in bins[n]))
        members = bins[largest]
        first, second = get_seqlen_balanced_partitions([lengths[i] for i in members], 2, equal_size=False)
        bins[largest] = [members[i] for i in first]
        bins.append([members[i] for i in second])


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Inverse of a permutation: `out[idx_map[i]] == i`."""
    reverse = [0] * len(idx_map)
    for position, target in enumerate(idx_map):
        reverse[target] = position
    return reverse
