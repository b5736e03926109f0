"""Every formula against values computed independently in float64 with numpy loops, over random shapes, masks and groups."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils import ppo_utils as P
from slime.utils.distributed_utils import distributed_masked_whiten
from slime.utils.importance_sampling import icepop_function, vanilla_tis_function
from slime.utils.loss_reducers import get_sum_of_sample_mean

# A batch: for every sample its mask; numbers are drawn from the seed.
MASKS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**31)
LIGHT = settings(max_examples=40)
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


class Draw:
    """Random rows of the shapes of `masks`, as numpy arrays in float64."""

    def __init__(self, masks: list[list[int]], seed: int) -> None:
        self.masks = [np.array(mask) for mask in masks]
        self.random = np.random.default_rng(seed)

    def rows(self, scale: float = 1.0, shift: float = 0.0) -> list[np.ndarray]:
        return [shift + scale * self.random.standard_normal(len(mask)) for mask in self.masks]

    def numbers(self) -> np.ndarray:
        return self.random.standard_normal(len(self.masks))


def tensors(rows: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(row) for row in rows]


def flat(rows: list[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def masked_mean(row: np.ndarray, mask: np.ndarray) -> float:
    return float((row * mask).sum() / max(mask.sum(), 1))


@LIGHT
@given(MASKS, SEEDS, st.sampled_from(["k1", "k2", "k3", "low_var_kl"]), st.booleans())
def test_kl_estimators(masks: list[list[int]], seed: int, kind: str, weighted: bool) -> None:
    draw = Draw(masks, seed)
    new, base, old = flat(draw.rows(2, -2)), flat(draw.rows(2, -2)), flat(draw.rows(2, -2))
    wanted = []
    for lp, lb, lo in zip(new, base, old, strict=True):
        value = {"k1": lp - lb, "k2": (lp - lb) ** 2 / 2}.get(kind, np.exp(lb - lp) - 1 + lp - lb)
        value *= np.exp(lp - lo) if weighted else 1.0
        wanted.append(min(max(value, -10.0), 10.0) if kind == "low_var_kl" else value)
    ratio = torch.from_numpy(np.exp(new - old)) if weighted else None
    seen = P.compute_approx_kl(torch.from_numpy(new), torch.from_numpy(base), kind, ratio)
    np.testing.assert_allclose(seen.numpy(), wanted, rtol=3e-5, atol=3e-5)  # the function itself is float32


@LIGHT
@given(MASKS, SEEDS, st.sampled_from([None, 1.5, 3.0]))
def test_clipped_surrogate_and_dual_clip(masks: list[list[int]], seed: int, dual: float | None) -> None:
    draw = Draw(masks, seed)
    kl, advantages = flat(draw.rows()), flat(draw.rows())
    wanted, cut = [], []
    for k, a in zip(kl, advantages, strict=True):
        r = np.exp(-k)
        plain, bounded = -r * a, -min(max(r, 0.8), 1.28) * a
        value = max(plain, bounded)
        wanted.append(min(value, -dual * a) if dual is not None and a < 0 else value)
        cut.append(float(bounded > plain))
    loss, clipped = P.compute_policy_loss(torch.from_numpy(kl), torch.from_numpy(advantages), 0.2, 0.28, dual)
    np.testing.assert_allclose(loss.numpy(), wanted, **CLOSE)
    assert clipped.tolist() == cut


@LIGHT
@given(MASKS, SEEDS)
def test_cispo_loss_and_gradient(masks: list[list[int]], seed: int) -> None:
    draw = Draw(masks, seed)
    new, old, advantages = flat(draw.rows()), flat(draw.rows()), flat(draw.rows())
    weights = np.minimum(np.maximum(np.exp(new - old), 1 - 0.9), 1 + 0.5)
    log_probs = torch.from_numpy(new).requires_grad_()
    loss, _ = P.compute_cispo_loss(
        torch.from_numpy(old) - log_probs, log_probs, torch.from_numpy(advantages), 0.9, 0.5
    )
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach().numpy(), -weights * advantages * new, **CLOSE)
    np.testing.assert_allclose(log_probs.grad.numpy(), -weights * advantages, **CLOSE)


@LIGHT
@given(MASKS, SEEDS)
def test_gspo_and_opsm_use_sequence_means(masks: list[list[int]], seed: int) -> None:
    draw = Draw(masks, seed)
    new, old, advantages = draw.rows(), draw.rows(), draw.rows()
    means = [masked_mean(o - n, m) for n, o, m in zip(new, old, draw.masks, strict=True)]
    seen = P.compute_gspo_kl(tensors(new), tensors(old), tensors(new), tensors(draw.masks))
    wanted = flat([np.full(len(mask), mean) for mask, mean in zip(draw.masks, means, strict=True)])
    np.testing.assert_allclose(seen.numpy(), wanted, **CLOSE)

    drops = [((a < 0) & (mean > 0.1)).astype(float) for a, mean in zip(advantages, means, strict=True)]
    keep, dropped = P.compute_opsm_mask(
        Namespace(opsm_delta=0.1), tensors(new), tensors(old), tensors(advantages), tensors(draw.masks)
    )
    np.testing.assert_allclose(keep.numpy(), 1 - flat(drops), **CLOSE)
    shares = [masked_mean(drop, mask) for drop, mask in zip(drops, draw.masks, strict=True)]
    assert float(dropped) == pytest.approx(sum(shares), abs=1e-6)


def discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """sum over s >= t of discount^(s - t) r_s, written as the sum it is."""
    steps = range(len(rewards))
    return np.array([sum(discount ** (s - t) * rewards[s] for s in steps if s >= t) for t in steps])


@LIGHT
@given(MASKS, SEEDS, st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.3]))
def test_reinforce_plus_plus(masks: list[list[int]], seed: int, gamma: float, coef: float) -> None:
    masks = [[*mask, 1] if not any(mask) else mask for mask in masks]
    draw = Draw(masks, seed)
    kl, rewards, lengths = draw.rows(), draw.numbers(), [len(mask) for mask in masks]
    seen = P.get_reinforce_plus_plus_returns(
        torch.from_numpy(rewards), tensors(kl), tensors(draw.masks), lengths, [n + 1 for n in lengths], coef, gamma
    )
    for i, mask in enumerate(draw.masks):
        token_rewards = -coef * kl[i] * mask
        token_rewards[max(np.flatnonzero(mask))] += rewards[i]
        np.testing.assert_allclose(seen[i].numpy(), discounted(token_rewards, gamma), **CLOSE)
    baseline = P.get_reinforce_plus_plus_baseline_advantages(
        torch.from_numpy(rewards), tensors(kl), tensors(draw.masks), coef
    )
    for i, row in enumerate(baseline):
        np.testing.assert_allclose(row.numpy(), rewards[i] - coef * kl[i], **CLOSE)


@LIGHT
@given(MASKS, SEEDS, st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.9)]), st.booleans())
def test_ppo_advantages(masks: list[list[int]], seed: int, gl: tuple[float, float], chunked: bool) -> None:
    (gamma, lambd), draw = gl, Draw(masks, seed)
    kl, values, rewards = draw.rows(), draw.rows(), draw.numbers()
    token_rewards = P.get_ppo_token_rewards(torch.from_numpy(rewards), tensors(kl), 0.2)
    lengths = [len(mask) for mask in masks]
    advantages, returns = P.get_advantages_and_returns_batch(
        [n + 2 for n in lengths], lengths, tensors(values), token_rewards, gamma, lambd, chunked
    )
    for i, n in enumerate(lengths):
        r = -0.2 * kl[i]
        r[n - 1] += rewards[i]
        after = np.append(values[i], 0.0)
        wanted = discounted(r + gamma * after[1:] - after[:-1], gamma * lambd)
        np.testing.assert_allclose(token_rewards[i].numpy(), r, **CLOSE)
        np.testing.assert_allclose(advantages[i].numpy(), wanted, **CLOSE)
        np.testing.assert_allclose(returns[i].numpy(), wanted + values[i], **CLOSE)


@settings(max_examples=25)
@given(SEEDS, st.integers(1, 400), st.sampled_from([1, 7, 64, 128]), st.floats(0, 1), st.floats(0, 1))
def test_chunked_gae_equals_sequential(seed: int, length: int, chunk: int, gamma: float, lambd: float) -> None:
    random = np.random.default_rng(seed)
    rewards, values = (torch.from_numpy(random.standard_normal((3, length))) for _ in range(2))
    for seen, wanted in zip(
        P.chunked_gae(rewards, values, gamma, lambd, chunk), P.vanilla_gae(rewards, values, gamma, lambd), strict=True
    ):
        assert float((seen - wanted).abs().max()) < 1e-6


@LIGHT
@given(MASKS, SEEDS)
def test_value_loss(masks: list[list[int]], seed: int) -> None:
    draw = Draw(masks, seed)
    new, old, goal = flat(draw.rows()), flat(draw.rows()), flat(draw.rows())
    limited = (np.clip(new, old - 0.2, old + 0.2) - goal) ** 2
    plain = (new - goal) ** 2
    loss, clipped = P.compute_value_loss(*map(torch.from_numpy, (new, old, goal)), 0.2)
    np.testing.assert_allclose(loss.numpy(), np.maximum(limited, plain), **CLOSE)
    assert clipped.tolist() == (limited > plain).astype(float).tolist()


@LIGHT
@given(MASKS, SEEDS, st.sampled_from([(0.0, 2.0), (0.5, 1.5)]))
def test_truncated_importance_sampling_and_icepop(
    masks: list[list[int]], seed: int, bounds: tuple[float, float]
) -> None:
    draw, (low, high) = Draw(masks, seed), bounds
    train, engine, pg = draw.rows(0.5), draw.rows(0.5), flat(draw.rows())
    call: dict[str, Any] = {
        "args": Namespace(tis_clip_low=low, tis_clip=high),
        "pg_loss": torch.from_numpy(pg),
        "train_log_probs": [row.requires_grad_() for row in tensors(train)],
        "rollout_log_probs": tensors(engine),
        "loss_masks": tensors(draw.masks),
        "total_lengths": [0] * len(masks),
        "response_lengths": [len(mask) for mask in masks],
    }
    ratio = np.exp(flat(train) - flat(engine))
    for function, weight in (
        (vanilla_tis_function, np.minimum(np.maximum(ratio, low), high)),
        (icepop_function, np.array([w if low <= w <= high else 0.0 for w in ratio])),
    ):
        loss, kept, metrics = function(**call)
        assert kept is call["loss_masks"] and not loss.requires_grad
        np.testing.assert_allclose(loss.numpy(), pg * weight, **CLOSE)
        np.testing.assert_allclose(metrics["tis"].numpy(), ratio, **CLOSE)
        np.testing.assert_allclose(metrics["tis_abs"].numpy(), np.abs(ratio - 1), **CLOSE)
        assert metrics["tis_clipfrac"].tolist() == [float(w != r) for w, r in zip(weight, ratio, strict=True)]


@LIGHT
@given(MASKS, SEEDS)
def test_distillation_gap(masks: list[list[int]], seed: int) -> None:
    draw = Draw(masks, seed)
    student, teacher = draw.rows(), draw.rows()
    seen = P.get_opd_reverse_kl(tensors(student), tensors(teacher), tensors(draw.masks))
    for i, row in enumerate(seen):
        np.testing.assert_allclose(row.numpy(), (student[i] - teacher[i]) * draw.masks[i], **CLOSE)


def test_distillation_gap_names_the_sample_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="sample 1: 3 teacher_log_probs for a response of 2 tokens"):
        P.get_opd_reverse_kl(
            [torch.zeros(1), torch.zeros(2)], [torch.zeros(1), torch.zeros(3)], [torch.ones(1), torch.ones(2)]
        )


@LIGHT
@given(MASKS, SEEDS, st.booleans())
def test_whitening_of_one_process(masks: list[list[int]], seed: int, shift: bool) -> None:
    draw = Draw(masks, seed)
    values, mask = flat(draw.rows(3.0, 5.0)), flat(draw.masks)
    if not mask.any():
        with pytest.raises(ValueError, match="global sum of the loss masks is 0"):
            distributed_masked_whiten(torch.from_numpy(values), torch.from_numpy(mask))
        return
    kept = values[mask == 1]
    variance = kept.var(ddof=1) if len(kept) > 1 else 0.0
    wanted = (values - kept.mean()) / np.sqrt(variance + 1e-8) + (0.0 if shift else kept.mean())
    seen = distributed_masked_whiten(torch.from_numpy(values), torch.from_numpy(mask), shift_mean=shift)
    np.testing.assert_allclose(seen.numpy(), wanted, rtol=1e-7, atol=1e-7)


def test_whitening_ignores_infinite_masked_values_and_refuses_other_shapes() -> None:
    values = torch.tensor([1.0, float("inf"), 3.0])
    seen = distributed_masked_whiten(values, torch.tensor([1, 0, 1]))
    assert seen[[0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    with pytest.raises(ValueError, match="mask of shape"):
        distributed_masked_whiten(values, torch.ones(2))


@LIGHT
@given(MASKS, SEEDS, st.booleans(), st.booleans(), st.integers(1, 3))
def test_reducers(masks: list[list[int]], seed: int, per_token: bool, grouped: bool, group: int) -> None:
    """Sum over rollouts of the mean over a rollout's trained tokens, however it is cut into samples."""
    draw = Draw(masks, seed)
    rows, lengths = draw.rows(), [len(mask) for mask in masks]
    rollout = [i // group for i in range(len(masks))]
    sums = [float(mask.sum()) for mask in draw.masks]
    denoms = [sum(s for s, r in zip(sums, rollout, strict=True) if r == mine) for mine in rollout]
    wanted = 0.0
    for i, (row, mask) in enumerate(zip(rows, draw.masks, strict=True)):
        total = sum(float(x) for x, m in zip(row, mask, strict=True) if m)
        wanted += total if per_token else total / max(denoms[i] if grouped else sums[i], 1)
    reduce = get_sum_of_sample_mean(
        [n + 1 for n in lengths], lengths, tensors(draw.masks), denoms if grouped else None, per_token
    )
    assert float(reduce(torch.from_numpy(flat(rows)))) == pytest.approx(wanted, abs=1e-5)


@LIGHT
@given(SEEDS, st.integers(0, 7), st.sampled_from([-1, 1, 3]), st.booleans())
def test_log_probs_and_entropy_from_logits(seed: int, rows: int, chunk: int, masked: bool) -> None:
    random = np.random.default_rng(seed)
    logits, tokens = random.standard_normal((rows, 5)), random.integers(0, 5, rows)
    keep = random.integers(0, 2, (rows, 5)) if masked else np.ones((rows, 5))
    x = torch.from_numpy(logits).requires_grad_()
    log_probs, entropy = P.calculate_log_probs_and_entropy(
        x, torch.from_numpy(tokens), None, True, chunk, torch.from_numpy(keep) if masked else None
    )
    assert entropy is not None and log_probs.shape == entropy.shape == (rows,)
    for i, token in enumerate(tokens):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        allowed = sum(np.exp(logits[i, v]) for v in range(5) if keep[i, v] or v == token)
        assert float(log_probs[i]) == pytest.approx(logits[i, token] - np.log(allowed), abs=1e-5)
        assert float(entropy[i]) == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
    log_probs.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_log_probs_without_entropy_or_its_gradient() -> None:
    x, tokens = torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 3])
    assert P.calculate_log_probs_and_entropy(x, tokens, None)[1] is None
    entropy = P.calculate_log_probs_and_entropy(x, tokens, None, True, with_entropy_grad=False)[1]
    assert entropy is not None and not entropy.requires_grad
    with pytest.raises(ValueError, match="split over 2 ranks"):
        P.calculate_log_probs_and_entropy(x, tokens, Namespace(size=lambda: 2))
