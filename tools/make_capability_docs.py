"""Write `docs/en/developer_guide/capabilities.md`: which hook and flag works with which backend and method.

    python tools/make_capability_docs.py [--check]

Nothing is listed by hand. A flag works with a backend when a run with it passes that backend's own checks; a hook belongs to a
method when the method's launch file sets it; its tests are those of `tests/contracts` that set it. With --check nothing is written; exit
code 1 when the page differs from what would be written.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.utils.arguments import get_slime_extra_args_provider
from slime.utils.arguments.parser import SlimeArgumentParser
from slime.utils.arguments.unavailable import refuse_unavailable

PAGE = ROOT / "docs" / "en" / "developer_guide" / "capabilities.md"
NOTICE = "<!-- Written by tools/make_capability_docs.py; do not edit. -->"
YES, NO = "yes", "-"
# Flags of the form of a hook that name a file.
NO_HOOKS = ("--custom-config-path", "--megatron-config-path")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is out of date")
    args = parser.parse_args(argv)
    text = page()
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
        print(PAGE.relative_to(ROOT))
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/make_capability_docs.py")
    return 1


def page() -> str:
    """The whole page."""
    actions, backends = registered_flags(), known_backends()
    cells = {action.option_strings[0]: [cell(action, backend) for backend in backends] for action in actions}
    hooks = [flag for flag in cells if flag.endswith(("-path", "-hook")) and flag not in NO_HOOKS]
    limited = {flag: states for flag, states in cells.items() if any(state != YES for state in states)}
    everywhere = len(cells) - len(limited)
    parts = [
        NOTICE,
        "# What works with what",
        f"`{YES}`: it does something. `{NO}`: a run that sets it ends at once with an error that says why and what to "
        "use instead; nothing is ignored silently. Backends are the values of `--train-backend`.",
        "## Hooks",
        "A method's column is the function that its launch file names; hooks without one are free for a run's own function. Their call "
        "shapes: [customisation](../get_started/customization.md).",
        table(["hook", *backends, *methods(), "tests"], [hook_row(flag, cells[flag]) for flag in hooks]),
        "## Flags that some backend refuses",
        f"The other {everywhere} flags of [the reference](../reference/flags.md) work with every backend listed here. Where a cell lists "
        "values, the flag takes these only.",
        table(
            ["flag", *backends, "instead"],
            [[f"`{flag}`", *states, reason(flag, actions, backends)] for flag, states in limited.items()],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows as Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- flags and backends ----


@cache
def registered_flags() -> list[argparse.Action]:
    """slime's own flags, in the order of their registration."""
    parser = SlimeArgumentParser(add_help=False)
    get_slime_extra_args_provider()(parser)
    return parser._actions


def defaults() -> Namespace:
    return Namespace(**{action.dest: action.default for action in registered_flags()})


def known_backends() -> list[str]:
    """Values of `--train-backend` whose backend is here and says what it can do."""
    choices = next(a.choices for a in registered_flags() if a.dest == "train_backend") or ()
    return [name for name in sorted(choices) if importlib.util.find_spec(_capabilities(name)) is not None]


def _capabilities(backend: str) -> str:
    package = f"slime.backends.{backend}_utils"
    return f"{package}.capabilities" if importlib.util.find_spec(package) else "slime.no_such_backend"


def cell(action: argparse.Action, backend: str) -> str:
    """`yes`, `-`, or the values that the backend takes."""
    values = other_values(action)
    refused = [value for value in values if refusal(action, value, backend)]
    if not refused:
        return YES
    if action.choices is None or len(refused) == len(values):
        return NO
    taken = [str(value) for value in action.choices if value not in refused]
    return ", ".join(f"`{value}`" for value in taken)


def other_values(action: argparse.Action) -> list[Any]:
    """Values that differ from the default: all choices, or one of the flag's type."""
    if action.choices is not None:
        return [value for value in action.choices if value != action.default and [value] != action.default]
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return [not action.default]
    if action.type in (int, float):
        return [action.type((action.default or 0) + 1)]
    return [{"key": "value"} if action.type not in (None, str) else "value"]


def refusal(action: argparse.Action, value: Any, backend: str) -> str | None:
    """Why a run with this flag does not start, or None."""
    args = defaults()
    args.train_backend = backend
    setattr(args, action.dest, [value] if action.nargs in ("+", "*") else value)
    for check in (refuse_unavailable, importlib.import_module(_capabilities(backend)).check_supported):
        try:
            check(args)
        except ValueError as error:
            # Another flag's default may be what is refused; that is its own row.
            if re.search(rf"{action.option_strings[0]}(?![\w-])", str(error)):
                return str(error)
    return None


def reason(flag: str, actions: list[argparse.Action], backends: list[str]) -> str:
    """The first refusal's own words, without the flag and its value."""
    action = next(a for a in actions if a.option_strings[0] == flag)
    for backend in backends:
        for value in other_values(action):
            text = refusal(action, value, backend)
            if text:
                return re.sub(r"^.*?not available(?: with --train-backend \w+,)?:? ?", "", text).replace("|", "\\|")
    return ""


# ---- hooks, methods and tests ----


def methods() -> list[str]:
    """Methods that have a launch file."""
    return sorted(path.parent.name for path in (ROOT / "agentic").glob("*/launch.yaml"))


def hook_row(flag: str, states: list[str]) -> list[str]:
    """One row of the table of hooks."""
    own = [method_hook(method, flag) for method in methods()]
    return [f"`{flag}`", *states, *(f"`{name}`" if name else NO for name in own), tests_of(flag) or NO]


def method_hook(method: str, flag: str) -> str:
    """`module.function` of the method's hook, without the method's package."""
    text = (ROOT / "agentic" / method / "launch.yaml").read_text(encoding="utf-8")
    found = re.search(rf"{flag}:? +agentic\.{method}\.([\w.]+)", text)
    return found.group(1) if found else ""


def tests_of(flag: str) -> str:
    """Links to the contract tests whose text sets the hook."""
    name = re.compile(rf"\b{flag.removeprefix('--').replace('-', '_')}(\"|=)")
    counts = {path: sum(bool(name.search(text)) for text in tests) for path, tests in contract_tests().items()}
    found = [
        f"[{path.stem}](../../../tests/contracts/{path.name}) ({count})" for path, count in counts.items() if count
    ]
    return ", ".join(found)


@cache
def contract_tests() -> dict[Path, list[str]]:
    """The text of every test function, by file."""
    texts: dict[Path, list[str]] = {}
    for path in sorted((ROOT / "tests" / "contracts").glob("test_*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        nodes = ast.parse("\n".join(lines)).body
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        texts[path] = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in functions]
    return texts


if __name__ == "__main__":
    sys.exit(main())
