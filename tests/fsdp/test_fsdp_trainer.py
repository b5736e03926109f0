"""Real processes over gloo: number of ranks, packing, KL, resume, interrupted save, HF export, weight sync.

The processes are expensive to start, so three runs feed all tests: 1 rank, 2 ranks, and a resume of the second on 1 rank that is killed
in the middle of its own save.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

ROLLOUTS = [helpers.make_rollout(seed) for seed in (0, 1)]


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    from slime.backends.fsdp_utils.hf_export import gather_full_state

    return gather_full_state(trainer.model)


def _train(trainer: Any, rollout_id: int) -> dict[str, float]:
    world, rank = trainer.context.world_size, trainer.context.rank
    return trainer.train(rollout_id, helpers.split(trainer.args, ROLLOUTS[rollout_id], rank, world))


def _packing_gap(trainer: Any) -> dict[str, Any]:
    """Log-probs of all rows packed together, each row alone, and straight from HF logits."""
    from slime.backends.common.batches import prepare_rollout_data

    share = helpers.split(trainer.args, ROLLOUTS[0], 0, 1)
    data = prepare_rollout_data(share, trainer.context.device)
    count = len(data["tokens"])
    together = trainer._log_probs(trainer.model, {**data, "micro_batch_indices": [list(range(count))]})
    alone = trainer._log_probs(trainer.model, {**data, "micro_batch_indices": [[i] for i in range(count)]})
    return {"together": together, "alone": alone}


def _first_steps(folder: Path, model_dir: Path, extra: dict[str, Any]) -> None:
    """Train rollout 0, save, train rollout 1; on one rank look at packing first, on two sync weights at the end."""
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    folder.mkdir(exist_ok=True)
    args = helpers.make_args(
        model_dir, save=str(folder / "ckpt"), save_hf=str(folder / "hf_{rollout_id}"),
        metrics_jsonl=str(folder / "metrics.jsonl"), update_weight_disk_dir=str(folder / "sync"), **extra,
    )  # fmt: skip
    trainer = FSDPTrainer()
    result: dict[str, Any] = {"start": trainer.init(args, with_ref=True)}
    if trainer.context.world_size == 1:
        result.update(_packing_gap(trainer), first=trainer_first_step(trainer))
    result["rollout_0"] = _train(trainer, 0)
    result["weights_0"] = _state(trainer)
    trainer.save_model(0)
    result["rollout_1"] = _train(trainer, 1)
    result["weights_1"] = _state(trainer)
    if trainer.context.world_size == 2:
        _sync(trainer, folder)
    if trainer.context.is_main:
        torch.save(result, folder / "result.pt")
    trainer.shutdown()


def trainer_first_step(trainer: Any) -> dict[str, float]:
    """The first optimiser step's numbers, without taking the step."""
    from slime.backends.common.batches import plan_steps, prepare_rollout_data

    data = prepare_rollout_data(helpers.split(trainer.args, ROLLOUTS[0], 0, 1), trainer.context.device)
    trainer._prepare_targets(0, data, 2, {})
    sums = trainer._accumulate(data, plan_steps(data)[0], 1)
    trainer.optimizer.zero_grad(set_to_none=True)
    return {name: float(value) for name, value in sums.items()}


def _sync(trainer: Any, folder: Path) -> None:
    engines = [helpers.EngineHandle()] if trainer.context.is_main else []
    trainer.update_weights(engines, num_new_engines=1, wait=helpers.wait_for)
    trainer.update_weights(engines, wait=helpers.wait_for)
    if engines:
        helpers.wait_for([engines[0].report.remote(str(folder / "engine.pt"))])
    trainer.args.update_weight_transport = "disk"
    trainer.update_weights(engines, wait=helpers.wait_for)
    if engines:
        helpers.wait_for([engines[0].report.remote(str(folder / "engine_disk.pt"))])
        helpers.wait_for([engines[0].stop.remote()])


def _resume_and_die(folder: Path, model_dir: Path, load: Path) -> None:
    """Resume on one rank, train the next rollout, then die while the optimizer of the new checkpoint is being written."""
    from slime.backends.fsdp_utils import checkpoint
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    folder.mkdir(exist_ok=True)
    trainer = FSDPTrainer()
    # eps: another value than the stored one, too close to it to matter
    start = trainer.init(
        helpers.make_args(model_dir, load=str(load), save=str(load), adam_eps=1.001e-8), with_ref=True
    )
    groups = [(group["eps"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
    result = {"start": start, "groups": groups, "weights_0": _state(trainer), "rollout_1": _train(trainer, start)}
    torch.save({**result, "weights_1": _state(trainer)}, folder / "result.pt")
    checkpoint.get_optimizer_state_dict = lambda *_: os.kill(os.getpid(), 9)
    trainer.save_model(1)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("fsdp")
    model_dir = helpers.make_model(root / "model")
    helpers.run_workers(_first_steps, 1, root / "one", model_dir, {})
    helpers.run_workers(_first_steps, 2, root / "two", model_dir, {})
    with pytest.raises(Exception, match="SIGKILL"):
        helpers.run_workers(_resume_and_die, 1, root / "resumed", model_dir, root / "two" / "ckpt")
    names = ("one", "two", "resumed")
    results = {name: torch.load(root / name / "result.pt", weights_only=False) for name in names}
    return {"root": root, "model": model_dir, **results}


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("train/")}


def _gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_one_and_two_ranks_agree(runs: dict[str, Any]) -> None:
    for rollout in ("rollout_0", "rollout_1"):
        assert _numbers(runs["one"][rollout]) == pytest.approx(_numbers(runs["two"][rollout]), rel=1e-5, abs=1e-5)
    assert runs["one"]["rollout_0"]["train/grad_norm"] > 1e-2
    assert _gap(runs["one"]["weights_0"], runs["two"]["weights_0"]) < 1e-5
    assert _gap(runs["one"]["weights_0"], runs["one"]["weights_1"]) > 1e-3


def test_metrics_are_complete_and_logged_once_per_step(runs: dict[str, Any]) -> None:
    names = ("loss", "pg_loss", "kl_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "lr", "num_tokens")
    names += ("train_rollout_logprob_abs_diff", "step", "rollout_id")
    assert {f"train/{name}" for name in names} == set(_numbers(runs["two"]["rollout_0"]))
    assert {"perf/train_time", "perf/ref_log_probs_time", "perf/log_probs_time"} <= set(runs["two"]["rollout_0"])
    assert len((runs["root"] / "two" / "metrics.jsonl").read_text().splitlines()) == 4


def test_packed_rows_do_not_see_each_other(runs: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(runs["model"], dtype=torch.float32)
    for i, (together, alone) in enumerate(zip(runs["one"]["together"], runs["one"]["alone"], strict=True)):
        tokens = torch.tensor(ROLLOUTS[0]["tokens"][i])
        with torch.no_grad():
            logits = hf(tokens[None]).logits[0] / 0.8
        wanted = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0][-len(alone) :]
        mask = torch.tensor(ROLLOUTS[0]["loss_masks"][i])
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(alone, wanted * mask, atol=1e-5, rtol=0)


def test_first_step_has_no_kl_and_the_papers_weights(runs: dict[str, Any]) -> None:
    """Ratio 1, so pg_loss x G = -sum_i 1/T_i sum_t 1/|a| sum_j A m, over the four rollouts of the first step."""
    first, data = runs["one"]["first"], ROLLOUTS[0]
    assert abs(first["kl_loss"]) <= 1e-6 and abs(first["ppo_kl"]) <= 1e-6
    rows = range(8)
    wanted = -sum(
        data["rewards"][i] * (sum(data["loss_masks"][i]) / max(2 * sum(data["loss_masks"][i]), 1)) for i in rows
    )
    assert first["pg_loss"] == pytest.approx(wanted, abs=1e-5)


def test_resume_on_fewer_ranks_continues_exactly(runs: dict[str, Any]) -> None:
    assert (runs["one"]["start"], runs["resumed"]["start"]) == (0, 1)
    assert _gap(runs["resumed"]["weights_0"], runs["two"]["weights_0"]) == 0.0
    wanted, seen = _numbers(runs["two"]["rollout_1"]), _numbers(runs["resumed"]["rollout_1"])
    assert seen == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert _gap(runs["resumed"]["weights_1"], runs["two"]["weights_1"]) < 1e-4


def test_optimizer_flags_win_over_stored_ones(runs: dict[str, Any]) -> None:
    assert runs["resumed"]["groups"] == [(1.001e-8, 0.1), (1.001e-8, 0.0)]


def test_save_killed_midway_leaves_the_previous_checkpoint(runs: dict[str, Any]) -> None:
    from slime.backends.common import checkpoint_files as checkpoint

    root = runs["root"] / "two" / "ckpt"
    assert (root / "iter_0000002.tmp").is_dir() and not (root / "iter_0000002").exists()
    assert (root / checkpoint.TRACKER).read_text().strip() == "1"
    assert checkpoint.find_checkpoint(str(root)) == root / "iter_0000001"


def test_checkpoint_layout(runs: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    folder = runs["root"] / "two" / "ckpt" / "iter_0000001"
    assert {path.name for path in folder.iterdir()} == {"model", "optimizer", "lr_scheduler", "rng.pt", "meta.json"}
    keys = FileSystemReader(folder / "model").read_metadata().state_dict_metadata
    assert "model_state.model.model.embed_tokens.weight" in keys and not any("lm_head" in key for key in keys)


def test_hf_export_reloads_equal_in_fp32(runs: dict[str, Any]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = runs["root"] / "two" / "hf_0"
    stored = load_file(folder / "model.safetensors")
    assert _gap(stored, runs["two"]["weights_0"]) == 0.0
    assert {value.dtype for value in stored.values()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert loaded.pop("lm_head.weight").data_ptr() == loaded["model.embed_tokens.weight"].data_ptr()
    assert _gap(loaded, runs["two"]["weights_0"]) == 0.0
    assert (folder / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'
    assert not folder.with_name("hf_0.tmp").exists()


def test_broadcast_brings_the_trainers_weights_and_counts_versions(runs: dict[str, Any]) -> None:
    engine = torch.load(runs["root"] / "two" / "engine.pt", weights_only=False)
    assert _gap(engine["weights"], runs["two"]["weights_1"]) == 0.0
    assert set(engine["versions"]) == {"1", "2"} and engine["versions"] == sorted(engine["versions"])
    log = engine["log"]
    assert log[:4] == ["init_weights_update_group", "pause_generation", "flush_cache", "begin_weight_update"]
    assert log.count("update_weights_from_distributed") > 2, "the buffer size must cut the model into several buckets"
    assert log.count("init_weights_update_group") == 1, "the second sync reuses the group"
    assert log[-2:] == ["end_weight_update", "continue_generation"]


def test_disk_sync_hands_over_a_directory_and_removes_it(runs: dict[str, Any]) -> None:
    engine = torch.load(runs["root"] / "two" / "engine_disk.pt", weights_only=False)
    assert _gap(engine["weights"], runs["two"]["weights_1"]) == 0.0
    assert engine["versions"][-1] == "3"
    assert engine["log"][-4:] == ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]
    assert list((runs["root"] / "two" / "sync").iterdir()) == []
