"""The network of one pipeline stage: megatron-core's GPT model, whose last stage gives hidden states instead of logits.

Logits of a whole pack are the largest tensor of a step; log-probs are computed from hidden states at trained positions (`log_probs`).
TransformerEngine's layers are used where it can be imported on a GPU, else those of `local_layers`.
Left out: weights (they are loaded afterwards; nothing is initialised), data parallelism.
"""

from __future__ import annotations

import importlib.util
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import nn

from slime.backends.megatron_utils.transformer_config import (
    core_transformer_config,
    padded_vocab_size,
    read_shape,
    read_text_config,
    rotary_of,
)
from slime.utils.misc import load_function

ModelProvider = Callable[..., nn.Module]


class PolicyOutput:
    """What a stage of the policy is besides a GPT model: its last stage returns hidden states after the final norm, [t, 1, D]."""

    real_vocab_size: int
    """Ids of the tokenizer; the embedding's further rows are padding."""

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    def head_weight(self: Any) -> torch.Tensor:
        """This rank's rows of the output layer (padding included), on the last stage."""
        if not self.share_embeddings_and_output_weights:
            return self.output_layer.weight
        return self.shared_embedding_or_output_weight()


class ValueHead(nn.Linear):
    """hidden -> one number, computed (and its gradient) on every tensor-parallel rank alike."""

    def __init__(self, hidden_size: int, config: Any) -> None:
        super().__init__(hidden_size, 1, dtype=config.params_dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def uses_transformer_engine() -> bool:
    """Whether TransformerEngine's layers are there and can run."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def _decoder_spec(config: Any, fused: bool) -> Any:
    if not fused:
        from slime.backends.megatron_utils.local_layers import local_decoder_spec

        return local_decoder_spec(config)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True)


def get_model_provider_func(args: Namespace, role: str = "actor") -> ModelProvider:
    """`fn(pre_process, post_process) -> model` for one stage; the user's with `--custom-model-provider-path`."""
    if args.custom_model_provider_path:
        return load_function(args.custom_model_provider_path)

    def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
        fused = uses_transformer_engine()
        config, hf = core_transformer_config(args, fused), read_text_config(args.hf_checkpoint)
        shape, rotary = read_shape(args.hf_checkpoint), rotary_of(hf, args.hf_checkpoint)
        return GPTModel(
            config,
            _decoder_spec(config, fused),
            vocab_size=padded_vocab_size(args, shape.vocab_size),
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not shape.untied and role != "critic",
            position_embedding_type="rope",
            rotary_base=rotary.base,
            rope_scaling=rotary.scaling is not None,
            rope_scaling_factor=rotary.scaling or 1.0,
            vp_stage=vp_stage,
        )

    return provide


def build_stage(args: Namespace, role: str = "actor") -> nn.Module:
    """This rank's stage, without weights, on its device, with the parameters frozen that the flags name."""
    provide = get_model_provider_func(args, role)
    model = provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )
    make_stage(model, args, role)
    freeze_model_params(model, args)
    return model.cuda()


def make_stage(model: Any, args: Namespace, role: str) -> None:
    """Turn a GPT model, in place, into a stage of the policy, or of a critic with a head of one output."""
    kind = type(model)
    model.__class__ = type(f"{kind.__name__}Stage", (PolicyOutput, kind), {})
    model.real_vocab_size = read_shape(args.hf_checkpoint).vocab_size
    if role == "critic":
        model.share_embeddings_and_output_weights = False
        if model.post_process:
            model.output_layer = ValueHead(model.config.hidden_size, model.config)


def freeze_model_params(model: Any, args: Namespace) -> None:
    """Keep gradients of what `--only-train-params-name-list` names, or of all but `--freeze-params-name-list`."""
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    for name, parameter in model.named_parameters():
        if only:
            parameter.requires_grad_(any(re.search(pattern, name) for pattern in only))
        elif frozen and any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)
    if getattr(model, "pre_process", False) and not any(p.requires_grad for p in model.embedding.parameters()):
        # A recomputed layer whose inputs need no gradient would give its parameters none either.
        model.embedding.register_forward_hook(
            lambda *call: call[-1].requires_grad_() if torch.is_grad_enabled() else None
        )
