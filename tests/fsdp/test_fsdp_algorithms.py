"""Estimators, corrections, whitening, distillation and the critic on two real ranks, against values written out here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import numpy as np
import pytest
import torch

ROLLOUT = helpers.make_rollout(7, rollouts=4)
TRAINED = [mask for mask in ROLLOUT["loss_masks"]]
WHITENED = {"normalize_advantages": True, "kl_coef": 0.1, "kl_loss_coef": 0.0, "use_kl_loss": False, "gamma": 0.9}
VARIANTS: dict[str, dict[str, Any]] = {
    "reinforce_plus_plus": {**WHITENED, "advantage_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {**WHITENED, "advantage_estimator": "reinforce_plus_plus_baseline"},
    "tis": {"use_tis": True, "tis_clip": 1.5, "use_opsm": True},
    "opd": {"use_opd": True, "opd_kl_coef": 0.5, "use_rollout_entropy": True, "use_kl_loss": False},
    "nothing_trained": {"rollout_data_postprocess_path": "helpers_fsdp.mask_everything", "normalize_advantages": True},
}
PPO = {**WHITENED, "advantage_estimator": "ppo", "lambd": 0.8, "normalize_advantages": False, "use_critic": True}


def _share(trainer: Any) -> dict[str, Any]:
    data = {**ROLLOUT, "teacher_log_probs": [[-0.3] * n for n in ROLLOUT["response_lengths"]]}
    return helpers.split(trainer.args, data, trainer.context.rank, trainer.context.world_size)


def _run_variants(model_dir: Path) -> dict[str, Any]:
    """Metrics, and on this rank the advantages of the trained tokens, of each variant."""
    from slime.backends.fsdp_utils import trainer as module

    results: dict[str, Any] = {}
    for name, flags in VARIANTS.items():
        trainer = module.FSDPTrainer()
        args = helpers.make_args(model_dir, **flags)
        trainer.init(args, with_ref=args.use_kl_loss or args.kl_coef != 0)
        before = _weights(trainer)
        results[name] = {"metrics": trainer.train(0, _share(trainer))}
        pairs = zip(_weights(trainer), before, strict=True)
        results[name]["moved"] = max(float((new - old).abs().max()) for new, old in pairs)
    return results


def _weights(trainer: Any) -> list[torch.Tensor]:
    from slime.backends.fsdp_utils.model import reshard

    reshard(trainer.model)
    return [p.full_tensor().clone() for p in trainer.model.parameters()]


def _gathered(rows: list[torch.Tensor], partition: list[int]) -> dict[int, torch.Tensor]:
    """Rows of all ranks by their global number."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, dict(zip(partition, rows, strict=True)))
    return {number: row for part in parts for number, row in part.items()}


def _run_ppo(folder: Path, model_dir: Path) -> dict[str, Any]:
    """Critic, then actor with its values, twice; the critic is saved in between and a second one resumes from it."""
    from slime.backends.fsdp_utils.critic import CriticTrainer
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    critic_args = helpers.make_args(
        model_dir,
        **{**PPO, "kl_coef": 0.0},
        save=str(folder / "critic"),
        value_clip=10.0,
        clip_grad=0.0,
        weight_decay=0.0,
    )
    actor_args = helpers.make_args(model_dir, **PPO)
    critic, actor, resumed = CriticTrainer(), FSDPTrainer(), CriticTrainer()
    critic.init(critic_args, "critic")
    actor.init(actor_args, with_ref=True)
    share = _share(critic)
    first = critic.train(0, dict(share))
    values = critic.values
    actor_metrics = actor.train(0, {**share, "values": values})
    critic.save_model(0)
    start = resumed.init(
        helpers.make_args(model_dir, **{**vars(critic_args), "load": str(folder / "critic")}), "critic"
    )
    second, again = critic.train(1, dict(share)), resumed.train(1, dict(share))
    losses = [second["critic/value_loss"]] + [critic.train(i, dict(share))["critic/value_loss"] for i in range(2, 8)]
    return {
        "first": first, "actor": actor_metrics, "start": start, "second": second, "again": again, "losses": losses,
        "values": _gathered(values, share["partition"]), "later": _gathered(critic.values, share["partition"]),
    }  # fmt: skip


def _run_all(folder: Path, model_dir: Path) -> None:
    import torch.distributed as dist

    results = {"variants": _run_variants(model_dir), "ppo": _run_ppo(folder, model_dir)}
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("algorithms")
    helpers.run_workers(_run_all, 2, folder, helpers.make_model(folder / "model"))
    return torch.load(folder / "results.pt", weights_only=False)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def _trained(rows: list[list[float]]) -> list[float]:
    return [x for row, mask in zip(rows, TRAINED, strict=True) for x, kept in zip(row, mask, strict=True) if kept]


def _over_rollouts(rows: list[list[float]]) -> float:
    """Sum over rows of the trained values by the rollout's denominator, divided by the step's four rollouts."""
    samples = zip(rows, TRAINED, ROLLOUT["rollout_mask_sums"], strict=True)
    return sum(sum(x for x, kept in zip(row, mask, strict=True) if kept) / max(d, 1) for row, mask, d in samples) / 4


@pytest.mark.parametrize(("estimator", "gamma"), [("reinforce_plus_plus", 0.9), ("reinforce_plus_plus_baseline", 1.0)])
def test_whitened_advantages_of_the_reinforce_family(runs: dict[str, Any], estimator: str, gamma: float) -> None:
    """The first policy has no KL, so returns are the discounted rewards; at ratio 1 the loss is minus their weighted mean."""
    returns = []
    for reward, mask in zip(ROLLOUT["rewards"], TRAINED, strict=True):
        last = max((i for i, kept in enumerate(mask) if kept), default=0)
        returns.append([reward * gamma ** (last - i) for i in range(len(mask))])
    mean, std = np.mean(_trained(returns)), np.std(_trained(returns), ddof=1)
    metrics = runs["variants"][estimator]["metrics"]
    wanted = -_over_rollouts([[(g - mean) / std for g in row] for row in returns])
    assert metrics["train/pg_loss"] == pytest.approx(wanted, abs=1e-5)
    assert "train/kl_loss" not in metrics and metrics["train/grad_norm"] > 1e-3


def test_corrections_are_reported(runs: dict[str, Any]) -> None:
    """The stored engine log-probs are drawn at random; a random model is less sure of the tokens, so no weight is cut."""
    metrics = runs["variants"]["tis"]["metrics"]
    assert metrics["train/tis_clipfrac"] == 0.0 and 0 < metrics["train/tis"] < 0.5
    assert metrics["train/ois"] > 0 and metrics["train/opsm_clipfrac"] == 0.0


def test_distillation_moves_towards_the_teacher(runs: dict[str, Any]) -> None:
    """A teacher at -0.3 per token knows the tokens far better than a random model: the reverse KL is strongly negative."""
    metrics = runs["variants"]["opd"]["metrics"]
    assert -math.log(2 * helpers.VOCAB) < metrics["train/opd_reverse_kl"] < -1
    assert metrics["train/rollout_entropy"] == pytest.approx(metrics["train/entropy_loss"], rel=1e-5)


def test_a_step_without_trained_tokens_leaves_the_weights(runs: dict[str, Any]) -> None:
    assert runs["variants"]["nothing_trained"]["moved"] == 0.0
    assert runs["variants"]["tis"]["moved"] > 1e-4


def test_first_losses_of_actor_and_critic(runs: dict[str, Any]) -> None:
    """Values start at 0: advantage and return of a token are the reward, discounted by gamma x lambda from the last one."""
    rewards = zip(ROLLOUT["rewards"], TRAINED, strict=True)
    returns = [[reward * 0.72 ** (len(mask) - 1 - i) for i in range(len(mask))] for reward, mask in rewards]
    critic, actor = runs["ppo"]["first"], runs["ppo"]["actor"]
    assert critic["critic/value_loss"] == pytest.approx(
        _over_rollouts([[g * g for g in row] for row in returns]), rel=1e-5
    )
    assert actor["train/pg_loss"] == pytest.approx(-_over_rollouts(returns), abs=1e-5)
    assert {"critic/value_clipfrac", "critic/grad_norm", "critic/lr", "critic/step"} <= set(critic)


def test_every_row_has_values(runs: dict[str, Any]) -> None:
    first, later = runs["ppo"]["values"], runs["ppo"]["later"]
    assert sorted(first) == sorted(later) == list(range(len(TRAINED)))
    assert not any(row.any() for row in first.values())
    assert all(row.all() and len(row) == len(TRAINED[number]) for number, row in later.items()), "untrained tokens too"


def test_critic_learns_and_resumes(runs: dict[str, Any]) -> None:
    result = runs["ppo"]
    assert result["start"] == 1
    assert _numbers(result["again"]) == pytest.approx(_numbers(result["second"]), rel=1e-5, abs=1e-6)
    assert result["losses"][-1] < 0.8 * result["first"]["critic/value_loss"]
