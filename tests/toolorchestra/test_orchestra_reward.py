"""Equation 2, the reward hook and the filters: facts 1 to 6 and 9 of the method, and properties of the equation."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace

import pytest
from helpers_orchestra_rows import GROUP, OUTCOME_ONLY, THRIFTY, episode, finished
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic.common.errors import ConfigError
from agentic.common.group_stats import group_advantages
from agentic.common.ledger import CostLedger
from agentic.toolorchestra.filters import (
    Span,
    clip_advantages,
    filter_report,
    homogeneous_groups,
    mask_malformed,
    sample_std,
)
from agentic.toolorchestra.preferences import Features
from agentic.toolorchestra.reward import (
    features_of,
    normalise,
    outcome_rewards,
    preference_rewards,
    reward_func,
)
from slime.utils.types import Sample


def worked_group(weights: dict[str, float], **changes: dict) -> list[Features]:
    made = []
    for name, (search, answer, outcome, dollars, seconds) in GROUP.items():
        counts = {alias: n for alias, n in (("search-1", search), ("answer-1", answer)) if n}
        rollout = Features(counts, float(outcome), dollars, float(seconds), weights)
        made.append(replace(rollout, **changes.get(name, {})))
    return made


# --------------------------------------------------------------------------------------------------------------------
# Golden numbers.


@pytest.mark.parametrize(
    ("weights", "rewards", "advantages"),
    [
        (OUTCOME_ONLY, [1, 1, 0, 1], [0.5, 0.5, -1.5, 0.5]),
        (THRIFTY, [1.6458, 2, 0, 1], [0.5517, 0.9550, -1.3228, -0.1839]),
        ({"search-1": 1, "answer-1": 1}, [0.5, 0, 0, 1], [0.2611, -0.7833, -0.7833, 1.3056]),
    ],
)
def test_worked_group(weights, rewards, advantages):
    found = preference_rewards(worked_group(weights))
    assert found == pytest.approx(rewards, abs=1e-4)
    assert group_advantages(found, [0] * 4) == pytest.approx(advantages, abs=1e-3)


def test_all_correct_group_is_zero_for_outcome_only_and_is_rejected():
    found = preference_rewards(worked_group(OUTCOME_ONLY, C={"outcome": 1.0}))
    assert found == [0, 0, 0, 0]
    assert homogeneous_groups(found, [7] * 4) == {7}


def test_all_correct_group_still_compares_cost_and_time():
    found = preference_rewards(worked_group(THRIFTY, C={"outcome": 1.0}))
    assert found == pytest.approx([0.6458, 1, 0.8542, 0], abs=1e-4)
    assert homogeneous_groups(found, [7] * 4) == set()


def test_missing_alias_counts_as_zero_and_is_part_of_the_minimum():
    group = [Features({"x": 2}, 1, 0, 0, {"x": 1}), Features({"x": 1}, 1, 0, 0, {"x": 1}), Features({}, 1, 0, 0, {})]
    assert preference_rewards(group) == [1.0, 0.5, 0.0]


def test_alias_nobody_used_and_alias_without_weight_are_ignored():
    group = [Features({"x": 5}, 1, 1.0, 1.0, {"y": 1.0}), Features({}, 1, 2.0, 2.0, {"y": 1.0, "cost": 1.0})]
    assert preference_rewards(group) == [0.0, 0.0]


def test_each_rollout_has_its_own_vector():
    group = [Features({}, 1, 0.0, 5.0, {"cost": 1}), Features({}, 1, 1.0, 0.0, {"latency": 0.25})]
    assert preference_rewards(group) == [1.0, 0.25]


def test_empty_and_single_groups():
    assert preference_rewards([]) == []
    assert preference_rewards(worked_group(THRIFTY)[:1]) == [0.0]
    assert normalise([3.0]) == [0.0]


def test_outcome_reward_is_equation_one():
    assert outcome_rewards(worked_group({})) == [1, 1, 0, 1]
    assert outcome_rewards([Features({}, 0.5, 0, 0), Features({}, 1 - 1e-7, 0, 0)]) == [0.0, 1.0]


# --------------------------------------------------------------------------------------------------------------------
# Properties.

amount = st.integers(0, 1000).map(lambda n: n / 100)
weight = st.sampled_from([0.0, 0.25, 0.5, 1.0])
ALIASES = ("a", "b")


@st.composite
def groups(draw, smallest=2):
    weights = {name: draw(weight) for name in (*ALIASES, "outcome", "cost", "latency")}
    size = draw(st.integers(smallest, 8))
    return [
        Features(
            {alias: draw(st.integers(0, 5)) for alias in ALIASES if draw(st.booleans())},
            float(draw(st.booleans())),
            draw(amount),
            draw(amount),
            weights,
        )
        for _ in range(size)
    ]


@given(groups(), amount, st.integers(1, 50))
@settings(deadline=None, max_examples=100)
def test_shift_of_cost_and_scale_of_time_change_nothing(group, shift, scale):
    changed = [replace(r, dollars=r.dollars + shift, seconds=r.seconds * scale) for r in group]
    assert preference_rewards(changed) == pytest.approx(preference_rewards(group), abs=1e-9)


def test_the_shift_and_scale_of_the_worked_group():
    changed = [replace(r, dollars=r.dollars + 0.5, seconds=r.seconds * 10) for r in worked_group(THRIFTY)]
    assert preference_rewards(changed) == pytest.approx([1.6458, 2, 0, 1], abs=1e-4)


@given(groups())
@settings(deadline=None, max_examples=100)
def test_wrong_is_exactly_zero_and_right_is_never_negative(group):
    highest = sum(group[0].weights.values())
    for rollout, reward in zip(group, preference_rewards(group), strict=True):
        assert reward == 0.0 if not rollout.correct else 0.0 <= reward <= highest + 1e-9


@given(groups(), st.data())
@settings(deadline=None, max_examples=100)
def test_cheaper_or_faster_is_never_worse(group, data):
    position = data.draw(st.integers(0, len(group) - 1))
    field = data.draw(st.sampled_from(["dollars", "seconds"]))
    old = group[position]
    cheaper = replace(old, **{field: getattr(old, field) * data.draw(st.sampled_from([0.0, 0.5, 0.9]))})
    before, after = preference_rewards(group), preference_rewards([*group[:position], cheaper, *group[position + 1 :]])
    assert after[position] >= before[position] - 1e-9


@given(st.floats(0, 10))
@settings(deadline=None, max_examples=50)
def test_raising_the_highest_cost_never_lowers_the_others(extra):
    before = preference_rewards(worked_group(THRIFTY))
    after = preference_rewards(worked_group(THRIFTY, D={"dollars": 0.09 + extra}))
    assert after[3] <= before[3] + 1e-12
    assert after[0] >= before[0] - 1e-12
    assert after[1] >= before[1] - 1e-12


@given(groups(), st.randoms())
@settings(deadline=None, max_examples=50)
def test_order_of_the_group_does_not_matter(group, random):
    order = list(range(len(group)))
    random.shuffle(order)
    rewards = preference_rewards(group)
    assert preference_rewards([group[i] for i in order]) == pytest.approx([rewards[i] for i in order])


@given(groups())
@settings(deadline=None, max_examples=50)
def test_best_correct_rollout_gets_the_whole_weight_of_money(group):
    weights = {"cost": 0.75}
    rewards = preference_rewards([replace(rollout, weights=weights) for rollout in group])
    costs = [rollout.dollars for rollout in group]
    for rollout, reward in zip(group, rewards, strict=True):
        if rollout.correct and rollout.dollars == min(costs) < max(costs):
            assert reward == pytest.approx(0.75)


# --------------------------------------------------------------------------------------------------------------------
# Dollars.


def test_dollars_of_calls_and_searches():
    ledger = CostLedger()
    ledger.record("answer-1", 10_000, 1_000, 1.0, 10_000 * 1.25e-6 + 1_000 * 10e-6)
    assert ledger.dollars == pytest.approx(0.0225)
    ledger.record("orchestrator", 20_000, 500, 1.0, 20_500 * 0.2e-6)
    assert ledger.dollars == pytest.approx(0.0225 + 0.0041)
    ledger.charge("search", 0.01 + 0.002 * 30, 0.5)
    assert ledger.dollars == pytest.approx(0.0225 + 0.0041 + 0.07)


# --------------------------------------------------------------------------------------------------------------------
# Filters.


def with_std(std: float, size: int = 8) -> list[float]:
    """Values whose sample standard deviation is `std`."""
    raw = [float(i) for i in range(size)]
    return [value * std / sample_std(raw) for value in raw]


def test_boundary_of_the_homogeneity_filter_is_the_sample_deviation():
    assert homogeneous_groups(with_std(0.0999), [1] * 8) == {1}
    assert homogeneous_groups(with_std(0.1001), [1] * 8) == set()
    population = with_std(0.1001)
    assert math.sqrt(sum((v - sum(population) / 8) ** 2 for v in population) / 8) < 0.1, "the other estimator drops it"
    assert homogeneous_groups([0.0, 0.25], [1, 1], sample_std([0.0, 0.25])) == {1}, "strictly above"


def test_homogeneity_ignores_failed_rollouts():
    rewards = [1.0, 1.0, None, 0.0, None, None, 0.5]
    groups_ = ["a", "a", "a", "b", "b", "c", "d"]
    assert homogeneous_groups(rewards, groups_) == {"a", "b", "c", "d"}
    assert homogeneous_groups([1.0, None, 0.0], ["a"] * 3) == set()
    assert homogeneous_groups([1.0, 1.0], ["a"] * 2, min_std=0) == {"a"}


def test_clip():
    assert clip_advantages([-9, -3, 0.5, 3, 3.01]) == [-3.0, -3, 0.5, 3, 3.0]
    assert clip_advantages([2.0], 1.0) == [1.0]


def test_malformed_turns_are_masked_where_they_stand():
    mask = [1, 1, 0, 0, 1, 1, 1, 0, 1]
    spans = [Span(0, 2, True), Span(4, 7, False), Span(8, 9, True)]
    assert mask_malformed(mask, spans) == [1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert mask == [1, 1, 0, 0, 1, 1, 1, 0, 1], "the argument is not changed"
    with pytest.raises(ValueError, match=r"\[8, 11\) lies outside a response of 9 tokens"):
        mask_malformed(mask, [Span(8, 11, False)])


def test_report_counts_by_reason():
    report = filter_report([None, "failed", "homogeneous", "homogeneous", "invalid_output"], [0, 0, 1, 1, 2], 3)
    assert report["trained"] == 1
    assert report["homogeneous"] == 2
    assert report["homogeneous_groups"] == 1
    assert report["groups"] == 3
    assert report["malformed"] == 0
    assert report["malformed_turns"] == 3


# --------------------------------------------------------------------------------------------------------------------
# The hook.


async def test_hook_gives_the_raw_outcome():
    right, wrong = finished(0, episode(outcome=1, dollars=0.5)), finished(1, episode(outcome=0))
    args = Namespace(reward_key=None)
    assert await reward_func(args, right) == 1.0
    assert await reward_func(args, [right, wrong]) == [1.0, 0.0]
    assert await reward_func(Namespace(), wrong) == 0.0


async def test_hook_gives_a_dict_under_reward_key():
    sample = finished(0, episode(outcome=1, dollars=0.5, seconds=3))
    expected = {"score": 1.0, "dollars": 0.5, "seconds": 3.0, "turns": 2.0}
    assert await reward_func(Namespace(reward_key="score"), sample) == expected
    with pytest.raises(ConfigError, match="--reward-key is 'accuracy'; this reward has the keys score, dollars"):
        await reward_func(Namespace(reward_key="accuracy"), sample)


@pytest.mark.parametrize("status", [Sample.Status.FAILED, Sample.Status.ABORTED])
async def test_failed_sample_is_removed_not_scored(status):
    sample = finished(0, {}, status=status)
    assert await reward_func(Namespace(reward_key=None), sample) == 0.0
    assert sample.remove_sample
    assert (await reward_func(Namespace(reward_key="score"), sample))["score"] == 0.0


async def test_sample_without_episode_names_the_flag():
    with pytest.raises(ConfigError, match="--custom-generate-function-path agentic.toolorchestra.rollout.generate"):
        await reward_func(Namespace(), Sample(index=3))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (episode(dollars=-0.1), "recorded 'dollars' is -0.1"),
        (episode(seconds=math.nan), "recorded 'seconds' is nan"),
        (episode(outcome=2), "the outcome is 2.0"),
        (episode(counts={"cost": 1}), "a tool has the alias 'cost'"),
        (episode(counts={"answer-1": "2"}), "recorded 'answer-1' is '2'"),
        (episode(pref_vec={"cost": -0.3}), r"pref_vec\['cost'\] is -0.3.*negated already"),
        (episode(pref_vec={}), "pref_vec is {}"),
        ({**episode(), "pref_vec": None}, "no pref_vec in its metadata; .* or set orchestra_reward: outcome"),
    ],
)
def test_bad_records_are_named(record, message):
    with pytest.raises(ConfigError, match=message):
        features_of(finished(4, record))


def test_accuracy_is_the_outcome_weight():
    assert features_of(finished(0, episode(pref_vec={"accuracy": 1}))).weights == {"outcome": 1.0}
