"""The repository as source text: syntax trees and imports, for the tests of architecture, style and documentation."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# No project files although they may lie in the tree.
_NOT_OURS = {
    ".git",
    ".venv",
    "outputs",
    "build",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".hypothesis",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is a module, or a name inside one; `lazy` when it stands inside a function."""

    source: str
    target: str
    lazy: bool
    where: str


def python_files(*folders: str) -> list[Path]:
    """All Python files under these folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """`slime/utils/__init__.py` -> `slime.utils`."""
    return relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=relative(path))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, wherever it stands. Relative imports are resolved; `import a.b` and `from a import b` give `a.b`."""
    source = module_name(path)
    package = source if path.name == "__init__.py" else source.rpartition(".")[0]
    yield from _imports_below(tree_of(path), False, source, package, relative(path))


def _imports_below(node: ast.AST, lazy: bool, source: str, package: str, file: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, package):
            yield Import(source, target, lazy, f"{file}:{child.lineno}")  # type: ignore[attr-defined]
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports_below(child, inside, source, package, file)


def _targets(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, base]).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]


def is_under(name: str, *packages: str) -> bool:
    """Whether the dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def project_files() -> list[Path]:
    """Files that are, or would be, under version control; without git everything but known build and output folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [relative(path) for path in _walk(ROOT)]
    return sorted(path for name in names if (path := ROOT / name).is_file())


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_OURS and not name.endswith(".egg-info")]
        yield from (Path(here) / name for name in files)
