"""Sizes of the model as attributes of `args`, under the names that `slime.utils.flops_utils` reads.

Input: `config.json` of `--hf-checkpoint`, of any family. Only `--balance-by-flops` needs them.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from slime.utils.model_shape import SIZE_KEYS, sizes_of_config


def set_model_shape(args: Namespace) -> None:
    """Set the attributes, None for what a model does not have. Raises ValueError naming a size that the configuration lacks."""
    path = Path(args.hf_checkpoint) / "config.json"
    sizes = sizes_of_config(
        json.loads(path.read_text()), f"--balance-by-flops (--balance-data needs no sizes): {path}"
    )
    for name in SIZE_KEYS:
        setattr(args, name, sizes.get(name))
