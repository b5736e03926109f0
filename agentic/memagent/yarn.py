"""Writes a model directory with YaRN in its configuration, for the direct baseline only.

    python -m agentic.memagent.yarn --model DIR --output DIR [--factor 4.0] [--original 32768]

The output links to the model's files and has a `config.json` of its own. Invariants: the model itself is not changed; an
existing output is an error. The memory agent never needs this: its window is the model's own, and `eval` refuses it.
Leaves out: weights (YaRN as used here needs no training).
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic.common.command_line import Parser
from agentic.common.errors import ConfigError

CONFIG = "config.json"
SCALING_KEYS = ("rope_scaling", "rope_parameters")


def read_config(model: Path) -> dict[str, Any]:
    """The model's configuration. Raises FileNotFoundError or ConfigError."""
    path = model / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; name a model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold an object")
    return config


def uses_yarn(config: Mapping[str, Any]) -> bool:
    """Whether the configuration scales its positions by YaRN."""
    entries = [config.get(key) or {} for key in SCALING_KEYS]
    return any("yarn" in (entry.get("rope_type"), entry.get("type")) for entry in entries)


def with_yarn(config: Mapping[str, Any], factor: float, original: int) -> dict[str, Any]:
    """The configuration with YaRN and a window of `factor * original` tokens.

    Raises ConfigError when it is scaled already, or `original` is longer than the model's own window.
    """
    if uses_yarn(config):
        raise ConfigError("the model's configuration has YaRN already; start from the original model")
    window = config.get("max_position_embeddings")
    if isinstance(window, int) and original > window:
        raise ConfigError(
            f"--original {original}: the model's own window is {window} tokens (max_position_embeddings)"
        )
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    kept = config.get(key) or {}
    scaling = {**kept, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if key == "rope_scaling":
        scaling["type"] = "yarn"  # the name that older readers look for
    return {**config, key: scaling, "max_position_embeddings": int(factor * original)}


def write_model(model: Path, output: Path, factor: float, original: int) -> None:
    """Make the output directory. Raises FileNotFoundError, ConfigError; FileExistsError for an existing output."""
    config = with_yarn(read_config(model), factor, original)
    output.mkdir(parents=True)
    for file in sorted(model.resolve().iterdir()):
        if file.name != CONFIG:
            (output / file.name).symlink_to(file)
    (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(prog="python -m agentic.memagent.yarn", description="YaRN for the direct baseline.")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--factor", type=float, default=4.0, help="how many times longer the window becomes")
    parser.add_argument(
        "--original", type=int, default=32768, help="tokens of the window that the model was trained on"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    try:
        args = parse_args(argv)
        if args.factor <= 1 or args.original < 1:
            raise ConfigError(f"--factor {args.factor} --original {args.original}: must be above 1 and positive")
        write_model(args.model, args.output, args.factor, args.original)
    except (ConfigError, FileNotFoundError, FileExistsError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{args.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
