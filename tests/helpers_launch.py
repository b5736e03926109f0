"""What the launch tests of all methods share: expanded commands, shell scripts, settings that change nothing.

A test module makes one `LaunchKit` of its launcher; `PYTHONPATH=.:tests python MODULE` records the commands anew.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentic.common import launching
from agentic.common.launching import Launcher, Settings

ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|localhost|https?://\w+[:.]|^/\w+/\w|^30\d{3}$")


@dataclass(frozen=True)
class LaunchKit:
    """A launcher under test: its commands, further `variants` (label -> command and settings), and their record."""

    launcher: Launcher
    commands: tuple[str, ...]
    snapshot: Path
    variants: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.launcher.template_path.parent

    def settings(self, **changes: Any) -> Settings:
        return {**self.launcher.template["settings"], **changes}

    def expanded(self) -> str:
        """All commands with the default settings, then the variants; a flag a line, environment first."""
        plans = {name: self.launcher.make_plan(name, self.settings()) for name in self.commands}
        for label, (name, changes) in self.variants.items():
            plans[label] = self.launcher.make_plan(name, self.settings(**changes))
        blocks = []
        for label, plan in plans.items():
            words = [f"{key}={value}" for key, value in plan.env.items()]
            words += [word.replace(str(launching.ROOT), "ROOT") for word in plan.argv]
            blocks.append("\n  --".join(f"[{label}] {' '.join(words)}".split(" --")))
            if plan.limits:
                blocks.append(f"  (planned with {' '.join(plan.limits)})")
        return "\n".join(blocks) + "\n"

    def record(self) -> None:
        self.snapshot.write_text(self.expanded())

    def run(
        self, script: str, *flags: str, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """A script of the method's folder, with this interpreter."""
        env = {**os.environ, "PYTHON": sys.executable, **environ}
        command = ["bash", str(self.folder / script), *flags]
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)

    def write(self, folder: Path, command: str, **changes: Any) -> Path:
        """The files of a command, written with `folder` as every output."""
        outputs = {name: str(folder) for name in self.launcher.template["outputs"]}
        launching.write_files(self.launcher.make_plan(command, self.settings(**outputs, **changes)))
        return folder

    def settings_without_effect(self, **base_changes: Any) -> list[str]:
        """Settings of which another value gives the same commands, environments and files."""
        base = self.settings(**base_changes)
        before = self._everything(base)
        return [name for name, value in base.items() if self._everything({**base, name: _other(value)}) == before]

    def _everything(self, values: Settings) -> list[Any]:
        """Commands and files before they are written out, which takes most of the time."""
        template = self.launcher.template
        entries = [launching.fill(template["commands"][name], values) for name in self.commands]
        return [(entry, launching.fill(template["files"][entry["files"]], values)) for entry in entries]

    def addresses_in_python(self, *but: str) -> list[str]:
        """Hosts, ports and absolute paths written in the method's Python files (not in their docstrings)."""
        sources = [path for path in self.folder.rglob("*.py") if path.name not in but]
        assert len(sources) > 5
        return [f"{path.name}: {text}" for path in sources for text in _literals(path) if ADDRESS.search(text)]

    def scripts(self) -> set[str]:
        """Names of the shell scripts, all of them short and executable."""
        scripts = list(self.folder.glob("*.sh"))
        assert all(len(script.read_text().splitlines()) < 20 and os.access(script, os.X_OK) for script in scripts)
        return {script.name for script in scripts}


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return ["x"] if isinstance(value, list) else type(value)(7 if value != 7 else 8)


def _literals(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    doc = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in doc]
    return [
        str(node.value)
        for node in constants
        if isinstance(node.value, (str, int)) and not isinstance(node.value, bool)
    ]
