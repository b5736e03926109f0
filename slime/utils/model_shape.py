"""The families and sizes of decoder-only transformers, and how many parameters they make: the one table that all parts read.

Input: a Hugging Face `config.json`, or the `MODEL_ARGS` of a script in `scripts/models`. A model whose folder is not there is
looked up among those scripts by its name.
Invariants: counts are exact for the Qwen2, Qwen2.5, Qwen3 (dense and mixture of experts) and Llama families; sizes that no such
model can have are a ValueError naming the file and the sizes.
Left out: multi-latent attention, shared experts, layers that differ from each other, media encoders, the rotary embedding.
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


@dataclass(frozen=True)
class Family:
    """What models of a `model_type` have in common."""

    architecture: str
    """Class of the model."""
    qkv_bias: bool
    """Queries, keys and values have a bias."""
    qk_layernorm: bool
    """Heads of queries and keys have a norm of their own."""


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_layernorm=False),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_layernorm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qkv_bias=False, qk_layernorm=True),
    "llama": Family("LlamaForCausalLM", qkv_bias=False, qk_layernorm=False),
}
# Size -> keys of a Hugging Face configuration, of which the first with a value counts.
SIZE_KEYS = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "num_query_groups": ("num_key_value_heads", "num_attention_heads"),
    "kv_channels": ("head_dim",),
    "num_experts": ("num_experts", "num_local_experts"),  # transformers 5 writes the second name
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
}
_REQUIRED = list(SIZE_KEYS)[:5]
_OF_EXPERTS = list(SIZE_KEYS)[-3:]
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


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a Hugging Face configuration that describes the language model."""
    return config.get("text_config") or config


def sizes_of_config(config: Mapping[str, Any], where: str, required: Sequence[str] = _REQUIRED) -> dict[str, int]:
    """The `SIZE_KEYS` that a Hugging Face configuration of any family states. Raises ValueError naming `where` and what it lacks."""
    config = text_config(config)
    values = {name: [config[key] for key in keys if config.get(key)] for name, keys in SIZE_KEYS.items()}
    missing = [SIZE_KEYS[name][0] for name in required if not values[name]]
    if missing:
        raise ValueError(f"{where} does not say {', '.join(missing)}")
    sizes = {name: int(found[0]) for name, found in values.items() if found}
    return {"kv_channels": sizes["hidden_size"] // sizes["num_attention_heads"], **sizes}


def shape_of_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """From a Hugging Face configuration. Raises ValueError naming `where` for a family or size that is not known."""
    config = text_config(config)
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"{where}: model_type {name!r} is none of {', '.join(FAMILIES)}")
    sparse, family = name == "qwen3_moe", FAMILIES[name]
    sizes = sizes_of_config(config, where, _REQUIRED + _OF_EXPERTS * sparse)
    kept = {name: size for name, size in sizes.items() if sparse or name not in _OF_EXPERTS}
    untied = not config.get("tie_word_embeddings", False)
    return _checked(where, **kept, qkv_bias=family.qkv_bias, qk_layernorm=family.qk_layernorm, untied=untied)


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
    family = "qwen3_moe" if shape.num_experts else family
    return {
        **{keys[0]: size for name, keys in SIZE_KEYS.items() if (size := getattr(shape, name))},
        "tie_word_embeddings": not shape.untied,
        "rms_norm_eps": float(flags["norm-epsilon"][0]),
        "rope_theta": float(flags["rotary-base"][0]),
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
    }


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
