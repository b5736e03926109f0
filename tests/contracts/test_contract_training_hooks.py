"""Every customisation hook of the training side: when it is called, with which arguments, and what its result means."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_fsdp import make_args

from slime.backends.common import loss, update_weight
from slime.backends.common.advantages import compute_advantages_and_returns
from slime.backends.common.batches import take_rows
from slime.backends.fsdp_utils.trainer import FSDPTrainer

HERE = __name__
CALLS: list[tuple[Any, ...]] = []
LENGTHS = [3, 2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    yield


def rollout_data() -> dict[str, Any]:
    """Two rows of two prompt tokens; the engine's log-probs differ from the trainer's by 0.1 per token."""
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.ones(2)]
    log_probs = [-torch.ones(3), -torch.ones(2)]
    return {
        "tokens": [torch.arange(n + 2) for n in LENGTHS],
        "response_lengths": list(LENGTHS),
        "total_lengths": [n + 2 for n in LENGTHS],
        "local_total_lengths": [n + 2 for n in LENGTHS],
        "loss_masks": masks,
        "rollout_mask_sums": [2.0, 2.0],
        "rewards": [1.0, -1.0],
        "log_probs": log_probs,
        "ref_log_probs": [row - 0.5 for row in log_probs],
        "rollout_log_probs": [row - 0.1 for row in log_probs],
    }


def micro_batch(args: Namespace) -> dict[str, Any]:
    data = rollout_data()
    compute_advantages_and_returns(args, data)
    return take_rows(data, [0, 1])[0]


def policy_loss(args: Namespace) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = micro_batch(args)
    new, entropy = [row.clone().requires_grad_() for row in batch["log_probs"]], [torch.zeros(n) for n in LENGTHS]
    return loss.policy_loss(args, batch, new, entropy, loss.make_reducer(args, batch))


# --- hooks ------------------------------------------------------------------------------------------------------------


def advantages(args: Namespace, data: dict[str, Any]) -> None:
    CALLS.append((args, {name: list(data[name]) for name in ("kl", "rewards")}))
    data["advantages"] = [torch.full((n,), 2.0) for n in LENGTHS]
    data["returns"] = [torch.full((n,), 3.0) for n in LENGTHS]


def postprocess(args: Namespace, rollout_id: int, data: dict[str, Any]) -> str:
    CALLS.append((args, rollout_id, list(data["advantages"])))
    data["loss_masks"] = [torch.zeros(n) for n in LENGTHS]
    return "ignored"


def correction(
    *,
    args: Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    CALLS.append((pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths))
    without_first_row = [torch.zeros_like(loss_masks[0]), loss_masks[1]]
    return 10 * pg_loss, without_first_row, {"mine": torch.ones_like(pg_loss)}


def make_reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[torch.Tensor], per_token: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    CALLS.append((total_lengths, response_lengths, loss_masks, per_token))
    return lambda x: x.sum() * 100


def own_loss(
    args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    CALLS.append((args, batch, logits))
    value = sum_of_sample_mean(torch.ones(sum(LENGTHS)) * logits.mean())
    return value, {"mine": value + 1}


def after_write(args: Namespace, version_dir: str, rollout_engines: list[Any]) -> None:
    CALLS.append((args, version_dir, rollout_engines, sorted(p.name for p in Path(version_dir).iterdir())))


# --- advantages and postprocess ---------------------------------------------------------------------------------------


def test_custom_advantages_come_after_the_kl_and_before_whitening() -> None:
    path = f"{HERE}.advantages"
    args = make_args("x", custom_advantage_function_path=path, kl_loss_type="k1", advantage_estimator="ppo")
    data = rollout_data()
    compute_advantages_and_returns(args, data)
    assert len(CALLS) == 1 and CALLS[0][0] is args
    # k1: log-prob minus the reference's, 0 at the token that is not trained.
    assert [row.tolist() for row in CALLS[0][1]["kl"]] == [[0.5, 0.0, 0.5], [0.5, 0.5]]
    assert [row.tolist() for row in data["returns"]] == [[3.0] * 3, [3.0] * 2]
    assert float(data["advantages"][0][0]) == 2.0


def test_postprocess_has_the_last_word() -> None:
    trainer = object.__new__(FSDPTrainer)
    trainer.args = make_args("x", rollout_data_postprocess_path=f"{HERE}.postprocess", save_debug_train_data=None)
    data = rollout_data()
    trainer._finish_targets(7, data)
    args, rollout_id, seen = CALLS[0]
    assert args is trainer.args and rollout_id == 7 and [float(row[0]) for row in seen] == [1.0, -1.0]
    assert not any(mask.any() for mask in data["loss_masks"])


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["use_tis", "get_mismatch_metrics"])
def test_correction_is_called_by_keyword_with_rows(flag: str) -> None:
    common: dict[str, Any] = {"use_kl_loss": False, "entropy_coef": 0.0}
    args = make_args("x", custom_tis_function_path=f"{HERE}.correction", **common, **{flag: True})
    value, metrics = policy_loss(args)
    pg_loss, train, engine, masks, totals, responses = CALLS[0]
    assert pg_loss.shape == (5,) and [len(row) for row in train] == [len(row) for row in engine] == LENGTHS
    assert [len(mask) for mask in masks] == LENGTHS and (totals, responses) == ([5, 4], LENGTHS)
    # The first row is gone from the numerator; the second has advantage -1, so a loss of 1 per token, times ten.
    assert float(value.detach()) == pytest.approx(10 * (1 + 1) / 2)
    assert float(metrics["mine"]) == pytest.approx(2.0), "metrics keep the original masks"
    assert {"ois", "mine"} <= set(metrics)


def test_reducer_factory_serves_the_policy_loss_only() -> None:
    args = make_args("x", custom_pg_loss_reducer_function_path=f"{HERE}.make_reducer", kl_loss_coef=0.0)
    _, metrics = policy_loss(args)
    totals, responses, masks, per_token = CALLS[0]
    assert (totals, responses, per_token) == ([5, 4], LENGTHS, False) and [len(m) for m in masks] == LENGTHS
    assert float(metrics["pg_loss"]) == pytest.approx(100 * (-3 + 2)) and float(metrics["ppo_kl"]) == 0.0
    assert float(metrics["kl_loss"]) != 0.0 and abs(float(metrics["kl_loss"])) < 10


def test_custom_loss_sees_batch_logits_and_reducer() -> None:
    args = make_args("x", loss_type="custom_loss", custom_loss_function_path=f"{HERE}.own_loss")
    batch, logits = micro_batch(args), torch.full((1, 9, 4), 0.5)
    value, metrics = loss.custom_loss(args, batch, logits)
    assert CALLS[0][0] is args and CALLS[0][1] is batch and CALLS[0][2] is logits
    assert {"tokens", "unconcat_tokens", "response_lengths", "total_lengths", "loss_masks", "advantages"} <= set(batch)
    assert float(value) == pytest.approx(0.5 * 2 / 2 + 0.5 * 2 / 2)
    assert float(metrics["mine"]) == pytest.approx(2.0) and float(metrics["loss"]) == float(value)


# --- weight sync ------------------------------------------------------------------------------------------------------


class Engines:
    """Engine handles that write down what they are asked for."""

    def __getattr__(self, method: str) -> Any:
        remote = lambda *args, **kwargs: CALLS.append((method, args, kwargs))  # noqa: E731
        return Namespace(remote=remote)


def test_post_write_hook_runs_between_writing_and_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(torch.distributed, "barrier", lambda *args: None)
    args = make_args(
        "x",
        custom_update_weight_post_write_path=f"{HERE}.after_write",
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path),
    )
    engine = Engines()
    target = update_weight.EngineSet([engine], [1], lambda refs: refs)
    source = update_weight.WeightSource(lambda: iter(()), write)
    update_weight.WeightUpdater(args, Namespace(is_main=True)).update(source, target)  # type: ignore[arg-type]
    folder = str(tmp_path / "weight_v000001")
    assert CALLS[0] == (args, folder, [engine], ["model.safetensors"])
    methods = [call[0] for call in CALLS[1:]]
    assert methods == ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]
    assert CALLS[3] == ("update_weights_from_disk", (folder,), {"weight_version": "1"})
