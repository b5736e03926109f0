"""Group statistics and turn weights: known values and properties."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic.common.errors import ConfigError
from agentic.common.group_stats import group_advantages
from agentic.common.weighting import TURN_WEIGHTINGS, turn_denominators

REWARDS = st.one_of(st.none(), st.floats(-10, 10).map(lambda x: round(x, 3)))
PAIRS = st.lists(st.tuples(REWARDS, st.integers(0, 4)), max_size=40)
MASK_SUMS = st.lists(st.integers(0, 500), min_size=1, max_size=8)


def test_known_advantages() -> None:
    assert group_advantages([1, 0, 0, 0], [0] * 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert group_advantages([1, 0, 0, 0], [0] * 4, normalize_std=False) == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages([1, 1] + [0] * 6, [7] * 8) == pytest.approx([1.6202] * 2 + [-0.5401] * 6, abs=1e-4)
    assert group_advantages([1, 0], ["a", "a"]) == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_equal_rewards_and_single_members_are_exactly_zero() -> None:
    assert group_advantages([0.1] * 7 + [5.0], [0] * 7 + [1]) == [0.0] * 8


def test_failed_members_leave_the_statistics() -> None:
    values = group_advantages([1, None, 0, 0, None], [0, 0, 0, 0, 1])
    assert values[1] == values[4] == 0.0
    assert [values[i] for i in (0, 2, 3)] == group_advantages([1, 0, 0], [0] * 3)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 group ids"):
        group_advantages([1, 0], [0])
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1, math.nan], [0, 0])


@given(PAIRS)
def test_each_group_has_zero_mean_and_unit_spread(pairs: list[tuple[float | None, int]]) -> None:
    rewards, groups = [reward for reward, _ in pairs], [group for _, group in pairs]
    advantages = group_advantages(rewards, groups)
    assert len(advantages) == len(pairs) and all(math.isfinite(value) for value in advantages)
    for group in set(groups):
        members = [i for i, (reward, g) in enumerate(pairs) if g == group and reward is not None]
        mine = [advantages[i] for i in members]
        if len({rewards[i] for i in members}) < 2:
            assert mine == [0.0] * len(mine)
        else:
            assert sum(mine) == pytest.approx(0, abs=1e-6)
            assert statistics.stdev(mine) == pytest.approx(1, abs=1e-2)


@given(PAIRS, st.randoms(use_true_random=False))
def test_order_does_not_matter(pairs: list[tuple[float | None, int]], random: object) -> None:
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = group_advantages([p[0] for p in pairs], [p[1] for p in pairs])
    shuffled = group_advantages([pairs[i][0] for i in order], [pairs[i][1] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-9)


@given(PAIRS, st.floats(-5, 5), st.floats(0.5, 4))
def test_shift_and_scale_of_rewards_do_not_matter(
    pairs: list[tuple[float | None, int]], shift: float, scale: float
) -> None:
    groups = [group for _, group in pairs]
    moved = [None if reward is None else round(reward * 1000) * scale + shift for reward, _ in pairs]
    plain = [None if reward is None else float(round(reward * 1000)) for reward, _ in pairs]
    assert group_advantages(moved, groups) == pytest.approx(group_advantages(plain, groups), abs=1e-4)


def test_paper_weights_of_the_two_trajectory_example() -> None:
    weights = [1 / (2 * d) for d in turn_denominators([2, 4], "paper") + turn_denominators([5], "paper")]
    assert weights == [0.125, 0.0625, 0.1]
    assert sum(weight * tokens for weight, tokens in zip(weights, [2, 4, 5], strict=True)) == pytest.approx(1)


@given(MASK_SUMS)
def test_total_weight_of_one_trajectory(mask_sums: list[int]) -> None:
    turns = sum(total > 0 for total in mask_sums)
    expected = {"paper": min(turns, 1), "token_mean": min(turns, 1), "uniform_turn": turns}
    for mode in TURN_WEIGHTINGS:
        denominators = turn_denominators(mask_sums, mode)
        assert min(denominators) >= 1
        total = sum(tokens / d for tokens, d in zip(mask_sums, denominators, strict=True))
        assert total == pytest.approx(expected[mode])


def test_weighting_refuses_bad_input() -> None:
    with pytest.raises(ConfigError, match="turn_weighting 'mean' is none of paper"):
        turn_denominators([1], "mean")
    with pytest.raises(ValueError, match="negative"):
        turn_denominators([-1], "paper")
