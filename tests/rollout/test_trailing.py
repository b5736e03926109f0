"""Rollouts that fill no whole step: none lost, none trained twice, also across a resume."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.conversion import pad_to_global_batch
from slime.rollout.trailing import TrailingRollouts, join


def make_args(**changes: Any) -> Namespace:
    base = {"trailing_rollouts": "carry", "global_batch_size": 4, "save": None, "load": None}
    return Namespace(**{**base, "use_dynamic_batch_size": True, **changes})


def batch(sizes: list[int], first: int = 0) -> dict[str, list[Any]]:
    """Rollout `i` has `sizes[i]` rows; ids start at 0 in every batch, `sample_indices` names the rollout over the run."""
    rows = [(rollout, row) for rollout, size in enumerate(sizes) for row in range(size)]
    return {
        "tokens": [[1, 2 + row] for _, row in rows],
        "response_lengths": [1] * len(rows),
        "loss_masks": [[1]] * len(rows),
        "rewards": [float(first + rollout) for rollout, _ in rows],
        "rollout_ids": [rollout for rollout, _ in rows],
        "rollout_mask_sums": [sizes[rollout] for rollout, _ in rows],
        "sample_indices": [first + rollout for rollout, _ in rows],
        "rollout_log_probs": [[-0.5]] * len(rows),
    }


def run(trailing: TrailingRollouts, sizes: list[list[int]], start: int = 0, end: int | None = None) -> list[list[int]]:
    """The `sample_indices` of the trained rows of each batch; batches `start` to `end` of a run over `sizes`."""
    trained = []
    for number in range(start, len(sizes) if end is None else end):
        data = batch(sizes[number], first=sum(map(len, sizes[:number])))
        taken, _ = trailing.take(data, last=number == len(sizes) - 1)
        padded = pad_to_global_batch(trailing.args, taken, dp_size=1)
        assert len(set(padded["rollout_ids"])) % trailing.args.global_batch_size == 0
        trained.append([i for i in padded["sample_indices"] if i >= 0])
    return trained


SIZES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, gbs=st.integers(1, 6), mode=st.sampled_from(["carry", "pad"]))
def test_every_rollout_is_trained_exactly_once_and_at_most_one_batch_late(sizes, gbs, mode):
    trained = run(TrailingRollouts(make_args(global_batch_size=gbs, trailing_rollouts=mode)), sizes)
    flat = [i for rows in trained for i in rows]
    assert flat == [i for i, size in enumerate(s for b in sizes for s in b) for _ in range(size)], "all rows, in order"
    starts = [sum(map(len, sizes[:number])) for number in range(len(sizes) + 1)]
    for number, rows in enumerate(trained):
        assert all(starts[max(number - 1, 0)] <= i < starts[number + 1] for i in rows)


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, gbs=st.integers(1, 6), data=st.data())
def test_a_resumed_run_trains_the_same(sizes, gbs, data, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run"))
    stop = data.draw(st.integers(1, len(sizes)))
    args = make_args(global_batch_size=gbs, save=folder, load=folder)
    first = TrailingRollouts(args)
    before = run(first, sizes, end=stop)
    first.save(stop - 1)
    second = TrailingRollouts(args)
    second.load(stop - 1)
    assert before + run(second, sizes, start=stop) == run(TrailingRollouts(args), sizes)


def test_what_waits_leads_the_next_batch_with_ids_of_its_own() -> None:
    trailing = TrailingRollouts(make_args())
    taken, counts = trailing.take(batch([1, 1, 2, 1, 2]), last=False)
    assert (taken["sample_indices"], len(trailing)) == ([0, 1, 2, 2, 3], 1)
    assert counts == {"rollout/carried_in": 0, "rollout/carried_out": 1}
    taken, counts = trailing.take(batch([1, 1, 1], first=5), last=False)
    assert taken["sample_indices"] == [4, 4, 5, 6, 7] and taken["rollout_ids"] == [3, 3, 0, 1, 2]
    assert taken["rollout_mask_sums"] == [2, 2, 1, 1, 1] and taken["rewards"][:3] == [4.0, 4.0, 5.0]
    assert counts == {"rollout/carried_in": 1} and len(trailing) == 0


def test_whole_steps_are_left_alone() -> None:
    data = batch([1, 2, 1, 1])
    assert TrailingRollouts(make_args()).take(data, last=False) == (data, {})


def test_dropping_is_counted_and_needs_a_step() -> None:
    trailing = TrailingRollouts(make_args(trailing_rollouts="drop"))
    taken, counts = trailing.take(batch([1, 1, 1, 1, 2]), last=True)
    assert taken["sample_indices"] == [0, 1, 2, 3] and counts == {"rollout/dropped_rollouts": 1}
    with pytest.raises(ValueError, match="--trailing-rollouts drop: 3 rollouts .* --global-batch-size 4"):
        trailing.take(batch([1, 1, 1]), last=False)


def test_rows_without_ids_are_rollouts_of_their_own() -> None:
    data = batch([1] * 5)
    del data["rollout_ids"], data["rollout_mask_sums"]
    trailing = TrailingRollouts(make_args())
    assert trailing.take(data, last=False)[0]["rollout_ids"] == [0, 1, 2, 3] and len(trailing) == 1


def test_columns_of_one_side_only() -> None:
    older = {**batch([1]), "metadata": [{"a": 1}]}
    joined = join(older, batch([1, 1]))
    assert joined["metadata"] == [{"a": 1}, None, None]
    with pytest.raises(ValueError, match="only one of them has teacher_log_probs"):
        join({**older, "teacher_log_probs": [[-1.0]]}, batch([1]))
    masked = {**batch([1]), "loss_masks": [[0]]}
    assert join({**older, "teacher_log_probs": [[-1.0]]}, masked)["teacher_log_probs"] == [[-1.0], [0.0]]


def test_a_checkpoint_without_carried_rollouts_has_no_file(tmp_path: Path) -> None:
    args = make_args(save=str(tmp_path), load=str(tmp_path / "iter_0000004"))
    trailing = TrailingRollouts(args)
    trailing.take(batch([1] * 5), last=False)
    trailing.save(3)
    file = tmp_path / "rollout" / "carried_rollouts_3.pt"
    assert file.exists()
    other = TrailingRollouts(args)
    other.load(3)
    assert len(other) == 1, "--load may name an iteration"
    other.take(batch([1] * 3), last=False)
    other.save(3)
    assert not file.exists()
    other.load(3)
    assert len(other) == 0
