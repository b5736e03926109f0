"""The sizes of a decoder-only transformer, and how many parameters they make.

Input: a Hugging Face `config.json`, or the `MODEL_ARGS` of a script in `scripts/models`. A model whose folder is not there is
looked up among those scripts by its name.
Invariants: counts are exact for the Qwen2, Qwen2.5, Qwen3 (dense and mixture of experts) and Llama families; sizes that no such
model can have are a ValueError naming the file and the sizes.
Left out: multi-latent attention, shared experts, layers that differ from each other, media encoders.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Key of a configuration that stands in for a model which is not there yet: a launcher's dry run writes it.
STANDS_FOR = "stand_in_for"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "models"

# Flag of a model script -> field; a switch has the value True.
_FLAGS = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads",
    "num-query-groups": "num_query_groups",
    "kv-channels": "kv_channels",
    "vocab-size": "vocab_size",
    "add-qkv-bias": "qkv_bias",
    "qk-layernorm": "qk_layernorm",
    "untie-embeddings-and-output-weights": "untied",
    "num-experts": "num_experts",
    "moe-router-topk": "moe_router_topk",
    "moe-ffn-hidden-size": "moe_ffn_hidden_size",
}
# Further flags of the scripts, which change no size.
_OTHER_FLAGS = {
    "group-query-attention",
    "disable-bias-linear",
    "swiglu",
    "normalization",
    "norm-epsilon",
    "use-rotary-position-embeddings",
    "rotary-base",
    "use-rope-scaling",
    "rope-scaling-factor",
}
# By `model_type`: whether queries, keys and values have a bias, whether heads have a norm of their own, class of the model.
_FAMILIES = {
    "qwen2": (True, False, "Qwen2ForCausalLM"),
    "qwen3": (False, True, "Qwen3ForCausalLM"),
    "qwen3_moe": (False, True, "Qwen3MoeForCausalLM"),
    "llama": (False, False, "LlamaForCausalLM"),
}
# Parts of a model's name that do not change its sizes.
_VARIANTS = re.compile(r"^meta-|-?(instruct|base|chat|hf|coder|math|thinking|\d{4})(?=-|$)")


@dataclass(frozen=True)
class ModelShape:
    """Sizes under the names of Megatron-core; the feed-forward part is gated (three matrices)."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    kv_channels: int
    """Width of a head."""
    qkv_bias: bool = False
    qk_layernorm: bool = False
    untied: bool = False
    """The output layer has a matrix of its own."""
    num_experts: int = 0
    """0: every layer has one feed-forward part."""
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_query_groups} key/value heads evenly"
            )
        if self.num_experts and not 0 < self.moe_router_topk <= self.num_experts:
            raise ValueError(f"a token cannot use {self.moe_router_topk} of {self.num_experts} experts")

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, of a token in one layer."""
        return self.num_query_groups * self.kv_channels

    @property
    def attention_params(self) -> int:
        """Projections, their bias and the norms of heads, in one layer."""
        matrices = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        bias = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        return matrices + bias + (2 * self.kv_channels if self.qk_layernorm else 0)

    @property
    def expert_params(self) -> int:
        """All experts of one layer."""
        return self.num_experts * 3 * self.hidden_size * self.moe_ffn_hidden_size

    @property
    def dense_layer_params(self) -> int:
        """One layer without its experts: attention, norms, and the feed-forward part or the router."""
        feed_forward = self.num_experts if self.num_experts else 3 * self.ffn_hidden_size
        return self.attention_params + self.hidden_size * (feed_forward + 2)

    @property
    def embedding_params(self) -> int:
        """The embedding, which is also the output layer unless that is untied."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        layers = self.num_layers * (self.dense_layer_params + self.expert_params)
        return layers + self.hidden_size + self.embedding_params * (2 if self.untied else 1)


def shape_of_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """From a Hugging Face configuration. Raises ValueError naming `where` for a family or size that is not known."""
    config = config.get("text_config") or config
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"{where}: model_type {family!r} is none of {', '.join(_FAMILIES)}")
    bias, head_norm, _ = _FAMILIES[family]
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        sizes: dict[str, Any] = {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": hidden,
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "vocab_size": config["vocab_size"],
            "kv_channels": config.get("head_dim") or hidden // heads,
        }
        if family == "qwen3_moe":
            # transformers 5 writes the second name
            sizes["num_experts"] = config.get("num_experts") or config["num_local_experts"]
            sizes["moe_router_topk"] = config["num_experts_per_tok"]
            sizes["moe_ffn_hidden_size"] = config["moe_intermediate_size"]
    except KeyError as error:
        raise ValueError(f"{where}: has no {error.args[0]}") from error
    untied = not config.get("tie_word_embeddings", False)
    return _checked(where, **sizes, qkv_bias=bias, qk_layernorm=head_norm, untied=untied)


def shape_of_model_args(argv: Sequence[str], where: str) -> ModelShape:
    """From the flags of a model script. Raises ValueError naming `where` for a flag that is not known or missing."""
    values: dict[str, Any] = {}
    for flag, words in _grouped(argv, where):
        if flag in _FLAGS:
            values[_FLAGS[flag]] = int(words[0]) if words else True
        elif flag not in _OTHER_FLAGS:
            raise ValueError(f"{where}: --{flag} is not a flag of a model script")
    try:
        values.setdefault("num_query_groups", values["num_attention_heads"])
        values.setdefault("kv_channels", values["hidden_size"] // values["num_attention_heads"])
        return _checked(where, **values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: a size is missing ({error})") from error


def _grouped(argv: Sequence[str], where: str) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            groups.append((word.removeprefix("--"), []))
        elif not groups or groups[-1][1]:
            raise ValueError(f"{where}: {word!r} belongs to no flag")
        else:
            groups[-1][1].append(word)
    return groups


def _checked(where: str, **sizes: Any) -> ModelShape:
    try:
        return ModelShape(**sizes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def config_of_model_args(argv: Sequence[str], where: str) -> dict[str, Any]:
    """The Hugging Face configuration of a model script's flags: what stands in for a model that is not there yet."""
    shape, flags = shape_of_model_args(argv, where), dict(_grouped(argv, where))
    family = "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_layernorm else "llama"
    config: dict[str, Any] = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": not shape.untied,
        "rms_norm_eps": float(flags["norm-epsilon"][0]),
        "rope_theta": float(flags["rotary-base"][0]),
    }
    if shape.num_experts:
        family = "qwen3_moe"
        config["num_experts"], config["num_experts_per_tok"] = shape.num_experts, shape.moe_router_topk
        config["moe_intermediate_size"] = shape.moe_ffn_hidden_size
    return {**config, "model_type": family, "architectures": [_FAMILIES[family][2]]}


def read_model_args(script: Path) -> list[str]:
    """The words of `MODEL_ARGS` as bash makes them of the script."""
    command = ["bash", "-c", 'source "$1" && printf "%s\\n" "${MODEL_ARGS[@]}"', "bash", str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def find_script(model: str | Path) -> Path | None:
    """The script of a model by the name of its folder: `models/Qwen2.5-Coder-7B-Instruct` -> `qwen2.5-7B.sh`."""
    name = Path(model).name.lower().replace("llama-3", "llama3")
    # A date or a variant may follow another: Qwen3-30B-A3B-Instruct-2507.
    name = re.sub(r"-+", "-", _VARIANTS.sub("", name)).strip("-")
    return next((script for script in sorted(SCRIPTS.glob("*.sh")) if script.stem.lower() == name), None)


def find_shape(model: str | Path) -> tuple[ModelShape, str]:
    """The sizes of the model in a folder, and where they come from: its `config.json`, or a script of its name.

    Raises FileNotFoundError when there is neither, ValueError when the configuration cannot be used.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        if STANDS_FOR not in config:
            return shape_of_config(config, str(file)), str(file)
        model = config[STANDS_FOR]
    script = find_script(model)
    if script is None:
        known = ", ".join(sorted(path.stem for path in SCRIPTS.glob("*.sh")))
        raise FileNotFoundError(f"{model}: no such model folder, and no known name ({known})")
    return shape_of_model_args(read_model_args(script), script.name), f"scripts/models/{script.name}"
