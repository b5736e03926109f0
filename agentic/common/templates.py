"""Prompt texts as files, checked when they are read.

Input: a text file in the syntax of `string.Template`: `${field}` is a slot, `$$` a literal dollar. Invariant: what is
returned has no other slots than those allowed. Leaves out: which files a prompt set has and how slots are filled.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from string import Template

from agentic.common.errors import ConfigError


def read_template(path: Path, role: str, fields: Collection[str]) -> str:
    """The text of a template file.

    Raises:
        ConfigError: a lone dollar, or a slot that the role does not have; names file and place.
    """
    text = path.read_text(encoding="utf-8")
    for match in Template.pattern.finditer(text):
        if match.group("invalid") is not None:
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"{path}:{line}: a lone '$'; write '$$' for a literal dollar")
        field = match.group("named") or match.group("braced")
        if field is not None and field not in fields:
            raise ConfigError(f"{path}: unknown field ${{{field}}}; {role} has {', '.join(fields)}")
    return text
