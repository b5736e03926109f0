import math
from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils import ppo_utils as P


def t(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_kl_estimators():
    new, base = t(-1.0, -2.0), t(-1.5, -1.0)  # log ratios 0.5 and -1
    assert P.compute_approx_kl(new, base, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert P.compute_approx_kl(new, base, "k2").tolist() == pytest.approx([0.125, 0.5])
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert P.compute_approx_kl(new, base, "k3").tolist() == pytest.approx(k3, abs=1e-6)
    assert P.compute_approx_kl(new, base, "low_var_kl").tolist() == pytest.approx(k3, abs=1e-6)
    ratio = t(2.0, 3.0)
    assert P.compute_approx_kl(new, base, "k1", ratio).tolist() == pytest.approx([1.0, -3.0])


def test_only_low_var_kl_is_clamped_and_after_the_ratio():
    new, base = t(-10.0, -1.0), t(0.0, -2.0)
    assert P.compute_approx_kl(new, base, "low_var_kl")[0] == 10.0
    assert P.compute_approx_kl(new, base, "k3")[0] > 20000
    assert P.compute_approx_kl(new, base, "low_var_kl", t(1.0, 1e6))[1] == 10.0


def test_bf16_inputs_are_computed_in_float32():
    kl = P.compute_approx_kl(t(-1.0).bfloat16(), t(-1.25).bfloat16(), "k3")
    assert kl.dtype == torch.float32 and kl.item() == pytest.approx(math.exp(-0.25) - 0.75, abs=1e-7)


def test_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="unknown --kl-loss-type 'k9'"):
        P.compute_approx_kl(t(0.0), t(0.0), "k9")


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"), [(1.5, 1.0, 1.3), (1.5, -1.0, -1.5), (0.5, 1.0, 0.5), (0.5, -1.0, -0.8)]
)
def test_clip_higher_golden_numbers(ratio, advantage, objective):
    loss, clipped = P.compute_policy_loss(t(-math.log(ratio)), t(advantage), 0.2, 0.3)
    assert -loss.item() == pytest.approx(objective, abs=1e-6)
    assert clipped.item() == float(objective not in (0.5, -1.5))


def test_dual_clip_bounds_only_negative_advantages():
    kl = t(-math.log(10.0), -math.log(10.0), -math.log(1.1))
    loss, _ = P.compute_policy_loss(kl, t(-1.0, 1.0, -1.0), 0.2, 0.2, eps_clip_c=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, 1.1], abs=1e-5)
    with pytest.raises(AssertionError, match="above 1"):
        P.compute_policy_loss(kl, kl, 0.2, 0.2, eps_clip_c=1.0)


def test_clipped_tokens_have_no_gradient():
    kl = torch.tensor([-math.log(1.5), -math.log(1.1)], requires_grad=True)
    P.compute_policy_loss(kl, t(1.0, 1.0), 0.2, 0.3)[0].sum().backward()
    assert kl.grad.tolist() == pytest.approx([0.0, 1.1], abs=1e-6)


def test_cispo_keeps_gradient_with_a_clipped_weight():
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = t(-1.0 - math.log(5.0), -1.0)
    loss, clipped = P.compute_cispo_loss(old - log_probs, log_probs, t(2.0, 2.0), 0.2, 0.3)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([2.6, 2.0])
    assert log_probs.grad.tolist() == pytest.approx([-2.6, -2.0])
    assert clipped.tolist() == [1.0, 0.0]


def test_gspo_kl_is_the_masked_sequence_mean():
    new, old = [t(0.0, 0.0, 0.0), t(0.0)], [t(1.0, 9.0, 2.0), t(5.0)]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0])]
    assert P.compute_gspo_kl(new, old, new, masks).tolist() == [1.5, 1.5, 1.5, 0.0]


def test_opsm_drops_negative_advantages_of_far_sequences():
    args = Namespace(opsm_delta=0.1)
    new, old = [t(0.0, 0.0), t(0.0, 0.0)], [t(1.0, 1.0), t(0.05, 0.05)]
    advantages = [t(-1.0, 1.0), t(-1.0, -1.0)]
    keep, dropped = P.compute_opsm_mask(args, new, old, advantages, [torch.ones(2)] * 2)
    assert keep.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert dropped.item() == 0.5


def test_grpo_returns_broadcast_the_reward():
    out = P.get_grpo_returns(t(0.5, -1.0), [torch.zeros(2), torch.zeros(1)])
    assert [x.tolist() for x in out] == [[0.5, 0.5], [-1.0]]


def reinforce(rewards, kl, masks, kl_coef=1.0, gamma=0.9):
    lengths = [len(mask) for mask in masks]
    return P.get_reinforce_plus_plus_returns(rewards, kl, masks, lengths, [n + 2 for n in lengths], kl_coef, gamma)


def test_reinforce_plus_plus_masks_the_kl_of_tool_tokens():
    (returns,) = reinforce(t(0.0), [torch.ones(4)], [torch.tensor([1, 0, 0, 1])])
    assert returns[0].item() == pytest.approx(-1.729)
    assert returns[3].item() == pytest.approx(-1.0)


def test_reinforce_plus_plus_puts_the_reward_on_the_last_trained_token():
    (returns,) = reinforce(t(2.0), [torch.zeros(4)], [torch.tensor([1, 1, 0, 0])], gamma=0.5)
    assert returns.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_reinforce_plus_plus_refuses_a_fully_masked_sample():
    with pytest.raises(AssertionError, match="sample 0 is fully masked"):
        reinforce(t(2.0), [torch.ones(2)], [torch.zeros(2)])


def test_reinforce_plus_plus_length_mismatch_is_refused():
    with pytest.raises(ValueError, match="sample 0: kl \\(3,\\)"):
        reinforce(t(2.0), [torch.ones(3)], [torch.zeros(2)])


def test_reinforce_plus_plus_baseline():
    (out,) = P.get_reinforce_plus_plus_baseline_advantages(t(1.0), [t(1.0, 2.0)], [torch.ones(2)], 0.1)
    assert out.tolist() == pytest.approx([0.9, 0.8])


def sequential(rewards, discount):
    out, carry = [], 0.0
    for reward in reversed(rewards):
        carry = reward + discount * carry
        out.append(carry)
    return out[::-1]


@settings(max_examples=60)
@given(
    rewards=st.lists(st.floats(-2, 2), max_size=40),
    discount=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    chunk=st.sampled_from([1, 3, 8, 128]),
)
def test_chunked_returns_equal_the_recursion(rewards, discount, chunk):
    got = P.chunked_discounted_returns(torch.tensor(rewards, dtype=torch.float64), discount, chunk)
    assert got.tolist() == pytest.approx(sequential(rewards, discount), abs=1e-9)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.9)])
def test_chunked_gae_equals_vanilla(gamma, lambd):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 300, generator=generator, dtype=torch.float64)
    expected = P.vanilla_gae(rewards, values, gamma, lambd)
    for got, want in zip(P.chunked_gae(rewards, values, gamma, lambd), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_gae_golden_numbers():
    advantages, returns = P.vanilla_gae(t(0.0, 1.0)[None], t(0.5, 0.25)[None], 1.0, 0.5)
    assert advantages[0].tolist() == pytest.approx([-0.25 + 0.5 * 0.75, 0.75])
    assert returns[0].tolist() == pytest.approx([0.625, 1.0])


@pytest.mark.parametrize("chunked", [True, False])
def test_batched_gae_equals_one_by_one(chunked):
    rewards, values = [t(0.0, 0.0, 1.0), t(-1.0)], [t(0.1, 0.2, 0.3), t(0.5)]
    advantages, returns = P.get_advantages_and_returns_batch([5, 3], [3, 1], values, rewards, 0.9, 0.8, chunked)
    for i in range(2):
        want_advantage, want_return = P.vanilla_gae(rewards[i][None], values[i][None], 0.9, 0.8)
        torch.testing.assert_close(advantages[i], want_advantage[0])
        torch.testing.assert_close(returns[i], want_return[0])


def test_batched_gae_length_mismatch_is_refused():
    with pytest.raises(ValueError, match="rewards of lengths \\[2\\]"):
        P.get_advantages_and_returns_batch([5], [3], [torch.ones(3)], [torch.ones(2)], 1.0, 1.0)
