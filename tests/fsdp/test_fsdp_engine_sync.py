"""Weight sync into a real SGLang server: after each sync the engine is the trainer's model, and says which version it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch
from helpers_engine_sync import PROMPT, Handle, ask, wait


def _own(trainer: Any, tokens: list[int]) -> list[float]:
    from slime.backends.common.packing import pack_rows

    ids, mask = torch.tensor(PROMPT + tokens), torch.ones(len(tokens))
    with torch.no_grad():
        values, _ = trainer.model(pack_rows([ids], [len(tokens)], [mask]))
    return values.tolist()


def _greedy(trainer: Any, count: int) -> list[int]:
    """Greedy continuation of the trainer's model, token by token."""
    from slime.backends.common.packing import pack_rows

    tokens: list[int] = []
    for _ in range(count):
        packed = pack_rows([torch.tensor(PROMPT + tokens + [0])], [1], [torch.ones(1)])
        with torch.no_grad():
            tokens.append(int(trainer.model(packed, full_logits=True)[0, -2].argmax()))
    return tokens


def _train_and_sync(folder: Path, model_dir: Path, url: str) -> None:
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    args = helpers.make_args(
        model_dir,
        use_kl_loss=False,
        update_weight_disk_dir=str(folder / "sync"),
        update_weight_local_checkpoint_dir=str(folder / "local"),
    )
    trainer, handle = FSDPTrainer(), Handle(url, args)
    trainer.init(args)
    share = helpers.split(args, helpers.make_rollout(3), trainer.context.rank, trainer.context.world_size)
    seen = []
    ways = (("delta", "disk"), ("delta", "disk"), ("full", "nccl"), ("full", "nccl"), ("full", "disk"))
    for rollout_id, (mode, transport) in enumerate(ways):
        trainer.train(rollout_id, share)
        args.update_weight_mode, args.update_weight_transport = mode, transport
        trainer.update_weights([handle], num_new_engines=int(rollout_id == 0), wait=wait)
        tokens, log_probs, version = ask(url)
        seen.append((tokens, _greedy(trainer, 8), log_probs, _own(trainer, tokens), version))
    if trainer.context.is_main:
        torch.save(seen, folder / "seen.pt")
    trainer.shutdown()


@pytest.mark.engine
def test_engine_equals_trainer_after_every_sync(tmp_path: Path) -> None:
    from helpers_sglang import running_server, save_tiny_model

    save_tiny_model(tmp_path / "model")
    with running_server(tmp_path / "model", tmp_path) as server:
        before = ask(server.url)
        helpers.run_workers(_train_and_sync, 2, tmp_path, tmp_path / "model", server.url)
    seen = torch.load(tmp_path / "seen.pt", weights_only=False)
    assert [version for *_, version in seen] == ["1", "2", "3", "4", "5"]
    for tokens, greedy, engine, own, _ in seen:
        assert tokens == greedy
        assert max(abs(a - b) for a, b in zip(engine, own, strict=True)) < 1e-3
    assert seen[0][2] != before[1]
