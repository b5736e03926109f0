"""Writes a model directory with YaRN in its configuration, for MemAgent's direct baseline only.

    python tools/yarn_config.py --model DIR --output DIR [--factor 4.0] [--original 32768]

The output links to the model's files and has a `config.json` of its own. The model itself is not changed; an existing output is an
error. The memory agent never needs this: its window is the model's own, and its evaluation refuses such a model.
Exit code 2 with one line `error: ...` for what the user can mend.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentic.common.command_line import Parser
from agentic.common.errors import ConfigError
from agentic.memagent.yarn import CONFIG, read_config, with_yarn


def write_model(model: Path, output: Path, factor: float, original: int) -> None:
    """Make the output directory. Raises FileNotFoundError, ConfigError; FileExistsError for an existing output."""
    config = with_yarn(read_config(model), factor, original)
    output.mkdir(parents=True)
    for file in sorted(model.resolve().iterdir()):
        if file.name != CONFIG:
            (output / file.name).symlink_to(file)
    (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str]) -> Namespace:
    parser = Parser(description="YaRN for MemAgent's direct baseline.")
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
    print(f"{args.output}: a window of {int(args.factor * args.original)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
