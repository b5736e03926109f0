"""Prompt sets: one text file per purpose, filled with `string.Template`.

Inputs: a directory with the files `<name>.txt` of `FIELDS`. `${field}` is a slot, `$$` a literal dollar; a line `---`
splits the system message above it from the user message below it. Invariants: a set is checked completely when it is
loaded; rendering is a pure function of the fields; control tokens of chat templates in field values are broken up.
Leaves out: the policy's own chat template (`chat_format`), texts of tau2, which come with that package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.escape import escape_control, well_formed
from agentic.common.templates import read_template

_STATE = ("question", "state")
FIELDS: dict[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "format_error": ("errors",),
    "partly_done": ("errors",),
    "qa_turn": _STATE,
    "qa_search": _STATE,
    "qa_reasoning": _STATE,
    "qa_answer_boxed": _STATE,
    "qa_answer_tag": _STATE,
    "judge": ("question", "answer", "label"),
}
_SPLIT = re.compile(r"(?m)^---[ \t]*$\n?")


@dataclass(frozen=True)
class PromptSet:
    """The checked templates of one directory, by name."""

    directory: Path
    templates: Mapping[str, str]

    @classmethod
    def load(cls, name: str) -> PromptSet:
        """Load a set by name (`standard`) or by the path of a directory.

        Raises:
            ConfigError: no such set, a file is missing, or a template asks for a field that it does not have.
        """
        directory = Path(__file__).parent / name
        if not directory.is_dir():
            directory = Path(name)
        if not directory.is_dir():
            known = sorted(path.parent.name for path in Path(__file__).parent.glob("*/qa_turn.txt"))
            raise ConfigError(f"orchestra_prompt_set: no set or directory {name!r}; sets: {', '.join(known)}")
        return cls(directory, {name: _read(directory / f"{name}.txt", name) for name in FIELDS})

    def render(self, role: str, **fields: str) -> list[dict[str, Any]]:
        """Chat messages (an optional system message first). Raises TypeError when `fields` are not those of `role`."""
        parts = _SPLIT.split(self.templates[role], maxsplit=1)
        speakers = ("user",) if len(parts) == 1 else ("system", "user")
        filled = (_fill(role, part, fields) for part in parts)
        return [{"role": name, "content": text} for name, text in zip(speakers, filled, strict=True) if text]

    def text(self, name: str, **fields: str) -> str:
        """The filled text of a file that is no chat prompt. Raises TypeError as `render`."""
        return _fill(name, self.templates[name], fields)

    def describe_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tools for a system message, where the chat template does not show them."""
        return self.text("tools", tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _fill(name: str, template: str, fields: Mapping[str, str]) -> str:
    if set(fields) != set(FIELDS[name]):
        raise TypeError(f"prompt {name!r} takes the fields {FIELDS[name]}, got {tuple(fields)}")
    texts = {key: escape_control(well_formed(value)) for key, value in fields.items()}
    return Template(template).substitute(texts).strip()


def _read(path: Path, name: str) -> str:
    if not path.is_file():
        raise ConfigError(f"{path}: file is missing; a prompt set needs {', '.join(f'{n}.txt' for n in FIELDS)}")
    return read_template(path, name, FIELDS[name])
