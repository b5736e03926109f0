"""Sizes of the model as attributes of `args`, under the names that `slime.utils.flops_utils` reads.

Input: `config.json` of `--hf-checkpoint` (its `text_config` for multimodal models). Only `--balance-by-flops` needs them.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

# Attribute -> key of the Hugging Face configuration.
_REQUIRED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
}


def set_model_shape(args: Namespace) -> None:
    """Set the attributes. Raises ValueError naming a size that the configuration does not have."""
    path = Path(args.hf_checkpoint) / "config.json"
    config = json.loads(path.read_text())
    config = config.get("text_config") or config
    missing = sorted(key for key in _REQUIRED.values() if not config.get(key))
    if missing:
        raise ValueError(f"--balance-by-flops: {path} does not say {', '.join(missing)}; use --balance-data")
    for attribute, key in (_REQUIRED | _OPTIONAL).items():
        setattr(args, attribute, config.get(key))
    # transformers 5 writes the second name
    args.num_experts = config.get("num_experts") or config.get("num_local_experts")
