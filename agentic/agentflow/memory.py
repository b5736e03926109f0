"""The evolving memory of one question: an ordered list of tool steps and its rendering for prompts.

Inputs: finished steps, a prompt set (layout of one entry), a tokenizer (for the budgets). Invariants: numbering starts
at 1 and equals the step number of the prompt; rendering is a pure function of the entries, so a replay gives the same
prompt ids; the newest entry is never dropped; text inside an entry cannot forge a label, a fence or a control token.
Leaves out: any summarising by a model (the update is deterministic), and sharing between questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from agentic.agentflow.escape import escape_block
from agentic.agentflow.prompts import PromptSet
from agentic.common.escape import well_formed

RESULT_CHAR_CAP = 4096


class Tokenizer(Protocol):
    """The one method of a Hugging Face tokenizer that the budgets need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class MemoryEntry:
    """One action step: what the planner wanted, the command that ran and what came back."""

    step: int
    tool_name: str
    sub_goal: str
    command: str
    result: str

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


def truncate_middle(text: str, cap: int = RESULT_CHAR_CAP) -> str:
    """Keep the first and the last `cap // 2` characters and say how many were removed between them."""
    if len(text) <= cap:
        return text
    half = cap // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters removed ...]\n{text[len(text) - half:]}"


def render_memory(entries: Sequence[MemoryEntry], prompts: PromptSet) -> str:
    """All entries in order, each escaped and laid out by `memory_entry.txt`; an empty string for no entries."""
    return "".join(_render_entry(entry, prompts) for entry in entries).strip()


def _render_entry(entry: MemoryEntry, prompts: PromptSet) -> str:
    return prompts.render_memory_entry(
        step=entry.step,
        tool_name=escape_block(entry.tool_name),
        sub_goal=escape_block(entry.sub_goal),
        command=escape_block(entry.command),
        result=escape_block(entry.result),
    )


@dataclass
class Memory:
    """Entries of one question with their token budgets. Build a new one for every question.

    max_result_tokens: budget of one entry's result. max_total_tokens: budget of the whole rendered memory.
    """

    prompts: PromptSet
    tokenizer: Tokenizer
    max_result_tokens: int = 1024
    max_total_tokens: int = 8192
    entries: list[MemoryEntry] = field(default_factory=list)

    def add(self, tool_name: str, sub_goal: str, command: str, result: str) -> MemoryEntry:
        """Append one step; its result is cut by the character cap, then by the token budget."""
        short = self._shrink(truncate_middle(well_formed(result)), self.max_result_tokens)
        entry = MemoryEntry(len(self.entries) + 1, tool_name, sub_goal, command, short)
        self.entries.append(entry)
        return entry

    def render(self) -> str:
        """The memory for a prompt. Over budget, the results of the oldest entries shrink first.

        An old entry keeps its heading, so that the planner still sees what it tried. The newest entry is left whole.
        """
        entries = list(self.entries)
        text = render_memory(entries, self.prompts)
        for i in range(len(entries) - 1):
            excess = self._excess(text, self.max_total_tokens)
            if excess <= 0:
                break
            keep = max(self._excess(entries[i].result, 0) - excess, 0)
            entries[i] = replace(entries[i], result=self._shrink(entries[i].result, keep))
            text = render_memory(entries, self.prompts)
        return text

    def _excess(self, text: str, budget: int) -> int:
        """Tokens above the budget (0 or less: it fits). Short texts are not encoded: a token has at least one byte."""
        size = len(text.encode())
        return size - budget if size <= budget else len(self.tokenizer.encode(text, add_special_tokens=False)) - budget

    def _shrink(self, text: str, budget: int) -> str:
        """Cut the middle out until the text, marker included, fits into `budget` tokens (or only a note is left)."""
        cap, short = len(text), text
        while (excess := self._excess(short, budget)) > 0 and cap > 1:
            # Proportional guess first, then steadily towards zero: a handful of encodings.
            cap = min(int(cap * budget / (budget + excess)), cap - cap // 8 - 1)
            short = truncate_middle(text, cap) if cap > 1 else f"[{len(text)} characters removed]"
        return short
