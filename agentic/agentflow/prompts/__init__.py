"""Prompt sets: one text file per role, filled with `string.Template`.

Inputs: a directory with the files `<role>.txt` for every role of `FIELDS`. `${field}` is replaced; a literal dollar is
written `$$`. A line `---` splits the system message above it from the user message below it; without that line the
file is one user message. `memory_entry.txt` renders one memory entry and is used verbatim, entries are concatenated.
Invariants: a set is checked completely when it is loaded; rendering is a pure function of the fields, so a replay
gives the same prompt ids. Chat control tokens inside field values are broken up, whatever their source, and values that
are no valid Unicode are mended.
Leaves out: tokenisation and the chat template (see `agentic.common.clients`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from agentic.common.errors import ConfigError
from agentic.common.escape import escape_control, well_formed
from agentic.common.templates import read_template

FIELDS: dict[str, tuple[str, ...]] = {
    "analysis": ("question", "tools"),
    "next_step": ("question", "analysis", "tools", "memory", "step", "steps_left"),
    "command": ("question", "sub_goal", "context", "tool_name", "tool_metadata"),
    "verify": ("question", "analysis", "tools", "memory"),
    "final": ("question", "analysis", "memory"),
    "base_generator": ("query",),
    "python_coder": ("query",),
    "judge": ("question", "answer", "label"),
    "memory_entry": ("step", "tool_name", "sub_goal", "command", "result"),
}
_SPLIT = re.compile(r"(?m)^---[ \t]*$\n?")


@dataclass(frozen=True)
class PromptSet:
    """The checked templates of one directory, by role."""

    directory: Path
    templates: Mapping[str, str]

    @classmethod
    def load(cls, name: str) -> PromptSet:
        """Load a set by name (`standard`, `compact`) or by the path of a directory.

        Raises:
            ConfigError: no such set, a file is missing, or a template asks for a field that its role does not have.
        """
        directory = Path(__file__).parent / name
        if not directory.is_dir():
            directory = Path(name)
        if not directory.is_dir():
            known = sorted(p.name for p in Path(__file__).parent.iterdir() if (p / "final.txt").is_file())
            raise ConfigError(f"agentflow_prompt_set: no set or directory {name!r}; sets: {', '.join(known)}")
        return cls(directory, {role: _read(directory / f"{role}.txt", role) for role in FIELDS})

    def render(self, role: str, **fields: str | int) -> list[dict[str, str]]:
        """Chat messages (`[{role, content}]`, an optional system message first) for one call of `role`.

        Raises:
            TypeError: `fields` are not exactly the fields of the role.
        """
        parts = _SPLIT.split(self.templates[role], maxsplit=1)
        names = ("user",) if len(parts) == 1 else ("system", "user")
        filled = (self._fill(role, part, fields).strip() for part in parts)
        return [{"role": name, "content": text} for name, text in zip(names, filled, strict=True) if text]

    def render_memory_entry(self, **fields: str | int) -> str:
        """The text of one memory entry, exactly as `memory_entry.txt` lays it out (final newline included)."""
        return self._fill("memory_entry", self.templates["memory_entry"], fields)

    def _fill(self, role: str, template: str, fields: Mapping[str, str | int]) -> str:
        if set(fields) != set(FIELDS[role]):
            raise TypeError(f"prompt {role!r} takes the fields {FIELDS[role]}, got {tuple(fields)}")
        texts = {key: escape_control(well_formed(str(value))) for key, value in fields.items()}
        return Template(template).substitute(texts)


def _read(path: Path, role: str) -> str:
    if not path.is_file():
        raise ConfigError(f"{path}: file is missing; a prompt set needs {', '.join(f'{r}.txt' for r in FIELDS)}")
    return read_template(path, role, FIELDS[role])
