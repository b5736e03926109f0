"""Style targets, measured on the syntax trees: small functions and files, full types, few broad handlers, no print."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_source import ROOT, project_files, python_files, relative, tree_of

LIBRARY = python_files("agentic", "slime")
PRODUCT = [*LIBRARY, *python_files("tools", "benchmarks"), ROOT / "train.py", ROOT / "setup.py"]

MEDIAN_LINES, P90_LINES, MOST_LINES = 10, 40, 100
MOST_FILE_LINES, MEDIAN_FILE_LINES = 600, 200
TYPED_SHARE = 0.99
BROAD_PER_KLOC = 0.5
TRAIN_LOOP_LINES = 120

# Written so that the patterns do not find themselves.
FORBIDDEN_TEXT = {
    "a path of somebody's machine": re.compile(r"(?<![\w.$}/-])/(?:home|root|Users|work|mnt)/[\w.]"),
    "ending processes by name": re.compile(r"\bp[k]ill\b|\bkill[a]ll\b|\bray st[o]p\b"),
}
TEXT_SUFFIXES = {".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".j2", ".cfg", ""}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(files: list[Path]) -> Iterator[tuple[str, Function]]:
    for path in files:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{relative(path)}:{node.lineno} {node.name}", node


def length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_functions_are_small() -> None:
    sizes = sorted((length(node), where) for where, node in functions(PRODUCT))
    lengths = [size for size, _ in sizes]
    longest = ", ".join(f"{where} ({size})" for size, where in sizes[-5:])
    assert statistics.median(lengths) <= MEDIAN_LINES
    assert lengths[int(0.9 * len(lengths))] <= P90_LINES, longest
    assert lengths[-1] <= MOST_LINES, longest


def test_files_are_small() -> None:
    sizes = {relative(path): lines_of(path) for path in [*PRODUCT, *python_files("tests")]}
    big = {name: size for name, size in sizes.items() if size > MOST_FILE_LINES}
    assert not big
    assert statistics.median(lines_of(path) for path in PRODUCT) <= MEDIAN_FILE_LINES
    assert sizes["train.py"] < TRAIN_LOOP_LINES


def test_functions_state_what_they_return() -> None:
    found = list(functions(PRODUCT))
    bare = [where for where, node in found if node.returns is None]
    assert 1 - len(bare) / len(found) >= TYPED_SHARE, bare


def test_public_modules_have_a_docstring() -> None:
    """Every module with code says what it is for."""
    bare = [relative(path) for path in PRODUCT if tree_of(path).body and ast.get_docstring(tree_of(path)) is None]
    assert not bare


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in ("Exception", "BaseException") for kind in caught)


def test_few_broad_handlers_and_none_bare() -> None:
    handlers = [
        (f"{relative(path)}:{node.lineno}", node)
        for path in PRODUCT
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
    ]
    broad = [where for where, node in handlers if is_broad(node)]
    assert not [where for where, node in handlers if node.type is None]
    assert len(broad) / (sum(map(lines_of, PRODUCT)) / 1000) <= BROAD_PER_KLOC, broad


def calls_of(files: list[Path], *names: str) -> list[str]:
    return [
        f"{relative(path)}:{node.lineno} {node.func.id}"
        for path in files
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def test_only_programs_print() -> None:
    assert not calls_of([*LIBRARY, ROOT / "train.py"], "print")


def test_no_foreign_text_is_executed() -> None:
    """Text of models and data sets is parsed, never run in our processes; nothing is unpickled by hand.

    The reader of distributed checkpoints is there to be stricter than torch's: it finds known classes only.
    """
    assert not calls_of(PRODUCT, "exec", "eval")
    pickles = [
        f"{relative(path)}:{node.lineno}"
        for path in PRODUCT
        if relative(path) != "slime/backends/common/dcp_files.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and "pickle" in {getattr(node, "module", None), *(alias.name for alias in node.names)}
    ]
    assert not pickles


@pytest.mark.parametrize("what", sorted(FORBIDDEN_TEXT))
def test_forbidden_text(what: str) -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in project_files()
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if FORBIDDEN_TEXT[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)
