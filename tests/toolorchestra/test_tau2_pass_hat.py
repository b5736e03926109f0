"""pass^k (fact 30) and its bookkeeping of failed trials."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic.toolorchestra.tau2.pass_hat import is_success, pass_hat, pass_hat_k


def test_worked_values() -> None:
    assert [pass_hat_k(4, 3, k) for k in (1, 2, 4)] == [0.75, 0.5, 0.0]
    assert all(pass_hat_k(4, 4, k) == 1.0 for k in (1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"pass\^4 needs at least 4 trials .* has 3"):
        pass_hat_k(3, 3, 4)
    with pytest.raises(ValueError, match="5 successes in 4"):
        pass_hat_k(4, 5, 1)
    with pytest.raises(ValueError, match="k >= 1"):
        pass_hat_k(4, 4, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_it_is_the_share_of_subsets_that_succeed(trials: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(trials)))
    subsets = list(combinations(trials, k))
    assert pass_hat_k(len(trials), sum(trials), k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_tasks_are_averaged_and_k_is_limited() -> None:
    result = pass_hat({"a": [1.0, 1.0, 0.0], "b": [1.0, 1.0 - 1e-9]})
    assert result.values == {1: pytest.approx((2 / 3 + 1) / 2), 2: pytest.approx((1 / 3 + 1) / 2)}
    assert (result.tasks, result.trials, result.missing) == (2, 5, 0)


def test_failures_are_missing_trials_and_no_task_is_dropped() -> None:
    result = pass_hat({"a": [1.0, None], "b": [0.0, 1.0]})
    assert result.values == {1: 0.75} and result.missing == 1
    lost = pass_hat({"a": [1.0], "b": [None]})
    assert lost.values == {} and (lost.tasks, lost.trials, lost.missing) == (2, 1, 1)
    with pytest.raises(ValueError, match="no tasks"):
        pass_hat({})


def test_success_is_a_reward_of_one() -> None:
    assert is_success(1.0) and is_success(1 - 1e-7) and not is_success(0.999) and not is_success(0.0)
