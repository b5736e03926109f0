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


EVERY_WAY = (("delta", "disk"), ("delta", "disk"), ("full", "nccl"), ("full", "nccl"), ("full", "disk"))


def _train_and_sync(folder: Path, model_dir: Path, url: str, ways: tuple[tuple[str, str], ...]) -> None:
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
    for rollout_id, (mode, transport) in enumerate(ways):
        trainer.train(rollout_id, share)
        args.update_weight_mode, args.update_weight_transport = mode, transport
        trainer.update_weights([handle], num_new_engines=int(rollout_id == 0), wait=wait)
        tokens, log_probs, version = ask(url)
        seen.append((tokens, _greedy(trainer, 8), log_probs, _own(trainer, tokens), version))
    if trainer.context.is_main:
        torch.save(seen, folder / "seen.pt")
    trainer.shutdown()


def _save_model_with_experts(folder: Path) -> None:
    from helpers_sglang import tiny_tokenizer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=304, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, initializer_range=0.2, bos_token_id=0,
        eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "ways"), [("dense", EVERY_WAY), ("experts", (("delta", "disk"), ("full", "nccl")))]
)
def test_engine_equals_trainer_after_every_sync(
    tmp_path: Path, family: str, ways: tuple[tuple[str, str], ...]
) -> None:
    from helpers_sglang import running_server, save_tiny_model

    save = save_tiny_model if family == "dense" else _save_model_with_experts
    save(tmp_path / "model")
    with running_server(tmp_path / "model", tmp_path) as server:
        before = ask(server.url)
        helpers.run_workers(_train_and_sync, 2, tmp_path, tmp_path / "model", server.url, ways)
    seen = torch.load(tmp_path / "seen.pt", weights_only=False)
    assert [version for *_, version in seen] == [str(number + 1) for number in range(len(ways))]
    for tokens, greedy, engine, own, _ in seen:
        assert tokens == greedy
        assert max(abs(a - b) for a, b in zip(engine, own, strict=True)) < 1e-3
    assert seen[0][2] != before[1]
