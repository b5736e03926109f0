"""Shared by the Megatron tests: tiny models of each family, flags of the back end, and one function that runs either trainer."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers_fsdp
import torch

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
_SIZES: dict[str, Any] = dict(
    vocab_size=helpers_fsdp.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
)  # fmt: skip


def make_model(folder: Path, family: str) -> Path:
    """Save a random model: Qwen2 with tied embeddings, Qwen3, or Qwen3 with four experts of which a token takes two."""
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=False))
    else:
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **experts, head_dim=16, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms that do something
            (
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
                if "norm" in name
                else torch.nn.init.normal_(parameter, std=0.1)
            )
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


def make_args(model_dir: Path | str, **overrides: Any) -> Namespace:
    """The flags that the back end reads, at their defaults."""
    args = dict(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
        expert_model_parallel_size=1, expert_tensor_parallel_size=None, sequence_parallel=False,
        decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None, make_vocab_size_divisible_by=128,
        data_pad_size_multiplier=128, recompute_granularity=None, recompute_method=None, recompute_num_layers=None,
        recompute_modules=None, normalization="RMSNorm", custom_model_provider_path=None, custom_megatron_init_path=None,
        custom_megatron_before_log_prob_hook_path=None, custom_megatron_before_train_step_hook_path=None,
    )  # fmt: skip
    return helpers_fsdp.make_args(model_dir, **{**args, **overrides})


def share_of(trainer: Any, data: dict[str, list[Any]]) -> dict[str, Any]:
    """This rank's rows, cut by the real schedule over the data-parallel ranks."""
    import torch.distributed as dist

    group = trainer.data_group
    return helpers_fsdp.split(trainer.args, data, dist.get_rank(group), dist.get_world_size(group))


def run_trainer(trainer: Any, args: Namespace, rollouts: range, with_ref: bool = True) -> dict[str, Any]:
    """Train on `rollouts`. Returns the metrics of every optimiser step and the final weights as one rank has them."""
    steps: list[dict[str, float]] = []
    report = trainer._report
    trainer._report = lambda rollout_id, metrics: steps.append(dict(metrics)) or report(rollout_id, metrics)
    start = trainer.init(args, with_ref=with_ref)
    for number in rollouts:
        trainer.train(number, share_of(trainer, helpers_fsdp.make_rollout(number, rollouts=12)))
    trainer._report = report
    return {"start": start, "steps": steps, "weights": weights_of(trainer)}


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole weights by the names in a Hugging Face file."""
    return {name: value.clone() for name, value in trainer.weight_source().iter_full_tensors()}


def forget_layout() -> None:
    """Let the next trainer of this process divide the ranks in another way."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
