"""Which sample goes to which data-parallel rank, in which optimiser step and in which micro-batch.

Input: lengths and rollout ids of all samples of one rollout, and the parallel layout of the trainer. Pure function.

Invariants:
* an optimiser step holds `global_batch_size` whole rollouts; samples of one rollout are never split across steps;
* every rank has the same number of micro-batches in a step (collectives stay aligned);
* within the steps every sample is scheduled exactly once.

Rollouts beyond a multiple of `global_batch_size` are left out here. In training that case does not occur:
`slime.rollout.trailing` carries them into the next batch, and `pad_to_global_batch` fills what is left. With `balance_by_flops` micro-batches have nearly equal forward FLOPs, and the
token budget only decides how many there are.
"""

from __future__ import annotations

from typing import Any

from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.seqlen_balancing import expand_bins_by_splitting, first_fit_pack, get_seqlen_balanced_partitions

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def group_by_rollout(rollout_indices: list[int]) -> list[list[int]]:
    """Sample positions of each rollout, rollouts in order of first occurrence."""
    groups: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        groups.setdefault(rollout, []).append(position)
    return list(groups.values())


def split_into_steps(rollout_indices: list[int], global_batch_size: int) -> list[list[int]]:
    """Sample positions of each optimiser step. Raises AssertionError when there is not one full step."""
    rollouts = group_by_rollout(rollout_indices)
    num_steps = len(rollouts) // global_batch_size
    assert num_steps >= 1, (
        f"{len(rollouts)} rollouts do not fill one optimiser step of --global-batch-size {global_batch_size}; "
        "raise --rollout-batch-size or --n-samples-per-prompt, or lower --global-batch-size"
    )
    steps = []
    for step in range(num_steps):
        chosen = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        steps.append([position for rollout in chosen for position in rollout])
    return steps


def micro_batch_multiple(train_parallel_config: dict[str, Any]) -> int:
    """The number of micro-batches of a step must be a multiple of this, so that all ranks get equally many."""
    multiple = int(train_parallel_config["dp_size"])
    if int(train_parallel_config.get("vpp_size") or 1) > 1:
        multiple *= int(train_parallel_config.get("microbatch_group_size") or 1)
    return multiple


def _pack_under_cap(lengths: list[int], cap: int) -> list[list[int]]:
    """First fit; when input order wastes a bin, first fit over decreasing lengths (the better of the two)."""
    bins = first_fit_pack(lengths, cap)
    if len(bins) <= -(-sum(lengths) // cap):
        return bins
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    decreasing = first_fit_pack([lengths[i] for i in order], cap)
    if len(decreasing) >= len(bins):
        return bins
    return sorted(sorted(order[i] for i in members) for members in decreasing)


def _micro_batches(args: Any, config: dict[str, Any], samples: list[int], total_lengths: list[int]) -> list[list[int]]:
    """Micro-batches (global positions) of one step over all ranks; their number is a multiple of the rank count."""
    multiple = micro_batch_multiple(config)
    if not args.use_dynamic_batch_size:
        size = args.micro_batch_size
        assert len(samples) % (size * multiple) == 0, (
            f"a step of {len(samples)} samples is not divisible by --micro-batch-size {size} x {multiple} "
            "(data-parallel ranks x virtual pipeline group)"
        )
        return [samples[start : start + size] for start in range(0, len(samples), size)]
    lengths = [total_lengths[position] for position in samples]
    cap = args.max_tokens_per_gpu * int(config.get("cp_size") or 1)
    if getattr(args, "balance_by_flops", False):
        bins = _equal_flops(args, lengths, -(-sum(lengths) // cap))
    else:
        bins = _pack_under_cap(lengths, cap)
    expand_bins_by_splitting(bins, -(-len(bins) // multiple) * multiple, lengths)
    return [[samples[i] for i in members] for members in bins]


def _equal_flops(args: Any, lengths: list[int], count: int) -> list[list[int]]:
    """`count` groups (at most one per sample) of nearly equal forward FLOPs."""
    costs = [calculate_fwd_flops([length], args) for length in lengths]
    return get_seqlen_balanced_partitions(costs, min(count, len(lengths)), equal_size=False)


def _assign_to_ranks(args: Any, bins: list[list[int]], dp_size: int, total_lengths: list[int]) -> list[list[int]]:
    """Numbers of the micro-batches of each rank: strided, or equal counts with nearly equal sums of tokens or FLOPs."""
    by_flops = getattr(args, "balance_by_flops", False)
    if not (getattr(args, "balance_data", False) or by_flops):
        return [list(range(rank, len(bins), dp_size)) for rank in range(dp_size)]
    lengths = [[total_lengths[position] for position in members] for members in bins]
    weights = [calculate_fwd_flops(row, args) if by_flops else sum(row) for row in lengths]
    return get_seqlen_balanced_partitions(weights, dp_size, equal_size=True)


def _check_request(args: Any, total_lengths: list[int], rollout_indices: list[int]) -> None:
    if getattr(args, "balance_by_flops", False) and not args.use_dynamic_batch_size:
        raise ValueError("--balance-by-flops: needs --use-dynamic-batch-size")
    if len(total_lengths) != len(rollout_indices):
        raise ValueError(f"{len(total_lengths)} lengths but {len(rollout_indices)} rollout ids")


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """Schedules one rollout's samples. Reads `use_dynamic_batch_size, max_tokens_per_gpu, micro_batch_size, balance_data`,
    and with `balance_by_flops` the sizes of the model (`slime.utils.flops_utils`).

    `train_parallel_config`: `dp_size`, optional `cp_size`, `vpp_size`, `microbatch_group_size`.

    Returns `(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)`:
    `partitions[rank]` = global positions; `micro_batch_indices[rank]` = one list of positions *within the partition* per
    micro-batch, steps one after the other; `num_microbatches[step]` per rank; `global_batch_sizes[step]` in rollouts.

    Raises AssertionError when the samples do not fill a step, a step has fewer samples than ranks, or (static) the step
    does not divide into micro-batches; ValueError when no split reaches a multiple of the ranks.
    """
    _check_request(args, total_lengths, rollout_indices)
    dp_size = int(train_parallel_config["dp_size"])
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp_size)]
    num_microbatches: list[int] = []
    for number, samples in enumerate(split_into_steps(rollout_indices, global_batch_size)):
        assert len(samples) >= dp_size, f"step {number} has {len(samples)} samples for {dp_size} data-parallel ranks"
        bins = _micro_batches(args, train_parallel_config, samples, total_lengths)
        for rank, chosen in enumerate(_assign_to_ranks(args, bins, dp_size, total_lengths)):
            for members in (bins[n] for n in chosen):
                start = len(partitions[rank])
                micro_batch_indices[rank].append(list(range(start, start + len(members))))
                partitions[rank].extend(members)
        num_microbatches.append(len(bins) // dp_size)
    return partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(num_microbatches)
