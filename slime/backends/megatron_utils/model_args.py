"""Model arguments as Megatron names them (`MODEL_ARGS` of scripts/models): registered, and compared with the model they are given for.

The sizes always come from `config.json`; the arguments are there so that existing scripts go on working, and so that a script for
another model is an error instead of a surprise. Input: parsed arguments and the content of `config.json`.
Left out: parallel sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from slime.backends.megatron_utils.hf_shape import HfShape, text_config

# Argument -> (type, keys of config.json, the first that is there counts)
_SIZES: dict[str, tuple[type, tuple[str, ...]]] = {
    "num_layers": (int, ("num_hidden_layers",)),
    "hidden_size": (int, ("hidden_size",)),
    "ffn_hidden_size": (int, ("intermediate_size",)),
    "num_attention_heads": (int, ("num_attention_heads",)),
    "num_query_groups": (int, ("num_key_value_heads",)),
    "kv_channels": (int, ("head_dim",)),
    "vocab_size": (int, ("vocab_size",)),
    "num_experts": (int, ("num_experts", "num_local_experts")),
    "moe_router_topk": (int, ("num_experts_per_tok",)),
    "moe_ffn_hidden_size": (int, ("moe_intermediate_size",)),
    "norm_epsilon": (float, ("rms_norm_eps",)),
    "rotary_base": (float, ("rope_theta",)),
}
# Switches that say what every model of these families is.
_ALWAYS = ("group_query_attention", "disable_bias_linear", "swiglu", "use_rotary_position_embeddings")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Register those that nobody has registered yet; a size that is not given is None."""
    group = parser.add_argument_group("model", "sizes as Megatron names them; compared with the model's config.json")

    def add(name: str, **settings: Any) -> None:
        flag = "--" + name.replace("_", "-")
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **settings)

    for name, (kind, keys) in _SIZES.items():
        add(name, type=kind, help=f"must equal {keys[0]} of the model")
    for name in _ALWAYS:
        add(name, action="store_true", help="true of every model of these families")
    add("add_qkv_bias", action="store_true", default=None, help="must be true of the model")
    add("qk_layernorm", action="store_true", default=None, help="must be true of the model")
    add("untie_embeddings_and_output_weights", action="store_true", default=None, help="must be true of the model")
    add("normalization", choices=["RMSNorm"], help="true of every model of these families")
    add("use_rope_scaling", action="store_true", default=None, help="must be true of the model")
    add("rope_scaling_factor", type=float, help="must equal the factor of the model's rotary scaling")


def check_model_args(args: argparse.Namespace, config: Mapping[str, Any], shape: HfShape, where: str) -> None:
    """Raise ValueError that lists every argument that was given and is not true of the model."""
    text, wrong = text_config(config), []
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    known = {**rope, **text}
    for name, (_, keys) in _SIZES.items():
        given, actual = getattr(args, name, None), next(
            (known[key] for key in keys if known.get(key) is not None), None
        )
        if given is not None and actual is not None and given != actual:
            wrong.append((name, given, actual))
    for name, actual in _properties(shape, rope).items():
        given = getattr(args, name, None)
        if given is not None and given != actual:
            wrong.append((name, given, actual))
    if wrong:
        listed = "; ".join(
            f"--{name.replace('_', '-')} {given}, the model has {actual}" for name, given, actual in wrong
        )
        raise ValueError(f"{where}: model arguments of another model: {listed}")


def _properties(shape: HfShape, rope: Mapping[str, Any]) -> dict[str, Any]:
    scaled = rope.get("rope_type", rope.get("type", "default")) == "llama3"
    return {
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "untie_embeddings_and_output_weights": not shape.tied,
        "use_rope_scaling": scaled,
        "rope_scaling_factor": rope.get("factor") if scaled else None,
    }
