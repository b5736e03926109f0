"""Functions that users' hooks import from `slime.backends.megatron_utils`: values, without Megatron and with a stand-in of its ranks."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import cp_utils, loss
from slime.backends.megatron_utils.misc_utils import strip_param_name_prefix


def rank(monkeypatch: pytest.MonkeyPatch, number: int, size: int) -> None:
    place = SimpleNamespace(
        get_context_parallel_world_size=lambda: size,
        get_context_parallel_rank=lambda: number,
        get_context_parallel_group=lambda: None,
    )
    monkeypatch.setitem(cp_utils.__dict__, "mpu", place)


def test_one_rank_owns_everything() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    assert cp_utils.slice_log_prob_with_cp([1.0, 2.0, 3.0], total_length=5, response_length=3) == [1.0, 2.0, 3.0]
    assert torch.equal(cp_utils.all_gather_with_cp(values, 5, 3), values)
    assert torch.equal(cp_utils.slice_with_cp(values, 0), values)
    assert cp_utils.get_logits_and_tokens_offset_with_cp(6, 4)[2] == ((1, 3), (3, 5))


def test_ranks_own_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.arange(7)
    rank(monkeypatch, 0, 2)
    assert cp_utils.slice_with_cp(row, pad_value=9).tolist() == [0, 1, 6, 9]
    assert cp_utils.slice_log_prob_with_cp([0.1, 0.2, 0.3], 7, 3) == []
    assert cp_utils.get_logits_and_tokens_offset_with_cp(7, 3)[2:] == (((0, 0), (0, 0)), ((0, 0), (0, 0)))
    rank(monkeypatch, 1, 2)
    assert cp_utils.slice_with_cp(row, pad_value=9).tolist() == [2, 3, 4, 5]
    assert cp_utils.slice_log_prob_with_cp([0.1, 0.2, 0.3], 7, 3) == [0.1, 0.2, 0.3]
    assert cp_utils.get_logits_and_tokens_offset_with_cp(7, 3)[2:] == (((3, 4), (4, 6)), ((4, 5), (5, 7)))


def test_the_ranks_of_a_reducer_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, responses = [9, 6], [6, 2]
    masks = [torch.tensor([1, 1, 0, 1, 1, 0]), torch.tensor([1, 1])]
    rows = [torch.arange(6.0), torch.tensor([5.0, 7.0])]
    whole = loss.get_sum_of_sample_mean(lengths, responses, masks)(torch.cat(rows))
    assert whole.item() == pytest.approx((0 + 1 + 3 + 4) / 4 + 6)
    total = 0.0
    for number in range(2):
        rank(monkeypatch, number, 2)
        local = [
            cp_utils.slice_log_prob_with_cp(row, n, r) for row, n, r in zip(rows, lengths, responses, strict=True)
        ]
        total += loss.get_sum_of_sample_mean(lengths, responses, masks)(torch.cat(local)).item()
    assert total == pytest.approx(whole.item())


def test_reducer_forms() -> None:
    masks = [torch.tensor([1.0, 0.0]), torch.tensor([1.0])]
    x = torch.tensor([2.0, 5.0, 4.0])
    assert cp_utils.get_sum_of_sample_mean([3, 2], [2, 1], masks, torch.tensor([2.0, 2.0]))(x).item() == 3.0
    assert cp_utils.get_sum_of_sample_mean([3, 2], [2, 1], masks, calculate_per_token_loss=True)(x).item() == 6.0
    assert cp_utils.get_sum_of_sample_mean([3], [2], [torch.zeros(2)])(x[:2]).item() == 0.0


def test_corrections_for_the_engine() -> None:
    args = Namespace(tis_clip=2.0, tis_clip_low=0.5)
    given: dict[str, Any] = {
        "pg_loss": torch.ones(3),
        "loss_masks": [torch.ones(3)],
        "total_lengths": [4],
        "response_lengths": [3],
    }
    train, engine = [torch.log(torch.tensor([1.0, 3.0, 0.1]))], [torch.zeros(3)]
    pg, masks, metrics = loss.vanilla_tis_function(args, train_log_probs=train, rollout_log_probs=engine, **given)
    assert torch.allclose(pg, torch.tensor([1.0, 2.0, 0.5])) and masks is given["loss_masks"]
    assert set(metrics) == {"tis", "tis_clipfrac", "tis_abs"} and metrics["tis_clipfrac"].tolist() == [0.0, 1.0, 1.0]
    pg, _, _ = loss.icepop_function(args=args, train_log_probs=train, rollout_log_probs=engine, **given)
    assert torch.allclose(pg, torch.tensor([1.0, 0.0, 0.0]))


def test_distillation_changes_the_given_advantages() -> None:
    data = {"teacher_log_probs": [torch.tensor([-1.0, -2.0])]}
    rows = [torch.ones(2)]
    loss.apply_opd_kl_to_advantages(Namespace(opd_kl_coef=0.5), data, rows, [torch.tensor([-2.0, -2.0])])
    assert torch.equal(rows[0], torch.tensor([1.5, 1.0])) and data["opd_reverse_kl"][0].tolist() == [-1.0, 0.0]
    with pytest.raises(ValueError):
        loss.apply_opd_kl_to_advantages(Namespace(opd_kl_coef=0.5), {}, rows, rows)


def test_advantages_from_the_least_that_is_needed() -> None:
    args = Namespace(advantage_estimator="grpo", kl_coef=0.0, kl_loss_type="k1", gamma=1.0, lambd=1.0)
    args.normalize_advantages = False
    masks = [torch.ones(2, dtype=torch.int), torch.ones(3, dtype=torch.int)]
    data: dict[str, Any] = {
        "rewards": [1.5, -1.0],
        "response_lengths": [2, 3],
        "total_lengths": [4, 5],
        "loss_masks": masks,
    }
    loss.compute_advantages_and_returns(args, data)
    assert data["advantages"][0].tolist() == [1.5, 1.5] and data["returns"][1].tolist() == [-1.0] * 3
    assert data["kl"][0].dtype == torch.float32


def test_wrappers_are_taken_off() -> None:
    assert strip_param_name_prefix("module.module.decoder.x") == "decoder.x"
    assert strip_param_name_prefix(name="decoder.module.x") == "decoder.module.x"


def test_no_megatron_is_loaded() -> None:
    code = (
        "import sys, slime.backends.megatron_utils.loss as m; m.get_sum_of_sample_mean([2], [1], [__import__('torch').ones(1)]);"
        "assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
