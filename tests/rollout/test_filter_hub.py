"""Dynamic filters: spread of rewards, fan-out groups, drop decision, counts."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.types import Sample

ARGS = Namespace(reward_key=None)


def group(*rewards):
    return [Sample(reward=reward) for reward in rewards]


@pytest.mark.parametrize(
    "rewards, keep, reason",
    [
        ((0.0, 1.0), True, None),
        ((1.0, 1.0, 1.0), False, "zero_std_1.0"),
        ((0.26, 0.26), False, "zero_std_0.3"),
        ((0.5, 0.5 + 1e-7), False, "zero_std_0.5"),
        ((1.0,), False, "zero_std_1.0"),
        ((None, 1.0, 0.0), True, None),
        ((None, 1.0), False, "zero_std_1.0"),
        ((None, None), False, "no_scored_rollout"),
    ],
)
def test_nonzero_std(rewards, keep, reason):
    output = check_reward_nonzero_std(ARGS, group(*rewards))
    assert (output.keep, output.reason, output.keep_when_insufficient) == (keep, reason, False)


@pytest.mark.parametrize("check", [check_reward_nonzero_std, check_reward_nonzero_std_with_fallback])
def test_fan_out_groups_count_each_rollout_once(check):
    mixed = [group(1.0, 1.0, 1.0), group(0.0)]
    uniform = [group(1.0, 1.0), [Sample(reward=1.0)]]
    assert check(ARGS, mixed).keep and not check(ARGS, uniform).keep


def test_flat_siblings_of_one_rollout_count_once():
    siblings = [Sample(reward=1.0, rollout_id=3), Sample(reward=0.0, rollout_id=3)]
    assert not check_reward_nonzero_std(ARGS, siblings).keep


def test_dict_rewards_use_the_reward_key():
    samples = [Sample(reward={"score": 1.0, "len": 3}), Sample(reward={"score": -1.0, "len": 3})]
    assert check_reward_nonzero_std(Namespace(reward_key="score"), samples).keep
    assert not check_reward_nonzero_std(Namespace(reward_key="len"), samples).keep


def test_fallback_keeps_only_when_nothing_is_left_to_take():
    output = check_reward_nonzero_std_with_fallback(ARGS, group(1.0, 1.0))
    assert not should_drop_dynamic_filter_output(output, remaining_batch_size=4, target_data_size=4)
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=5, target_data_size=4)
    plain = check_reward_nonzero_std(ARGS, group(1.0, 1.0))
    assert should_drop_dynamic_filter_output(plain, remaining_batch_size=4, target_data_size=4)


def test_call_wraps_bools_and_missing_filters():
    assert call_dynamic_filter(None).keep
    assert call_dynamic_filter(lambda a, b: False, 1, 2) == DynamicFilterOutput(keep=False)
    own = DynamicFilterOutput(keep=True, reason="x")
    assert call_dynamic_filter(lambda: own) is own


def test_drops_are_counted_by_reason():
    gatherer = MetricGatherer()
    for reason in ("a", "b", "a", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2, "rollout/dynamic_filter/drop_b": 1}
