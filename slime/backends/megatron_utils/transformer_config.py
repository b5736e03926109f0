"""Which models Megatron can compute and convert, and megatron-core's configuration of them.

Inputs: `config.json` of a model directory, the command line. Families and sizes: `slime.utils.model_shape`. Invariant: a setting of
the Hugging Face configuration that changes the function and is not carried over is refused by name, before a weight is read.
Left out: multi-latent attention, shared experts, sliding windows, and rotary scaling other than Llama 3's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from slime.backends.common.hf_weights import read_config
from slime.backends.common.precision import train_dtype
from slime.utils.model_shape import FAMILIES, ModelShape, shape_of_config, text_config

_MUST_BE_OFF = ("attention_bias", "mlp_bias", "use_sliding_window", "mlp_only_layers")


@dataclass(frozen=True)
class Rotary:
    """`scaling` is the factor of Llama 3's frequency scaling, None without one."""

    base: float
    scaling: float | None


def read_text_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model directory, for multimodal models its `text_config`.

    Raises FileNotFoundError without one, ValueError for a model that Megatron cannot compute.
    """
    config = dict(text_config(read_config(folder)))
    if config.get("model_type") not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type {config.get('model_type')!r} is not known to --train-backend megatron and its "
            f"converters; there are {', '.join(FAMILIES)}, or use --train-backend fsdp"
        )
    for name in _MUST_BE_OFF:
        if config.get(name):
            raise ValueError(f"{folder}: {name} is set; --train-backend megatron has no such layer")
    if config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"{folder}: decoder_sparse_step is not 1; dense layers between layers of experts are not known"
        )
    return config


def read_shape(folder: str | Path) -> ModelShape:
    """Sizes of the model in a directory. Raises what `read_text_config` raises."""
    return shape_of_config(read_text_config(folder), str(folder))


def rotary_of(config: Mapping[str, Any], where: str) -> Rotary:
    """Base and scaling of the rotary embedding. Raises ValueError for another scaling than Llama 3's."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(config.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rotary(base, None)
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(scaling.get(name) != value for name, value in fixed.items()):
        raise ValueError(f"{where}: rotary scaling {scaling} is not known to --train-backend megatron, only Llama 3's")
    return Rotary(base, float(scaling["factor"]))


def padded_vocab_size(args: Namespace, vocab_size: int) -> int:
    """Rows of the embedding: every tensor-parallel rank has the same number, a multiple of `--make-vocab-size-divisible-by`."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def core_transformer_config(args: Namespace, fused: bool) -> Any:
    """The `TransformerConfig`; `fused`: TransformerEngine's layers are used."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config, dtype = read_text_config(args.hf_checkpoint), train_dtype(args)
    shape = shape_of_config(config, args.hf_checkpoint)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        layernorm_epsilon=config["rms_norm_eps"],
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        normalization=args.normalization,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss arrives scaled (see `steps`); gradients are summed over ranks and left alone.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=torch.cuda.is_available(),
        **_parallel_settings(args),
        **_recompute_settings(args),
        **_expert_settings(shape, config.get("norm_topk_prob", False), fused),
    )


def _parallel_settings(args: Namespace) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "context_parallel_size": args.context_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
    }


def _recompute_settings(args: Namespace) -> dict[str, Any]:
    if args.gradient_checkpointing:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings = {
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
    }
    return settings | ({"recompute_modules": args.recompute_modules} if args.recompute_modules else {})


def _expert_settings(shape: ModelShape, normalised: bool, fused: bool) -> dict[str, Any]:
    if not shape.num_experts:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.moe_router_topk,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        # Chosen after the softmax, unless their probabilities are normalised, which is a softmax over the chosen.
        "moe_router_pre_softmax": not normalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": fused,
    }
