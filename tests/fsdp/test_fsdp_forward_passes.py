"""Passes without gradients on two ranks: a token budget of their own, and the weights that the engines had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

ROLLOUT = helpers.make_rollout(5, rollouts=4)
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48, "use_rollout_entropy": True}


def _share(trainer: Any) -> dict[str, Any]:
    return helpers.split(trainer.args, ROLLOUT, trainer.context.rank, trainer.context.world_size)


def _budgets(model_dir: Path) -> dict[str, Any]:
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    results: dict[str, Any] = {}
    for budget in (None, 16, 500):
        trainer = FSDPTrainer()
        trainer.init(helpers.make_args(model_dir, **DYNAMIC, log_probs_max_tokens_per_gpu=budget), with_ref=True)
        data = trainer._prepare_rows(_share(trainer))
        lengths, batches = data["local_total_lengths"], data.get("forward_micro_batches")
        results[str(budget)] = {
            "metrics": trainer.train(0, _share(trainer)),
            "tokens": None if batches is None else [sum(lengths[i] for i in rows) for rows in batches],
            "rows": (
                None if batches is None else sorted({i for rows in batches for i in rows}) == list(range(len(lengths)))
            ),
        }
    return results


def _versions(model_dir: Path) -> dict[str, Any]:
    """Train twice with a sync before each; log-probs for every version, against those that were taken at the time."""
    from slime.backends.common.batches import prepare_rollout_data
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    trainer = FSDPTrainer()
    trainer.init(helpers.make_args(model_dir, keep_old_actor=True), with_ref=True)

    def log_probs(version: int | None) -> torch.Tensor:
        data = prepare_rollout_data(_share(trainer), trainer.context.device)
        return torch.cat(trainer._old_log_probs({**data, "weight_version": version})[0])

    assert trainer.old_actor is not None
    taken = {"never sent": log_probs(None)}
    for version in (4, 5, 6):
        trainer.old_actor.remember(version)
        taken[str(version)] = log_probs(None)
        metrics = trainer.train(0, {**_share(trainer), "weight_version": version - (version > 4)})
    before = [p.full_tensor().clone() for p in trainer.model.parameters()]
    asked = {str(version): log_probs(version) for version in (3, 5, 6, 99)}
    restored = all(torch.equal(a, b.full_tensor()) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return {"taken": taken, "asked": asked, "restored": restored, "metrics": metrics}


def _run(folder: Path, model_dir: Path) -> None:
    import torch.distributed as dist

    results = {"budgets": _budgets(model_dir), "versions": _versions(model_dir)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, results)
    if dist.get_rank() == 0:
        torch.save(parts, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("forward")
    helpers.run_workers(_run, 2, folder, helpers.make_model(folder / "model"))
    return torch.load(folder / "results.pt", weights_only=False)


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_the_budget_changes_the_passes_and_not_the_result(ranks: list[dict[str, Any]]) -> None:
    wanted = _numbers(ranks[0]["budgets"]["None"]["metrics"])
    for budget in (16, 500):
        small, other = (rank["budgets"][str(budget)] for rank in ranks)
        assert _numbers(small["metrics"]) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert len(small["tokens"]) == len(other["tokens"]), "ranks need equally many passes"
        assert small["rows"] and other["rows"], "every row is in a pass"
        longest = max(map(len, ROLLOUT["tokens"]))
        assert max(small["tokens"] + other["tokens"]) <= max(budget, longest)
    assert len(ranks[0]["budgets"]["500"]["tokens"]) == 1 < len(ranks[0]["budgets"]["16"]["tokens"])


def test_old_log_probs_are_those_of_the_version(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        taken, asked = rank["versions"]["taken"], rank["versions"]["asked"]
        assert torch.equal(taken["never sent"], taken["4"]) and not torch.equal(taken["4"], taken["5"])
        assert torch.equal(asked["5"], taken["5"]) and torch.equal(asked["6"], taken["6"])
        assert torch.equal(asked["3"], taken["5"]), "older than what is held: the oldest that is"
        assert torch.equal(asked["99"], taken["6"]), "of a run before this one: the latest"
        assert rank["versions"]["restored"]


def test_a_rollout_of_older_weights_has_a_ratio(ranks: list[dict[str, Any]]) -> None:
    assert abs(ranks[0]["versions"]["metrics"]["train/ppo_kl"]) > 1e-5
