"""Losses against sums written out by hand; no process group."""

from __future__ import annotations

import math
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

from slime.backends.common import loss
from slime.backends.common.advantages import compute_advantages_and_returns, needs_old_log_probs
from slime.backends.common.batches import take_rows


def _batch(masks: list[list[int]], denoms: list[float], rewards: list[float], **more: Any) -> dict[str, Any]:
    data = {
        "tokens": [torch.arange(len(mask) + 2) for mask in masks],
        "response_lengths": [len(mask) for mask in masks],
        "loss_masks": [torch.tensor(mask, dtype=torch.float32) for mask in masks],
        "rewards": rewards,
        "rollout_mask_sums": denoms,
        "local_total_lengths": [len(mask) + 2 for mask in masks],
        **more,
    }
    args = helpers.make_args("x")
    compute_advantages_and_returns(args, data)
    return take_rows(data, list(range(len(masks))))[0]


def _policy(args: Any, batch: dict[str, Any], log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    entropy = [torch.full_like(row, 0.5) for row in log_probs]
    return loss.policy_loss(args, batch, log_probs, entropy, loss.make_reducer(args, batch))


def test_turn_weights_of_flow_grpo() -> None:
    """Two trajectories, A with turns of 2 and 4 tokens, B with one of 5: token weights 0.125, 0.0625, 0.1, together 1."""
    args = helpers.make_args("x", use_kl_loss=False, entropy_coef=0.0)
    masks = [[1] * 2, [1] * 4, [1] * 5]
    batch = _batch(masks, [2 * 2, 2 * 4, 1 * 5], [1.0, 1.0, 1.0])
    log_probs = [torch.zeros(len(mask), requires_grad=True) for mask in masks]
    value, _ = _policy(args, batch, log_probs)
    (value * loss.loss_factor(args, global_batch_size=2, tokens=11)).backward()
    weights = [-row.grad for row in log_probs if row.grad is not None]
    for seen, wanted in zip(weights, (0.125, 0.0625, 0.1), strict=True):
        torch.testing.assert_close(seen, torch.full_like(seen, wanted))
    assert sum(float(row.sum()) for row in weights) == pytest.approx(1.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_policy_loss_equals_the_formula(ratio: float, advantage: float) -> None:
    """Clip 0.2 / 0.28, KL to a reference with coefficient 0.1, entropy bonus 0.01, masked tokens without effect."""
    args = helpers.make_args("x")
    old, reference = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([-1.2, 0.0, -1.5])
    batch = _batch([[1, 0, 1]], [4.0], [advantage], log_probs=[old], ref_log_probs=[reference])
    new = old + math.log(ratio) * torch.tensor([1.0, 0.0, 1.0])
    value, metrics = _policy(args, batch, [new])
    clipped = min(max(ratio, 0.8), 1.28)
    pg = sum(max(-ratio * advantage, -clipped * advantage) for _ in range(2)) / 4
    gaps = [float(new[i] - reference[i]) for i in (0, 2)]
    kl = sum(math.exp(-gap) - 1 + gap for gap in gaps) / 4
    entropy = 2 * 0.5 / 4
    assert float(value) == pytest.approx(pg + 0.1 * kl - 0.01 * entropy, abs=1e-6)
    assert float(metrics["pg_loss"]) == pytest.approx(pg, abs=1e-6)
    assert float(metrics["kl_loss"]) == pytest.approx(kl, abs=1e-6)
    assert float(metrics["ppo_kl"]) == pytest.approx(-2 * math.log(ratio) / 4, abs=1e-6)


def test_gap_to_the_engine_is_a_sum_over_trained_tokens_of_old_values() -> None:
    args = helpers.make_args("x", use_kl_loss=False)
    batch = _batch([[1, 0, 1]], [2.0], [1.0], rollout_log_probs=[torch.tensor([-1.0, 9.0, -2.0])])
    _, metrics = _policy(args, batch, [torch.tensor([-1.5, 0.0, -1.75])])
    assert float(metrics["train_rollout_logprob_abs_diff"]) == pytest.approx(0.75)


def test_rollout_log_probs_can_be_the_old_policy() -> None:
    args = helpers.make_args("x", use_kl_loss=False, entropy_coef=0.0, use_rollout_logprobs=True)
    batch = _batch([[1, 0]], [1.0], [1.0], rollout_log_probs=[torch.tensor([-1.0, -5.0])])
    value, metrics = _policy(args, batch, [torch.tensor([-1.1, 0.0])])
    assert float(value) == pytest.approx(-math.exp(-0.1), abs=1e-6)
    assert float(metrics["ppo_kl"]) == pytest.approx(0.1, abs=1e-6)


def test_missing_rollout_log_probs_are_named() -> None:
    args = helpers.make_args("x", use_kl_loss=False, use_rollout_logprobs=True)
    with pytest.raises(ValueError, match="--use-rollout-logprobs"):
        _policy(args, _batch([[1, 0]], [1.0], [1.0]), [torch.tensor([-1.1, 0.0])])


def test_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    args = helpers.make_args("x", loss_type="sft_loss")
    batch = _batch([[1, 0, 1], [1]], [2.0, 1.0], [0.0, 0.0])
    rows = [torch.tensor([-1.0, -7.0, -3.0]), torch.tensor([-0.5])]
    value, _ = loss.sft_loss(rows, loss.make_reducer(args, batch))
    assert float(value) == pytest.approx(2.0 + 0.5)


def test_per_token_loss_divides_by_tokens_once() -> None:
    args = helpers.make_args("x", calculate_per_token_loss=True)
    batch = _batch([[1, 0, 1], [1]], [2.0, 1.0], [0.0, 0.0])
    value, _ = loss.sft_loss([torch.tensor([-1.0, -7.0, -3.0]), torch.tensor([-0.5])], loss.make_reducer(args, batch))
    assert float(value) * loss.loss_factor(args, 2, 3) == pytest.approx(4.5 / 3)


@pytest.mark.parametrize(
    ("steps", "flags", "wanted"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"custom_advantage_function_path": "m.f"}, True),
        (1, {"advantage_estimator": "gspo"}, True),
        (2, {"use_rollout_logprobs": True}, False),
        (2, {"compute_advantages_and_returns": False}, False),
    ],
)
def test_when_old_log_probs_are_computed(steps: int, flags: dict[str, Any], wanted: bool) -> None:
    assert needs_old_log_probs(helpers.make_args("x", **flags), steps) is wanted


def test_custom_advantages_must_be_set() -> None:
    data = {"loss_masks": [torch.ones(2)], "rewards": [1.0]}
    args = helpers.make_args("x", custom_advantage_function_path="helpers_fsdp.forget_advantages")
    with pytest.raises(ValueError, match="--custom-advantage-function-path"):
        compute_advantages_and_returns(args, data)


def _gap_batch(**more: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Two rows; trainer and engine differ by log 3 and log 0.5 at the first row's trained tokens, not at the second's."""
    masks, old = [[1, 0, 1], [1]], [torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([-0.5])]
    engine = [torch.tensor([-1.0 - math.log(3), 7.0, -2.0 - math.log(0.5)]), torch.tensor([-0.5])]
    batch = _batch(masks, [2.0, 1.0], [1.0, -2.0], log_probs=old, rollout_log_probs=engine, **more)
    return batch, [row.clone().requires_grad_() for row in old]


def test_truncated_importance_sampling_weighs_loss_and_gradient() -> None:
    args = helpers.make_args("x", use_kl_loss=False, entropy_coef=0.0, use_tis=True, tis_clip=2.0)
    batch, new = _gap_batch()
    value, metrics = _policy(args, batch, new)
    assert float(value) == pytest.approx(-(2.0 + 0.5) / 2 + 2.0)
    value.backward()
    assert new[0].grad is not None and new[0].grad.tolist() == pytest.approx([-1.0, 0.0, -0.25])
    assert float(metrics["tis"]) == pytest.approx((3 + 0.5) / 2 + 1.0)
    assert float(metrics["tis_clipfrac"]) == pytest.approx(0.5)
    assert float(metrics["tis_abs"]) == pytest.approx((2 + 0.5) / 2)
    assert float(metrics["ois"]) == pytest.approx(2.0)


def test_icepop_and_own_corrections_come_through_the_hook() -> None:
    icepop = "slime.utils.importance_sampling.icepop_function"
    args = helpers.make_args("x", use_kl_loss=False, entropy_coef=0.0, use_tis=True, custom_tis_function_path=icepop)
    batch, new = _gap_batch()
    assert float(_policy(args, batch, new)[0]) == pytest.approx(-(0.0 + 0.5) / 2 + 2.0)
    args.use_tis, args.get_mismatch_metrics = False, True
    args.custom_tis_function_path = "helpers_fsdp.drop_first_token"
    value, metrics = _policy(args, batch, new)
    # The numerator loses the token, the denominator of the rollout does not; metrics keep the original masks.
    assert float(value) == pytest.approx(-1.0 / 2 + 0.0)
    assert float(metrics["seen"]) == pytest.approx((1 + 1) / 2 + 1.0)


def test_corrections_need_the_engines_log_probs() -> None:
    args = helpers.make_args("x", use_kl_loss=False, use_tis=True)
    with pytest.raises(ValueError, match="--use-tis: the rollout data hold no rollout_log_probs"):
        _policy(args, _batch([[1, 0]], [1.0], [1.0]), [torch.tensor([-1.1, 0.0])])


def test_off_policy_sequences_lose_their_negative_tokens() -> None:
    args = helpers.make_args("x", use_kl_loss=False, entropy_coef=0.0, use_opsm=True, opsm_delta=0.1)
    batch = _batch(
        [[1, 1], [1]], [2.0, 1.0], [-1.0, -1.0], log_probs=[torch.tensor([-1.0, -1.0]), torch.tensor([-1.0])]
    )
    new = [torch.tensor([-1.0, -1.4]), torch.tensor([-1.05])]
    value, metrics = _policy(args, batch, new)
    assert float(value) == pytest.approx(math.exp(-0.05), abs=1e-6)
    assert float(metrics["opsm_clipfrac"]) == pytest.approx(1.0)


def test_unbiased_kl_is_weighted_with_the_ratio() -> None:
    args = helpers.make_args("x", entropy_coef=0.0, use_unbiased_kl=True, kl_loss_type="k3")
    old, reference = torch.tensor([-1.0]), torch.tensor([-1.3])
    batch = _batch([[1]], [1.0], [0.0], log_probs=[old], ref_log_probs=[reference])
    _, metrics = _policy(args, batch, [torch.tensor([-0.8])])
    assert float(metrics["kl_loss"]) == pytest.approx(math.exp(0.2) * (math.exp(-0.5) - 1 + 0.5), abs=1e-6)


def test_custom_reducer_of_the_policy_loss_only() -> None:
    args = helpers.make_args(
        "x", use_kl_loss=False, custom_pg_loss_reducer_function_path="helpers_fsdp.sum_of_everything"
    )
    batch = _batch([[1, 0, 1], [1]], [2.0, 1.0], [1.0, 1.0])
    value, metrics = _policy(args, batch, [torch.zeros(3), torch.zeros(1)])
    assert float(metrics["pg_loss"]) == pytest.approx(-4.0)
    assert float(value) == pytest.approx(-4.0 - 0.01 * (0.5 + 0.5))


def test_value_loss_is_reported_and_reduced_over_rollouts() -> None:
    args = helpers.make_args("x", value_clip=0.5)
    batch = _batch([[1, 0], [1]], [1.0, 1.0], [0.0, 0.0])
    batch["values"], batch["returns"] = [torch.zeros(2), torch.zeros(1)], [
        torch.tensor([2.0, 9.0]),
        torch.tensor([1.0]),
    ]
    value, metrics = loss.value_loss(
        args, batch, [torch.tensor([1.0, 0.0]), torch.tensor([0.25])], loss.make_reducer(args, batch)
    )
    assert float(value) == pytest.approx((0.5 - 2) ** 2 + (0.25 - 1) ** 2)
    assert float(metrics["value_clipfrac"]) == 1.0
