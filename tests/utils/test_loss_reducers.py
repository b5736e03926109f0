import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.loss_reducers import get_sum_of_sample_mean


def reduce(x, lengths, masks, denoms=None, per_token=False):
    masks = [torch.tensor(mask) for mask in masks]
    reducer = get_sum_of_sample_mean([n + 3 for n in lengths], lengths, masks, denoms, per_token)
    return reducer(torch.tensor(x, dtype=torch.float32)).item()


def test_sum_of_masked_means():
    assert reduce([1, 2, 3, 10, 20], [3, 2], [[1, 0, 1], [1, 1]]) == pytest.approx(2 + 15)


def test_per_token_is_the_masked_sum():
    assert reduce([1, 2, 3, 10, 20], [3, 2], [[1, 0, 1], [1, 1]], per_token=True) == pytest.approx(34)


def test_fully_masked_sample_contributes_nothing():
    assert reduce([1, 2, 9], [2, 1], [[1, 1], [0]]) == pytest.approx(1.5)


def test_turn_weights_of_the_agentflow_paper():
    # A: turns of 2 and 4 tokens, B: one turn of 5; denominators T * tokens of the turn, two rollouts in the step
    lengths, masks = [2, 4, 5], [[1, 1], [1] * 4, [1] * 5]
    weights = []
    for token in range(11):
        one = [float(i == token) for i in range(11)]
        weights.append(reduce(one, lengths, masks, denoms=[2 * 2, 2 * 4, 5]) / 2)
    assert weights == pytest.approx([0.125] * 2 + [0.0625] * 4 + [0.1] * 5)
    assert sum(weights) == pytest.approx(1.0)


@given(values=st.lists(st.integers(-9, 9), min_size=2, max_size=12), data=st.data())
def test_cutting_a_rollout_into_samples_does_not_change_the_loss(values, data):
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(values), max_size=len(values)))
    cut = data.draw(st.integers(1, len(values) - 1))
    whole = reduce(values, [len(values)], [mask])
    parts = reduce(values, [cut, len(values) - cut], [mask[:cut], mask[cut:]], denoms=[sum(mask)] * 2)
    assert parts == pytest.approx(whole, abs=1e-5)


def test_gradient_is_the_weight():
    x = torch.zeros(3, requires_grad=True)
    get_sum_of_sample_mean([5, 4], [2, 1], [torch.tensor([1, 0]), torch.tensor([1])], torch.tensor([4, 2]))(
        x
    ).backward()
    assert x.grad.tolist() == [0.25, 0.0, 0.5]


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        get_sum_of_sample_mean([4], [2, 1], [torch.ones(2), torch.ones(1)])
    with pytest.raises(ValueError, match="sample 1: loss mask of shape"):
        get_sum_of_sample_mean([4, 4], [2, 1], [torch.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match="expected \\(2,\\) token values"):
        get_sum_of_sample_mean([4], [2], [torch.ones(2)])(torch.ones(3))
