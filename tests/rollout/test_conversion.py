import math
from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout import conversion as C
from slime.utils.types import Sample

Status = Sample.Status


def make_args(**changes):
    base = dict(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        n_samples_per_prompt=4,
        reward_key=None,
        custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None,
        global_batch_size=4,
        micro_batch_size=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=64,
        balance_data=False,
    )
    return Namespace(**(base | changes))


def make_sample(group=0, reward=0.0, rollout=None, index=0, response=3, **fields):
    values = dict(
        group_index=group,
        index=index,
        rollout_id=rollout,
        tokens=list(range(1, response + 3)),
        response_length=response,
        reward=reward,
        status=Status.COMPLETED,
        rollout_log_probs=[-0.5] * response,
    )
    return Sample(**(values | fields))


def group_of(rewards, group=0):
    return [make_sample(group, reward, index=i) for i, reward in enumerate(rewards)]


def rewards_of(samples, **changes):
    return C.post_process_rewards(make_args(**changes), samples)[1]


# --- normalisation


@pytest.mark.parametrize(
    ("rewards", "std", "expected"),
    [
        ([1, 0, 0, 0], True, [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], False, [0.75, -0.25, -0.25, -0.25]),
        ([1, 1, 0, 0, 0, 0, 0, 0], True, [1.6202] * 2 + [-0.5401] * 6),
    ],
)
def test_golden_group_advantages(rewards, std, expected):
    assert rewards_of(group_of(rewards), grpo_std_normalization=std) == pytest.approx(expected, abs=1e-4)


def test_uneven_groups_are_normalised_apart():
    samples = group_of([1, 0, 0, 1], 0) + group_of([5, 5, 5], 1) + group_of([0, 1, 0, 0], 2)
    got = rewards_of(samples)
    assert got[4:7] == [0.0, 0.0, 0.0]
    assert sum(got[:4]) == pytest.approx(0) and sum(got[7:]) == pytest.approx(0)
    assert got[8] == pytest.approx(1.5, abs=1e-4)


@pytest.mark.parametrize("rewards", [[1.0], [0.3] * 4, [0.1 + 0.2] * 3])
def test_single_and_all_equal_groups_are_exactly_zero(rewards):
    assert rewards_of(group_of(rewards)) == [0.0] * len(rewards)


def test_a_rollout_counts_once():
    samples = [make_sample(0, 1.0, rollout=7, index=i) for i in range(3)] + [make_sample(0, 0.0, rollout=8)]
    assert rewards_of(samples, grpo_std_normalization=False) == [0.5, 0.5, 0.5, -0.5]
    # one turn with reward 1 against three turns with reward 0: trajectory level, not turn level
    samples = [make_sample(0, 1.0, rollout=1)] + [make_sample(0, 0.0, rollout=2) for _ in range(3)]
    assert rewards_of(samples) == pytest.approx([0.7071] + [-0.7071] * 3, abs=1e-4)


def test_siblings_with_different_rewards_are_refused():
    samples = [make_sample(0, 1.0, rollout=7), make_sample(0, 0.5, rollout=7)]
    with pytest.raises(ValueError, match="rollout_id 7 have different rewards"):
        rewards_of(samples)


def test_a_rollout_id_in_two_groups_is_refused():
    with pytest.raises(ValueError, match="rollout_id 7 appears in groups 0 and 1"):
        rewards_of([make_sample(0, 1.0, rollout=7), make_sample(1, 1.0, rollout=7)])


@given(st.permutations(list(range(8))))
def test_order_of_samples_does_not_matter(order):
    samples = group_of([1, 0, 0, 1], 0) + group_of([2, 0, 1, 0], 1)
    expected = rewards_of(samples)
    assert rewards_of([samples[i] for i in order]) == pytest.approx([expected[i] for i in order])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 20)), min_size=1, max_size=30))
def test_groups_have_zero_mean_and_at_most_unit_std(rows):
    got = rewards_of([make_sample(group, reward / 4) for group, reward in rows])
    for group in range(4):
        values = [value for value, (g, _) in zip(got, rows, strict=True) if g == group]
        assert math.fsum(values) == pytest.approx(0, abs=1e-9)
        if any(values):
            std = math.sqrt(math.fsum(v * v for v in values) / (len(values) - 1))
            assert std == pytest.approx(1, abs=1e-4)


def test_missing_group_index():
    samples = [make_sample(None, 1.0), make_sample(None, 0.0)]
    with pytest.raises(ValueError, match="no group_index.*--disable-rewards-normalization"):
        rewards_of(samples)
    assert rewards_of(samples, n_samples_per_prompt=1) == [0.0, 0.0]
    assert rewards_of(samples, rewards_normalization=False) == [1.0, 0.0]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_value_based_estimators_use_raw_rewards(estimator):
    assert rewards_of(group_of([1, 0, 0]), advantage_estimator=estimator) == [1.0, 0.0, 0.0]


def test_reinforce_baseline_is_centred_but_not_scaled():
    got = rewards_of(group_of([1, 0, 0, 0]), advantage_estimator="reinforce_plus_plus_baseline")
    assert got == [0.75, -0.25, -0.25, -0.25]


def test_failures_leave_the_statistics():
    samples = group_of([1, 0, 0, 9], 0)
    samples[3].status = Status.FAILED
    samples += group_of([1, None, 0], 1)
    samples.append(make_sample(1, None, status=Status.ABORTED))
    raw, got = C.post_process_rewards(make_args(grpo_std_normalization=False), samples)
    assert raw == [1.0, 0.0, 0.0, None, 1.0, None, 0.0, None]
    assert got == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0.5, 0, -0.5, 0])


def test_reward_dicts_and_bad_rewards():
    samples = group_of([{"acc": 1, "len": 3}, {"acc": 0, "len": 5}])
    assert rewards_of(samples, reward_key="acc", rewards_normalization=False) == [1.0, 0.0]
    for key in (None, "missing"):
        with pytest.raises(ValueError, match=r"set --reward-key to one of its keys \(acc, len\)"):
            rewards_of(samples, reward_key=key)
    with pytest.raises(ValueError, match="the reward is nan"):
        rewards_of(group_of([math.nan, 0.0]))
    with pytest.raises(ValueError, match="is not a number"):
        rewards_of(group_of(["good", 0.0]))


def doubled(args, samples):
    return [s.reward for s in samples], [2 * (s.reward or 0) for s in samples]


def too_short(args, samples):
    return [1.0], [1.0]


def test_custom_reward_post_processing():
    path = f"{__name__}.doubled"
    samples = group_of([1.0, None])
    args = make_args(custom_reward_post_process_path=path)
    assert C.post_process_rewards(args, samples) == ([1.0, None], [2.0, 0.0])
    assert C.convert_samples_to_train_data(args, samples)["loss_masks"] == [[1, 1, 1]] * 2
    with pytest.raises(ValueError, match="returned 1 raw and 1 rewards for 2 samples"):
        rewards_of(samples, custom_reward_post_process_path=f"{__name__}.too_short")


# --- rows


def test_flatten_and_ids():
    a, b, c = make_sample(rollout=1), make_sample(), make_sample()
    flat = C.flatten_samples([[a, [b]], [[c]]])
    assert flat == [a, b, c]
    C.assign_rollout_ids(flat)
    assert [s.rollout_id for s in flat] == [1, 0, 2]
    with pytest.raises(TypeError, match="found str"):
        C.flatten_samples([["x"]])


def test_default_rows():
    samples = [
        make_sample(0, 1.0, rollout=5, index=10, loss_mask=[1, 0, 1]),
        make_sample(0, 1.0, rollout=5, index=10, response=2, status=Status.TRUNCATED),
        make_sample(0, 0.0, index=11, metadata={"raw_reward": 0.25, "source_name": "math"}),
        make_sample(0, 0.0, index=12, remove_sample=True),
    ]
    data = C.convert_samples_to_train_data(make_args(grpo_std_normalization=False), samples)
    assert data["rollout_ids"] == [5, 5, 0, 1]
    assert data["loss_masks"] == [[1, 0, 1], [1, 1], [1, 1, 1], [0, 0, 0]]
    assert data["rollout_mask_sums"] == [4, 4, 3, 0]
    assert data["raw_reward"] == [1.0, 1.0, 0.25, 0.0]
    assert data["rewards"] == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])  # the removed one counts
    assert data["truncated"] == [0, 1, 0, 0]
    assert data["sample_indices"] == [10, 10, 11, 12]
    assert data["source_names"] == [None, None, "math", None]
    assert data["response_lengths"] == [3, 2, 3, 3] and "metadata" not in data
    assert {len(column) for column in data.values()} == {4}


def test_failed_and_empty_samples_become_masked_rows():
    samples = [
        make_sample(0, 1.0),
        make_sample(0, 0.0),
        make_sample(0, 1.0, status=Status.FAILED, rollout_log_probs=None),
        Sample(group_index=0, index=9, status=Status.FAILED),
        make_sample(0, 0.5, status=Status.TRUNCATED, response=0),
    ]
    data = C.convert_samples_to_train_data(make_args(grpo_std_normalization=False), samples)
    assert data["loss_masks"][2:] == [[0, 0, 0], [0], [0]]
    assert data["tokens"][3:] == [[0, 0], [0, 0]] and data["response_lengths"][3:] == [1, 1]
    assert data["rewards"] == [0.5, -0.5, 0.0, 0.0, 0.0]  # the empty truncated answer was scored and counts
    assert data["raw_reward"] == [1.0, 0.0, None, None, 0.5]
    assert data["rollout_log_probs"][2:] == [[0.0] * 3, [0.0], [0.0]]


def test_a_batch_of_failures_only_still_has_log_probs():
    data = C.convert_samples_to_train_data(make_args(), [Sample(group_index=0, status=Status.FAILED)])
    assert data["rollout_log_probs"] == [[0.0]] and data["rewards"] == [0.0]


def test_log_probs_for_all_or_none():
    without = [make_sample(rollout_log_probs=None), make_sample(rollout_log_probs=None)]
    assert "rollout_log_probs" not in C.convert_samples_to_train_data(make_args(), without)
    with pytest.raises(ValueError, match="has no rollout_log_probs while others have"):
        C.convert_samples_to_train_data(make_args(), [make_sample(), make_sample(rollout_log_probs=None)])
    with pytest.raises(ValueError, match="row 0: 2 rollout_log_probs but response_length is 3"):
        C.convert_samples_to_train_data(make_args(), [make_sample(rollout_log_probs=[0.0, 0.0])])


def test_bad_samples_are_refused():
    with pytest.raises(AssertionError, match="loss_mask has 2 entries"):
        C.convert_samples_to_train_data(make_args(), [make_sample(loss_mask=[1, 1])])
    with pytest.raises(ValueError, match="at least one prompt"):
        C.convert_samples_to_train_data(make_args(), [make_sample(tokens=[1, 2, 3])])
    with pytest.raises(ValueError, match="returned no samples"):
        C.convert_samples_to_train_data(make_args(), [])


def expand(args, samples):
    """Every sample becomes two turns; brings neither rollout_ids nor mask sums."""
    rows = [s for s in samples for _ in range(2)]
    return {
        "tokens": [s.tokens for s in rows],
        "response_lengths": [s.response_length for s in rows],
        "rewards": [0.5] * len(rows),
        "loss_masks": [[1] * s.response_length for s in rows],
        "token_weights": [[0.1] * s.response_length for s in rows],
        "turn": [i % 2 for i in range(len(rows))],
        "note": ["x"] * len(rows),
    }


def uneven(args, samples):
    return expand(args, samples) | {"rewards": [0.5]}


def test_custom_conversion_is_completed_and_padded():
    args = make_args(custom_convert_samples_to_train_data_path=f"{__name__}.expand")
    data = C.convert_samples_to_train_data(args, group_of([1, 0, 0]))
    padded = C.pad_to_global_batch(args, data, dp_size=1)
    assert padded["rollout_ids"] == list(range(8))
    assert padded["rollout_mask_sums"] == [3] * 6 + [0, 0]
    assert padded["token_weights"][6:] == [[0.0], [0.0]] and padded["turn"][6:] == [0, 0]
    assert padded["note"][6:] == [None, None] and padded["rewards"][6:] == [0.0, 0.0]
    assert len(data["tokens"]) == 6  # the input is untouched
    with pytest.raises(ValueError, match="'rewards' must be a list of 6 entries"):
        args.custom_convert_samples_to_train_data_path = f"{__name__}.uneven"
        C.convert_samples_to_train_data(args, group_of([1, 0, 0]))


# --- padding and distribution


def test_thirteen_rows_with_batch_four_all_survive():
    args = make_args()
    samples = [make_sample(i // 4, i % 2, index=i) for i in range(13)]
    padded = C.pad_to_global_batch(args, C.convert_samples_to_train_data(args, samples), 2)
    assert len(padded["tokens"]) == 16 and padded["sample_indices"][:13] == list(range(13))
    assert padded["loss_masks"][13:] == [[0]] * 3 and padded["raw_reward"][13:] == [None] * 3
    assert len(set(padded["rollout_ids"])) == 16


def test_masked_rows_join_a_rollout_and_share_its_denominator():
    args = make_args(use_dynamic_batch_size=False, micro_batch_size=2, global_batch_size=2)
    samples = [make_sample(0, 1.0, rollout=0), make_sample(0, 0.0, rollout=1), make_sample(0, 0.0, rollout=1)]
    padded = C.pad_to_global_batch(args, C.convert_samples_to_train_data(args, samples), 1)
    assert padded["rollout_ids"] == [0, 1, 1, 1]
    assert padded["rollout_mask_sums"] == [3, 6, 6, 6] and padded["loss_masks"][3] == [0]


def test_nothing_is_added_when_everything_fits():
    args = make_args()
    data = C.convert_samples_to_train_data(args, group_of([1, 0, 0, 1]))
    assert C.pad_to_global_batch(args, data, 2) == data


def test_padding_needs_a_batch_size():
    data = C.convert_samples_to_train_data(make_args(), group_of([1, 0]))
    with pytest.raises(ValueError, match="--global-batch-size"):
        C.pad_to_global_batch(make_args(global_batch_size=None), data, 1)


def test_splitting_without_padding_is_refused():
    args = make_args()
    data = C.convert_samples_to_train_data(args, group_of([1, 0, 0, 1, 1]))
    with pytest.raises(ValueError, match="pad_to_global_batch"):
        C.split_train_data_by_dp(args, data, 1)


def test_share_of_a_rank():
    args = make_args(use_dynamic_batch_size=False)
    data = C.pad_to_global_batch(args, C.convert_samples_to_train_data(args, group_of([1, 0, 0])), 2)
    first, second = C.split_train_data_by_dp(args, data, 2)
    assert first["partition"] == [0, 2] and second["partition"] == [1, 3]
    assert first["raw_reward"] == second["raw_reward"] == [1.0, 0.0, 0.0, None]
    assert first["total_lengths"] == [5, 5, 5, 2]
    assert first["num_microbatches"] == [2] and first["global_batch_sizes"] == [4]
    assert first["micro_batch_indices"] == [[0], [1]] and second["response_lengths"] == [3, 1]
    dtypes = [first[key][0].dtype for key in ("tokens", "loss_masks", "rollout_log_probs")]
    assert dtypes == [torch.int64, torch.int32, torch.float32]
    assert second["tokens"][1].tolist() == [0, 0] and second["loss_masks"][1].tolist() == [0]


@settings(max_examples=80, deadline=None)
@given(
    rollouts=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    dp=st.sampled_from([1, 2, 3]),
    gbs=st.integers(1, 7),
    dynamic=st.booleans(),
    micro=st.integers(1, 3),
    balance=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_real_row_is_trained_exactly_once(rollouts, dp, gbs, dynamic, micro, balance, shuffle):
    samples = [
        make_sample(0, float(r % 2), rollout=10 + r, response=length)
        for r, lengths in enumerate(rollouts)
        for length in lengths
    ]
    shuffle.shuffle(samples)
    for i, sample in enumerate(samples):
        sample.index = i
    args = make_args(
        global_batch_size=gbs, use_dynamic_batch_size=dynamic, micro_batch_size=micro, balance_data=balance
    )
    data = C.convert_samples_to_train_data(args, samples)
    shares = C.split_train_data_by_dp(args, C.pad_to_global_batch(args, data, dp), dp)

    seen = [i for share in shares for i in share["sample_indices"]]
    assert sorted(i for i in seen if i >= 0) == list(range(len(samples)))
    steps = -(-len(rollouts) // gbs)
    step_of: dict[int, int] = {}
    trained = 0
    for share in shares:
        assert share["global_batch_sizes"] == [gbs] * steps
        assert share["num_microbatches"] == shares[0]["num_microbatches"]
        micro_batches = share["micro_batch_indices"]
        assert len(micro_batches) == sum(share["num_microbatches"])
        assert sorted(i for members in micro_batches for i in members) == list(range(len(share["tokens"])))
        bounds = [step for step, count in enumerate(share["num_microbatches"]) for _ in range(count)]
        for step, members in zip(bounds, micro_batches, strict=True):
            for row in members:
                assert step_of.setdefault(share["rollout_ids"][row], step) == step
                trained += int(share["loss_masks"][row].sum())
                if share["sample_indices"][row] < 0:
                    assert not share["loss_masks"][row].any()
    assert trained == sum(s.response_length for s in samples)
    assert len(step_of) == steps * gbs
