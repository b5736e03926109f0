"""Loss and gradients of the FSDP backend equal those of TRL's GRPOTrainer on one batch: TRL is the oracle, a test dependency only.

Both see the same weights, padded (TRL) or packed (ours), the same old and reference log-probs and the same advantages; prompts and
responses have different lengths, and tool tokens are masked inside the responses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers_fsdp as helpers
import pytest
import torch

# Ours -> TRL's configuration of the same objective.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {}),
    "grpo_without_kl": ({"use_kl_loss": False}, {"beta": 0.0}),
    "unbiased_kl": ({"use_unbiased_kl": True}, {"use_bias_correction_kl": True}),
    "gspo": ({"advantage_estimator": "gspo"}, {"importance_sampling_level": "sequence"}),
    "per_token_with_entropy": (
        {"calculate_per_token_loss": True, "entropy_coef": 0.02},
        {"loss_type": "dapo", "entropy_coef": 0.02},
    ),
    "cispo": (
        {"advantage_estimator": "cispo", "calculate_per_token_loss": True, "eps_clip": 1.0, "eps_clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
}
PROMPTS, MASKS = [2, 5, 3, 4], [[1, 1, 0, 1, 1, 1], [1, 0, 0, 1], [1, 1, 1], [1, 1, 1, 0, 1, 1, 1]]
ADVANTAGES = [0.9, -1.1, -0.4, 1.3]


def _batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    lengths = [len(mask) for mask in MASKS]
    tokens = [
        torch.randint(1, helpers.VOCAB, (p + n,), generator=generator).tolist()
        for p, n in zip(PROMPTS, lengths, strict=True)
    ]
    drift = [(0.3 * torch.randn(n, generator=generator)).tolist() for n in lengths]
    return {"tokens": tokens, "lengths": lengths, "drift": drift}


def _log_probs(folder: Path, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Response log-probs at temperature 0.8, row by row, straight from Hugging Face."""
    from transformers import AutoModelForCausalLM

    hf, rows = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for tokens, length in zip(batch["tokens"], batch["lengths"], strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            scores = (hf(ids[None]).logits[0] / 0.8).log_softmax(-1)
        rows.append(scores[:-1].gather(1, ids[1:, None])[-length:, 0])
    return rows


def _pad(rows: list[Any], left: bool = False) -> torch.Tensor:
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_side=side)


def _theirs(folder: Path, batch: dict[str, Any], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """TRL's loss and gradients; parameters under their Hugging Face names."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    defaults: dict[str, Any] = {"beta": 0.1, "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "grpo"}
    defaults["use_bias_correction_kl"] = False
    args = GRPOConfig(
        str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=4, num_generations=4,
        temperature=0.8, gradient_checkpointing=False, **{**defaults, **config},
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
    )
    trainer.current_gradient_accumulation_steps = 1
    prompts = [row[:p] for row, p in zip(batch["tokens"], PROMPTS, strict=True)]
    answers = [row[p:] for row, p in zip(batch["tokens"], PROMPTS, strict=True)]
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": _pad(prompts, left=True),
            "prompt_mask": _pad([[1] * len(row) for row in prompts], left=True),
            "completion_ids": _pad(answers),
            "completion_mask": _pad([[1] * len(row) for row in answers]),
            "tool_mask": _pad(MASKS),
            "advantages": torch.tensor(ADVANTAGES),
            "old_per_token_logps": _pad(batch["old"]),
            "ref_per_token_logps": _pad(batch["reference"]),
            "num_items_in_batch": torch.tensor(float(sum(map(sum, MASKS)))),
        },
    )
    trainer.model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _ours(folder: Path, batch: dict[str, Any], flags: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same through `FSDPTrainer`: two micro-batches of two rows, reference log-probs by its own reference model."""
    from slime.backends.common.batches import count_trained_tokens, plan_steps, prepare_rollout_data
    from slime.backends.fsdp_utils.model import reshard
    from slime.backends.fsdp_utils.trainer import FSDPTrainer

    flags = {"kl_loss_type": "k3", "entropy_coef": 0.0, "use_rollout_logprobs": True, **flags}
    args = helpers.make_args(folder / "model", ref_load=str(folder / "ref"), load=str(folder / "model"), **flags)
    trainer = FSDPTrainer()
    trainer.init(args, with_ref=args.use_kl_loss)
    data = {
        "tokens": batch["tokens"], "response_lengths": batch["lengths"], "loss_masks": MASKS, "rewards": ADVANTAGES,
        "rollout_ids": [0, 1, 2, 3], "rollout_log_probs": [row.tolist() for row in batch["old"]],
        "rollout_mask_sums": [sum(mask) for mask in MASKS],
    }  # fmt: skip
    prepared = prepare_rollout_data(helpers.split(args, data, 0, 1), trainer.context.device)
    trainer._prepare_targets(0, prepared, 1, {})
    (plan,) = plan_steps(prepared)
    tokens = count_trained_tokens(prepared, plan)[1]
    sums = trainer._accumulate(prepared, plan, tokens)
    reshard(trainer.model)
    grads = {name: p.grad.full_tensor() for name, p in trainer.model.hf.named_parameters() if p.grad is not None}
    return {"loss": sums["loss"] / (tokens if args.calculate_per_token_loss else 4), **grads}


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b").save_pretrained(folder)


def _run(folder: Path) -> None:
    from slime.backends.fsdp_utils.model import PolicyModel  # noqa: F401  (the parts under test are imported first)

    batch = _batch()
    masks = [torch.tensor(mask) for mask in MASKS]
    own = _log_probs(folder / "model", batch)
    batch["old"] = [(row + torch.tensor(d)) * m for row, d, m in zip(own, batch["drift"], masks, strict=True)]
    batch["reference"] = _log_probs(folder / "ref", batch)
    results = {}
    for name, (flags, config) in VARIANTS.items():
        results[name] = {"ours": _ours(folder, batch, flags), "theirs": _theirs(folder, batch, config)}
    torch.save(results, folder / "results.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("trl")
    helpers.make_model(folder / "model")
    reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in reference.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    reference.save_pretrained(folder / "ref")
    _tokenizer(folder / "tokenizer")
    helpers.run_workers(_run, 1, folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_loss_and_gradients_are_the_same(results: dict[str, Any], name: str) -> None:
    ours, theirs = results[name]["ours"], results[name]["theirs"]
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert abs(float(theirs["loss"])) > 1e-4
    for key, wanted in theirs.items():
        assert float((ours[key] - wanted).abs().max()) < 1e-5, key
    assert max(float(value.abs().max()) for key, value in theirs.items() if key != "loss") > 1e-3
