"""The argument parser: one-line errors, nearest flag for a misspelt one, and value types shared by the flag groups.

Invariants: abbreviations are not accepted; every error goes to stderr as one line `error: ...` and exits with 2.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

CONFIG_ERROR_EXIT_CODE = 2


class FlagError(ValueError, AssertionError):
    """Flags that exclude or need each other. Both kinds, because users of the interface catch one or the other."""


class SlimeArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that reports problems in one line and suggests the flag that was meant."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print `error: message` on one line and leave with exit code 2."""
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        sys.exit(CONFIG_ERROR_EXIT_CODE)

    def parse_strictly(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse `argv` (default: the command line). A misspelt flag is reported before anything that is missing."""
        argv = sys.argv[1:] if argv is None else list(argv)
        for token in argv:
            flag = token.split("=", 1)[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self.error(f"unknown flag {flag}{self._hint(flag)}")
        return self.parse_args(argv)

    def _hint(self, flag: str) -> str:
        near = difflib.get_close_matches(flag.replace("_", "-"), self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else "; see --help for all flags"


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Add flag `name`; if another provider already added it, change only its default (type and choices stay)."""
    action = parser._option_string_actions.get(name)
    if action is None:
        parser.add_argument(name, **kwargs)
    elif "default" in kwargs:
        parser.set_defaults(**{action.dest: kwargs["default"]})
        action.required = False


def json_object(text: str) -> dict[str, Any]:
    """Value type: a JSON object given as text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as '{{\"key\": 1}}', got {text!r}")
    return value
