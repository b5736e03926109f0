from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.flops_utils import calculate_fwd_flops


def make_args(**changes):
    base = dict(use_dynamic_batch_size=True, max_tokens_per_gpu=100, micro_batch_size=1, balance_data=False)
    return Namespace(**(base | changes))


def rows_of_step(schedule, step):
    """Global rows of a step per rank, following num_microbatches and micro_batch_indices."""
    partitions, micro_batches, counts, _ = schedule
    start = sum(counts[:step])
    return [
        [[partition[i] for i in members] for members in per_rank[start : start + counts[step]]]
        for partition, per_rank in zip(partitions, micro_batches, strict=True)
    ]


@given(
    rollouts=st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=4), min_size=4, max_size=14),
    dp=st.sampled_from([1, 2, 4]),
    gbs=st.integers(4, 5),
    balance=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_dynamic_schedule_invariants(rollouts, dp, gbs, balance, shuffle):
    rows = [(rollout, length) for rollout, lengths in enumerate(rollouts) for length in lengths]
    shuffle.shuffle(rows)
    ids, lengths = [r for r, _ in rows], [length for _, length in rows]
    args = make_args(balance_data=balance)
    try:
        schedule = build_dp_schedule(args, {"dp_size": dp}, lengths, global_batch_size=gbs, rollout_indices=ids)
    except AssertionError:
        assert len(rollouts) < gbs  # with at least four rollouts a step the ranks are always filled
        return
    except ValueError as error:
        assert "micro-batches" in str(error)  # not enough rows to split: padding prevents it in training
        return
    partitions, _, counts, sizes = schedule
    steps = len(rollouts) // gbs
    assert len(counts) == steps and sizes == [gbs] * steps
    order = list(dict.fromkeys(ids))
    for step in range(steps):
        expected = {i for i, r in enumerate(ids) if r in order[step * gbs : (step + 1) * gbs]}
        per_rank = rows_of_step(schedule, step)
        assert {len(micro) for micro in per_rank} == {counts[step]}
        seen = [i for micro in per_rank for members in micro for i in members]
        assert sorted(seen) == sorted(expected)
        for micro in per_rank:
            for members in micro:
                assert members and (len(members) == 1 or sum(lengths[i] for i in members) <= 100)
    assert len({i for p in partitions for i in p}) == sum(map(len, partitions))


def test_static_chunks_are_strided_over_ranks():
    args = make_args(use_dynamic_batch_size=False, micro_batch_size=2)
    schedule = build_dp_schedule(args, {"dp_size": 2}, [5] * 8, global_batch_size=8, rollout_indices=list(range(8)))
    assert schedule == ([[0, 1, 4, 5], [2, 3, 6, 7]], [[[0, 1], [2, 3]], [[0, 1], [2, 3]]], [2], [8])


def test_static_indivisible_step_is_an_assertion():
    args = make_args(use_dynamic_batch_size=False, micro_batch_size=2)
    with pytest.raises(AssertionError, match="not divisible by --micro-batch-size 2 x 2"):
        build_dp_schedule(args, {"dp_size": 2}, [5] * 6, global_batch_size=6, rollout_indices=list(range(6)))


def test_dynamic_first_fit_then_split_to_a_multiple_of_the_ranks():
    # first fit: {60, 40}, {50, 30, 20} -> two bins; three ranks need a third: the first bin (100, as large) is cut
    lengths = [60, 50, 40, 30, 20]
    schedule = build_dp_schedule(
        make_args(), {"dp_size": 3}, lengths, global_batch_size=5, rollout_indices=[0, 1, 2, 3, 4]
    )
    assert schedule[2] == [1]
    assert sorted(sorted(p) for p in schedule[0]) == [[0], [1, 3, 4], [2]]


def test_context_parallel_ranks_multiply_the_budget():
    config = {"dp_size": 1, "cp_size": 2}
    schedule = build_dp_schedule(make_args(), config, [90, 90], global_batch_size=2, rollout_indices=[0, 1])
    assert schedule[2] == [1]


def test_virtual_pipeline_multiplies_the_micro_batch_count():
    config = {"dp_size": 2, "vpp_size": 2, "microbatch_group_size": 2}
    schedule = build_dp_schedule(make_args(), config, [10] * 8, global_batch_size=8, rollout_indices=list(range(8)))
    assert schedule[2] == [2]


def test_rollout_rows_stay_in_one_step_and_the_tail_is_left_out():
    ids = [7, 3, 7, 5, 3, 9, 1]
    schedule = build_dp_schedule(make_args(), {"dp_size": 1}, [1] * 7, global_batch_size=2, rollout_indices=ids)
    assert schedule[3] == [2, 2]
    assert [sorted(r[0][0]) for r in (rows_of_step(schedule, 0), rows_of_step(schedule, 1))] == [[0, 1, 2, 4], [3, 5]]


def test_balance_data_evens_token_sums():
    lengths = [100, 1, 99, 2, 98, 3, 97, 4]
    args = make_args(use_dynamic_batch_size=False, balance_data=True)
    partitions, _, counts, _ = build_dp_schedule(
        args, {"dp_size": 2}, lengths, global_batch_size=8, rollout_indices=list(range(8))
    )
    assert counts == [4]
    assert abs(sum(lengths[i] for i in partitions[0]) - sum(lengths[i] for i in partitions[1])) <= 2


def test_refusals_name_the_flag():
    with pytest.raises(AssertionError, match="--global-batch-size 4"):
        build_dp_schedule(make_args(), {"dp_size": 1}, [1] * 3, global_batch_size=4, rollout_indices=[0, 1, 2])
    with pytest.raises(AssertionError, match="2 samples for 4 data-parallel ranks"):
        build_dp_schedule(make_args(), {"dp_size": 4}, [1, 1], global_batch_size=2, rollout_indices=[0, 1])
    with pytest.raises(ValueError, match="--balance-by-flops: needs --use-dynamic-batch-size"):
        args = make_args(balance_by_flops=True, use_dynamic_batch_size=False)
        build_dp_schedule(args, {"dp_size": 1}, [1], global_batch_size=1, rollout_indices=[0])
    with pytest.raises(ValueError, match="2 lengths but 1 rollout ids"):
        build_dp_schedule(make_args(), {"dp_size": 1}, [1, 1], global_batch_size=1, rollout_indices=[0])


def test_flops_balance_gives_long_sequences_more_room():
    """Attention is quadratic: one sequence of 4000 costs more than two of 2000, so equal FLOPs are not equal tokens."""
    sizes = {"hidden_size": 8, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 16, "vocab_size": 10}
    args = make_args(max_tokens_per_gpu=5000, balance_by_flops=True, **sizes)
    lengths = [4000] + [500] * 12
    schedule = build_dp_schedule(args, {"dp_size": 2}, lengths, global_batch_size=13, rollout_indices=list(range(13)))
    assert sorted(i for part in schedule[0] for i in part) == list(range(13)) and schedule[2] == [1]
    costs = [calculate_fwd_flops([lengths[i] for i in part], args) for part in schedule[0]]
    assert [0] in schedule[0] and max(costs) == calculate_fwd_flops([4000], args)
    by_tokens = build_dp_schedule(
        make_args(max_tokens_per_gpu=5000, balance_data=True), {"dp_size": 2}, lengths, global_batch_size=13,
        rollout_indices=list(range(13)),
    )  # fmt: skip
    assert [0] not in by_tokens[0]
