"""Expansion of trajectories to train rows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic.common.convert import Trajectory, expand_turns
from agentic.common.errors import ConfigError
from agentic.common.turns import TurnRecord

KEYS = {
    "tokens",
    "response_lengths",
    "loss_masks",
    "rewards",
    "raw_reward",
    "truncated",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
    "rollout_log_probs",
}


def turn(length: int, trained: bool = True, prompt: int = 3) -> TurnRecord:
    ids, logs = list(range(100, 100 + length)), [-0.1] * length
    return TurnRecord.from_engine(
        list(range(prompt)), ids, logs, trained=trained, role="next_step", finish_reason="stop"
    )


def trajectory(index: int, group: int, reward: float | None, *lengths: int, truncated: bool = False) -> Trajectory:
    return Trajectory(index, group, 1000 + index, reward, truncated, [turn(length) for length in lengths])


def by_index(data: dict[str, list], key: str) -> dict[int, list]:
    rows: dict[int, list] = {}
    for index, value in zip(data["sample_indices"], data[key], strict=True):
        rows.setdefault(index, []).append(value)
    return rows


def test_three_turns_become_three_rows_that_share_reward_and_index() -> None:
    data = expand_turns([trajectory(4, 0, 1.0, 2, 3, 4, truncated=True), trajectory(5, 0, 0.0, 2)])
    assert set(data) == KEYS and {len(column) for column in data.values()} == {4}
    assert data["sample_indices"] == [4, 4, 4, 5] and data["rollout_ids"] == [1004] * 3 + [1005]
    assert data["raw_reward"] == [1.0] * 3 + [0.0] and data["truncated"] == [1, 1, 1, 0]
    assert data["response_lengths"] == [2, 3, 4, 2] and data["loss_masks"][2] == [1] * 4
    assert data["tokens"][0] == [0, 1, 2, 100, 101]
    assert all(len(lp) == n for lp, n in zip(data["rollout_log_probs"], data["response_lengths"], strict=True))


def test_advantages_count_a_trajectory_once_however_many_turns_it_has() -> None:
    data = expand_turns([trajectory(0, 0, 1.0, 2), trajectory(1, 0, 0.0, 2, 2, 2)])
    assert data["rewards"] == pytest.approx([0.7071] + [-0.7071] * 3, abs=1e-4)
    centred = expand_turns([trajectory(0, 0, 1.0, 2), trajectory(1, 0, 0.0, 2)], normalize_std=False)
    assert centred["rewards"] == [0.5, -0.5]


def test_weights_of_the_loss() -> None:
    data = expand_turns([trajectory(0, 0, 1.0, 2, 4), trajectory(1, 0, 0.0, 5)])
    assert [1 / (2 * d) for d in data["rollout_mask_sums"]] == [0.125, 0.0625, 0.1]
    assert expand_turns([trajectory(0, 0, 1.0, 2, 4)], "token_mean")["rollout_mask_sums"] == [6.0, 6.0]
    assert expand_turns([trajectory(0, 0, 1.0, 2, 4)], "uniform_turn")["rollout_mask_sums"] == [2.0, 4.0]
    with pytest.raises(ConfigError):
        expand_turns([trajectory(0, 0, 1.0, 2)], "other")


def test_one_failed_of_twelve_changes_only_its_own_group() -> None:
    def batch(failed: int | None) -> list[Trajectory]:
        rewards = [float(i % 4 == 0) for i in range(12)]
        return [trajectory(i, i // 4, None if i == failed else rewards[i], 2) for i in range(12)]

    whole, holed = by_index(expand_turns(batch(None)), "rewards"), by_index(expand_turns(batch(6)), "rewards")
    assert [holed[i] for i in (*range(4), *range(8, 12))] == [whole[i] for i in (*range(4), *range(8, 12))]
    assert [holed[i][0] for i in (4, 5, 7)] == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)
    data = expand_turns(batch(6))
    assert by_index(data, "loss_masks")[6] == [[0]] and by_index(data, "rewards")[6] == [0.0]
    assert len(by_index(data, "tokens")[6][0]) == 2 and by_index(data, "raw_reward")[6] == [None]


def test_scored_trajectory_without_trained_turns_counts_in_the_statistics_but_trains_nothing() -> None:
    silent = Trajectory(1, 0, 1, 0.0, turns=[turn(3, trained=False)])
    data = expand_turns([Trajectory(0, 0, 0, 1.0, turns=[turn(2), turn(2, trained=False)]), silent])
    assert data["sample_indices"] == [0, 1] and data["loss_masks"] == [[1, 1], [0]]
    assert data["rewards"] == pytest.approx([0.7071, -0.7071], abs=1e-4)


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=9), st.integers(0, 99))
def test_every_real_turn_survives_and_input_order_does_not_matter(lengths: list[list[int]], seed: int) -> None:
    batch = [trajectory(i, i // 3, float(i % 2), *turns) for i, turns in enumerate(lengths)]
    data = expand_turns(batch)
    real = [sum(mask) for mask in data["loss_masks"] if any(mask)]
    assert real == [length for turns in lengths for length in turns]
    assert set(data["sample_indices"]) == set(range(len(lengths)))
    shuffled = random.Random(seed).sample(batch, len(batch))
    assert expand_turns(shuffled) == data


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="sample index 3 belongs to more than one"):
        expand_turns([trajectory(3, 0, 1.0, 2), trajectory(3, 0, 0.0, 2)])
    with pytest.raises(ValueError, match="rollout id 7"):
        expand_turns([Trajectory(0, 0, 7, 1.0), Trajectory(1, 0, 7, 1.0)])
    short = trajectory(0, 0, 1.0, 3)
    short.turns[0].rollout_log_probs = []
    with pytest.raises(ValueError, match="rollout_log_probs"):
        expand_turns([short])
    assert expand_turns([]) == {}
