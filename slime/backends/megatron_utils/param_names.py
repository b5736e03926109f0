"""Names: which tensors of a Hugging Face model make up which parameter of a Megatron model, and how a parameter is sharded.

A parameter has one canonical name here: that of Megatron's local layers, with global numbers of layers and experts, such as
`decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight`. `canonical_name` brings the names of TransformerEngine's fused
layers to it, and takes off wrappers. Pure; no tensor in here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slime.utils.model_shape import ModelShape

EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
HF_OUTPUT = "lm_head.weight"

_TOP = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: HF_OUTPUT}
# Part of a layer -> its tensors in a Hugging Face layer. Three tensors are q, k and v; two are gate and up.
_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
}
_EXPERT: dict[str, tuple[str, ...]] = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
# Names of TransformerEngine's layers, which hold the norm before them, and of its grouped experts.
_FUSED = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)$"), r"mlp.experts.local_experts.\2.\1"),
)
_LAYER_NAME = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT_NAME = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Sharding:
    """`dim`: the dimension cut among tensor-parallel ranks, None when every rank has it all. `gated`: two halves, each cut.

    `expert`: cut among the expert-tensor-parallel ranks instead.
    """

    dim: int | None = None
    gated: bool = False
    expert: bool = False


def strip_mcore_wrappers(name: str) -> str:
    """Without the `module.` of data parallelism and of mixed precision."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def canonical_name(name: str) -> str:
    """The canonical name of a parameter; numbers of layers and experts stay as they are."""
    name = strip_mcore_wrappers(name)
    for pattern, replacement in _FUSED:
        name = pattern.sub(replacement, name)
    return name


def with_global_numbers(name: str, layer_numbers: list[int], first_expert: int) -> str:
    """The name in the whole model of a stage's parameter: local layer i is number `layer_numbers[i]`, counted from 0."""

    def layer(found: re.Match[str]) -> str:
        return f"decoder.layers.{layer_numbers[int(found[1])]}.{found[2]}"

    name = _LAYER_NAME.sub(layer, name)
    return re.sub(r"(local_experts\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + first_expert}", name)


def with_other_expert(name: str, distance: int) -> str:
    """The name of the same parameter of the expert that is `distance` further."""
    return re.sub(r"(local_experts\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + distance}", name)


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to one expert."""
    return ".local_experts." in name


def hf_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors behind a canonical name: one, gate and up, or q, k and v. Raises KeyError without any."""
    if name in _TOP:
        return (_TOP[name],)
    layer = _LAYER_NAME.match(name)
    if layer is None:
        raise KeyError(f"parameter {name} has no counterpart in a Hugging Face model of these families")
    prefix, part = f"model.layers.{layer[1]}.", layer[2]
    expert = _EXPERT_NAME.match(part)
    table, part = (_EXPERT, expert[2]) if expert else (_LAYER, part)
    if part not in table:
        raise KeyError(f"parameter {name} has no counterpart in a Hugging Face model of these families")
    inside = f"mlp.experts.{expert[1]}." if expert else ""
    return tuple(prefix + inside + tensor for tensor in table[part])


def sharding_of(name: str) -> Sharding:
    """How a parameter is cut, by its canonical name."""
    expert = is_expert(name)
    if name in (EMBEDDING, OUTPUT) or ".linear_qkv." in name:
        return Sharding(0)
    if ".linear_fc1." in name:
        return Sharding(0, gated=True, expert=expert)
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):
        return Sharding(1, expert=expert)
    return Sharding(expert=expert)


def all_names(shape: ModelShape) -> Iterator[str]:
    """Every canonical name of a model, in the order in which it computes; tied embeddings have no output layer."""
    yield EMBEDDING
    for number in range(shape.num_layers):
        for part in _layer_parts(shape):
            yield f"decoder.layers.{number}.{part}"
    yield FINAL_NORM
    if shape.untied:
        yield OUTPUT


def _layer_parts(shape: ModelShape) -> Iterator[str]:
    skipped = set()
    if not shape.qkv_bias:
        skipped.add("self_attention.linear_qkv.bias")
    if not shape.qk_layernorm:
        skipped |= {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    skipped |= {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"} if shape.num_experts else {"mlp.router.weight"}
    yield from (part for part in _LAYER if part not in skipped)
    for number in range(shape.num_experts):
        for part in _EXPERT:
            yield f"mlp.experts.local_experts.{number}.{part}"
