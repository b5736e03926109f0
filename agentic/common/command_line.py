"""What the programs of `agentic` share: a parser whose errors are ConfigError, and how a program ends.

Invariants: an error that the user can mend is one line on the error stream and exit code 2; so is a server that does not
answer. Leaves out: slime's own flags, which have their parser.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from agentic.common.errors import AgenticError, ConfigError, RoleUnavailable


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


def resumable_program(body: Callable[[], int]) -> int:
    """Run a program that goes on where it was when it is started again; its exit code.

    2: wrong command line, file or setting, or a server that does not answer; 1: any other error of ours; 130: Ctrl-C.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return body()
    except (ConfigError, FileNotFoundError, RoleUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except AgenticError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here\n")
        return 130
