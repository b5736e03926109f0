"""Weight sync of the Megatron back end into a real SGLang server: after each sync the engine is the trainer's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp
import helpers_megatron as helpers
import pytest
import torch
from helpers_engine_sync import PROMPT, Handle, ask, wait


def _own(trainer: Any, tokens: list[int]) -> list[float]:
    """The trainer's log-probs of a response, through its own pass over all stages. Collective."""
    row = {
        "tokens": [torch.tensor(PROMPT + tokens)], "response_lengths": [len(tokens)], "micro_batch_indices": [[0]],
        "loss_masks": [torch.ones(len(tokens))], "local_total_lengths": [len(PROMPT) + len(tokens)],
    }  # fmt: skip
    return trainer._log_probs(trainer.model, row)[0].tolist()


def _train_and_sync(folder: Path, model_dir: Path, url: str) -> None:
    from slime.backends.megatron_utils.trainer import MegatronTrainer

    layouts = ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2})
    seen = []
    for number, layout in enumerate(layouts):
        trainer = MegatronTrainer()
        args = helpers.make_args(
            model_dir,
            use_kl_loss=False,
            rollout_temperature=1.0,
            update_weight_disk_dir=str(folder / "sync"),
            **layout,
        )
        handle = Handle(url, args)
        trainer.init(args)
        share = helpers.share_of(trainer, helpers_fsdp.make_rollout(3 + number))
        for rollout_id, transport in enumerate(("nccl", "disk")):
            trainer.train(rollout_id, share)
            args.update_weight_transport = transport
            trainer.update_weights([handle], num_new_engines=int(rollout_id == 0), wait=wait)
            torch.distributed.barrier()
            tokens, log_probs, version = ask(url)
            seen.append((log_probs, _own(trainer, tokens), version))
        trainer.updater.close()
        if trainer.context.is_main:
            wait([handle.destroy_weights_update_group.remote("slime-train-1")])
        helpers.forget_layout()
    if trainer.context.is_main:
        torch.save(seen, folder / "seen.pt")
    trainer.shutdown()


@pytest.mark.engine
def test_engine_equals_the_megatron_trainer_after_every_sync(tmp_path: Path) -> None:
    from helpers_sglang import running_server, save_tiny_model

    save_tiny_model(tmp_path / "model")
    with running_server(tmp_path / "model", tmp_path) as server:
        before = ask(server.url)
        helpers_fsdp.run_workers(_train_and_sync, 2, tmp_path, tmp_path / "model", server.url)
    seen = torch.load(tmp_path / "seen.pt", weights_only=False)
    assert [version for *_, version in seen] == ["1", "2", "1", "2"]
    for engine, own, _ in seen:
        assert max(abs(a - b) for a, b in zip(engine, own, strict=True)) < 1e-3
    assert seen[0][0] != before[1]
