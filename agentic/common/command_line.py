"""What the programs of `agentic` share: a parser whose errors are ConfigError, so that `main` shows one line and exits 2.

Leaves out: slime's own flags, which have their parser.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from agentic.common.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """No abbreviations; a wrong command line raises ConfigError instead of printing the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists all flags)")


def positive(text: str) -> int:
    """Type of a flag: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value
