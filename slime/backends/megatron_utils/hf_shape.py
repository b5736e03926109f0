"""What the converters must know of a Hugging Face model: its family and sizes, from `config.json`.

Families: Qwen2 and Qwen2.5, Qwen3 dense, Qwen3-MoE, Llama. Invariant: a model that the name tables do not describe completely is
refused here, by name, before a weight is read. Left out: how Megatron is configured from it (see the model provider).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.common.hf_weights import read_config

# `architectures` of a configuration -> (the attention has biases of q, k and v, it normalises q and k)
FAMILIES: dict[str, tuple[bool, bool]] = {
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
    "Qwen3MoeForCausalLM": (False, True),
    "LlamaForCausalLM": (False, False),
}
# What --model-name may say -> architecture
FAMILY_OF_NAME = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2.5": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}


@dataclass(frozen=True)
class HfShape:
    """Sizes of a model. `num_experts` is 0 for a dense one; `vocab_size` is the number of rows of its embedding."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    num_experts: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    return config.get("text_config") or config


def shape_of_config(config: Mapping[str, Any], where: str) -> HfShape:
    """Sizes from the content of `config.json`. Raises ValueError naming `where` for what is not supported."""
    architecture = (config.get("architectures") or ["no architecture"])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"{where}: {architecture} has no Megatron converter here; there are {', '.join(FAMILIES)}")
    text = text_config(config)
    if text.get("attention_bias") or text.get("mlp_bias"):
        raise ValueError(f"{where}: attention_bias or mlp_bias is set; there is no converter for these biases")
    if text.get("decoder_sparse_step", 1) != 1 or text.get("mlp_only_layers"):
        raise ValueError(f"{where}: dense layers between layers of experts are not supported (mlp_only_layers)")
    qkv_bias, qk_norm = FAMILIES[architecture]
    heads = int(text["num_attention_heads"])
    return HfShape(
        num_layers=int(text["num_hidden_layers"]),
        hidden_size=int(text["hidden_size"]),
        num_heads=heads,
        num_groups=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
        vocab_size=int(text["vocab_size"]),
        # transformers 5 writes the second name
        num_experts=int(text.get("num_experts") or text.get("num_local_experts") or 0),
        tied=bool(text.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def hf_shape(folder: str | Path) -> HfShape:
    """Sizes of the model in a directory. Raises FileNotFoundError or ValueError, see `shape_of_config`."""
    return shape_of_config(read_config(folder), str(folder))


def shape_of_megatron_args(args: Any, model_name: str, vocab_size: int) -> HfShape:
    """Sizes from the arguments that a Megatron checkpoint holds. Raises ValueError when they do not say them."""
    required = ("num_layers", "hidden_size", "num_attention_heads")
    missing = [name for name in required if not getattr(args, name, None)]
    if missing:
        raise ValueError(f"the checkpoint does not say {', '.join(missing)}; give --origin-hf-dir")
    qkv_bias, qk_norm = FAMILIES[FAMILY_OF_NAME[model_name]]
    heads = args.num_attention_heads
    return HfShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_heads=heads,
        num_groups=getattr(args, "num_query_groups", None) or heads,
        head_dim=getattr(args, "kv_channels", None) or args.hidden_size // heads,
        vocab_size=getattr(args, "vocab_size", None) or vocab_size,
        num_experts=getattr(args, "num_experts", None) or 0,
        tied=not getattr(args, "untie_embeddings_and_output_weights", True),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def megatron_args_of_shape(shape: HfShape) -> Namespace:
    """The inverse: what a checkpoint written from a Hugging Face model says about itself."""
    return Namespace(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_dim,
        vocab_size=shape.vocab_size,
        num_experts=shape.num_experts or None,
        untie_embeddings_and_output_weights=not shape.tied,
    )
