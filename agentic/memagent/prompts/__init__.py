r"""Prompt sets, compiled to token ids around their slots, so that nothing generated is ever encoded again.

Inputs: a directory with `memory.txt` (slots question, memory, chunk), `answer.txt` (question, memory), `no_memory.txt`
(the memory before the first turn) and, if wanted, `answer_prefill.txt`, with which the answer begins (for example
`\boxed{`). A literal dollar is written `$$`. Invariants: training and evaluation use the same compiled template; each
slot stands once, and the question comes first, because what stands before the memory is what the engine's prefix cache
can reuse; slot ids go in as they are, so no text in them can become markup.
Leaves out: budgets (`agent`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.templates import read_template

SLOTS = {"memory": ("question", "memory", "chunk"), "answer": ("question", "memory")}
FILES = ("memory.txt", "answer.txt", "no_memory.txt")
# Private-use characters stand for the slots while the chat template is applied.
_MARKS = {"question": "\ue000", "memory": "\ue001", "chunk": "\ue002"}
_MARK = re.compile("([\ue000-\ue002])")


@dataclass(frozen=True)
class TokenTemplate:
    """Ids of a whole chat prompt with gaps: `literals[0]`, slot 0, `literals[1]`, ..., `literals[-1]`."""

    literals: tuple[tuple[int, ...], ...]
    slots: tuple[str, ...]

    @property
    def overhead(self) -> int:
        """Number of ids without any slot's."""
        return sum(map(len, self.literals))

    def render(self, **ids: Sequence[int]) -> list[int]:
        """The prompt's ids. Raises TypeError when `ids` are not exactly the template's slots."""
        if set(ids) != set(self.slots):
            raise TypeError(f"the template has the slots {self.slots}, got {tuple(ids)}")
        out = list(self.literals[0])
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            out += ids[slot]
            out += literal
        return out


@dataclass(frozen=True)
class PromptSet:
    """The checked texts of one directory."""

    directory: Path
    texts: Mapping[str, str]
    """`memory` and `answer`, with slots."""
    no_memory: str
    answer_prefill: str = ""

    @classmethod
    def load(cls, name: str) -> PromptSet:
        """Load a set by name (`standard`, `compact`) or by the path of a directory.

        Raises:
            ConfigError: no such set, a file is missing, or a text has other slots than it must.
        """
        directory = Path(__file__).parent / name
        if not directory.is_dir():
            directory = Path(name)
        if not directory.is_dir():
            known = sorted(p.name for p in Path(__file__).parent.iterdir() if (p / "memory.txt").is_file())
            raise ConfigError(f"memagent_prompt_set: no set or directory {name!r}; sets: {', '.join(known)}")
        for file in FILES:
            if not (directory / file).is_file():
                raise ConfigError(f"{directory / file}: file is missing; a prompt set needs {', '.join(FILES)}")
        prefill = directory / "answer_prefill.txt"
        texts = {role: _read(directory / f"{role}.txt", role) for role in SLOTS}
        no_memory = (directory / "no_memory.txt").read_text(encoding="utf-8").strip()
        return cls(
            directory, texts, no_memory, prefill.read_text(encoding="utf-8").strip() if prefill.is_file() else ""
        )

    def messages(self, role: str, system_prompt: str = "", **texts: str) -> list[dict[str, str]]:
        """The prompt as chat messages, for writing supervised examples; the policy itself is asked with ids."""
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return [*system, {"role": "user", "content": Template(self.texts[role]).substitute(texts)}]

    def compile(self, role: str, tokenizer: Any, system_prompt: str = "", **chat_options: Any) -> TokenTemplate:
        """The prompt of `role` through the tokenizer's chat template; `chat_options` are handed to that.

        Raises:
            ConfigError: the chat template repeats, drops or reorders the message's text.
        """
        messages = self.messages(role, system_prompt, **{slot: _MARKS[slot] for slot in SLOTS[role]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat_options)
        parts = _MARK.split(text + (self.answer_prefill if role == "answer" else ""))
        slots = tuple(_slot(mark) for mark in parts[1::2])
        if slots != _slots_of(self.texts[role]):
            raise ConfigError(f"{self.directory}/{role}.txt: the chat template makes the slots {slots} of it")
        encoded = (tokenizer.encode(part, add_special_tokens=False) if part else [] for part in parts[::2])
        return TokenTemplate(tuple(tuple(map(int, ids)) for ids in encoded), slots)


def _slot(mark: str) -> str:
    return next(slot for slot, known in _MARKS.items() if known == mark)


def _slots_of(text: str) -> tuple[str, ...]:
    found = (match.group("named") or match.group("braced") for match in Template.pattern.finditer(text))
    return tuple(slot for slot in found if slot)


def _read(path: Path, role: str) -> str:
    text = read_template(path, role, SLOTS[role]).strip()
    slots = _slots_of(text)
    if sorted(slots) != sorted(SLOTS[role]) or slots[0] != "question":
        wanted = ", ".join(f"${{{slot}}}" for slot in SLOTS[role])
        raise ConfigError(
            f"{path}: needs each of {wanted} once and the question first, has {', '.join(slots) or 'none'}"
        )
    return text
