"""What a rollout of question answering has found so far, and how much of it a prompt shows.

Inputs: document texts in the order of the retriever, pairs of program and output, earlier answers; a tokenizer that counts.
Invariants: the order is a pure function of what was added; a document stands in the state once; a rendering never has more
tokens than its budget (headings apart); of programs and answers the newest end is kept, of documents the best ranked.
Leaves out: where the texts come from (`tools`), control tokens in them (neutralised by whoever renders a chat).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from agentic.common.errors import BadRecord

DOCUMENT_CHARS = 4000
"""Characters kept of one document."""


class Tokenizer(Protocol):
    """The one method of a Hugging Face tokenizer that the budgets need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Budgets:
    """Tokens of a rendered state: earlier answers, these and the programs together, everything."""

    attempts: int = 8000
    code: int = 24000
    total: int = 24000

    def within(self, tokens: int) -> Budgets:
        """The same, with no part above `tokens`."""
        return Budgets(min(self.attempts, tokens), min(self.code, tokens), min(self.total, tokens))


POLICY_BUDGETS = Budgets()
# What an expert is shown, by a part of its model's name; the first that fits.
FAMILY_BUDGETS = {
    "gpt-5": Budgets(8000, 40000, 100000),
    "math": Budgets(1000, 1000, 2000),
    "coder": Budgets(8000, 16000, 24000),
    "llama": Budgets(8000, 40000, 80000),
    "gemma": Budgets(2000, 2000, 4000),
}
OTHER_BUDGETS = Budgets(8000, 16000, 24000)


def expert_budgets(model: str) -> Budgets:
    """Budgets of an expert by the family of its model (Qwen3 and unknown ones alike: 16k of 24k tokens)."""
    name = model.lower()
    return next((budgets for part, budgets in FAMILY_BUDGETS.items() if part in name), OTHER_BUDGETS)


@dataclass
class QAState:
    """Documents, programs with their outputs, and earlier answers of one rollout."""

    documents: list[str] = field(default_factory=list)
    code: list[tuple[str, str]] = field(default_factory=list)
    """(program, what it printed)."""
    attempts: list[str] = field(default_factory=list)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> QAState:
        """The state that a record begins with (`metadata["state"]`), else an empty one. Raises BadRecord."""
        given = metadata.get("state") or {}
        try:
            code = [(str(program), str(output)) for program, output in given.get("code", [])]
            state = cls([], code, [str(text) for text in given.get("attempts", [])])
            state.add_documents(given.get("documents", []))
        except (AttributeError, TypeError, ValueError) as error:
            wanted = '{"documents": [text], "code": [[program, output]], "attempts": [text]}'
            raise BadRecord("bad_state", f"metadata.state is {given!r:.200}; expected {wanted}") from error
        return state

    def add_documents(self, texts: Iterable[str]) -> list[str]:
        """Interleave new hits with the old ones, best first; those that are new, in their order."""
        cut = [text.strip()[:DOCUMENT_CHARS] for text in texts]
        new = [text for text in dict.fromkeys(cut) if text and text not in self.documents]
        pairs = zip_longest(new, self.documents)
        self.documents = [text for pair in pairs for text in pair if text is not None]
        return new

    def add_code(self, program: str, output: str) -> None:
        self.code.append((program, output))

    def render(self, budgets: Budgets, tokenizer: Tokenizer) -> str:
        """The state as text for a prompt; empty when nothing was found."""
        answers = "\n".join(f"- {text}" for text in self.attempts)
        attempts = keep_tail(answers, min(budgets.attempts, budgets.total), tokenizer)
        used = count(attempts, tokenizer)
        programs = "\n\n".join(render_program(program, output) for program, output in self.code)
        code = keep_tail(programs, min(budgets.code, budgets.total) - used, tokenizer)
        used += count(code, tokenizer)
        documents = render_documents(self.documents, budgets.total - used, tokenizer)
        sections = {"Documents": documents, "Python programs and what they printed": code, "Earlier answers": attempts}
        return "\n\n".join(f"{title}:\n{text}" for title, text in sections.items() if text)


def render_program(program: str, output: str) -> str:
    """A program and its output in fences that the texts inside cannot close."""
    fence = fence_for(program, output)
    return f"{fence}python\n{program.strip()}\n{fence}\n{fence}output\n{output.strip()}\n{fence}"


def fence_for(*texts: str) -> str:
    """Three backticks, or more than any of the texts has in a row."""
    fence = "```"
    while any(fence in text for text in texts):
        fence += "`"
    return fence


def render_documents(documents: Sequence[str], budget: int, tokenizer: Tokenizer) -> str:
    """Numbered documents until `budget` tokens are used; the last one is cut."""
    shown: list[str] = []
    for number, text in enumerate(documents, start=1):
        mark, entry = f"[{number}] ", f"[{number}] {text}"
        used = count(entry, tokenizer) + 1  # the line break
        if used > budget:
            entry = keep_head(entry, budget - 1, tokenizer)
            shown += [entry] if len(entry) > len(mark) else []
            break
        shown.append(entry)
        budget -= used
    return "\n".join(shown)


# --------------------------------------------------------------------------------------------------------------------
# Token budgets. Texts are only ever counted, never made of ids again.


def count(text: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False)) if text else 0


def keep_head(text: str, budget: int, tokenizer: Tokenizer) -> str:
    """The beginning of the text, at most `budget` tokens of it."""
    return text[: _fitting(text, budget, tokenizer, False)]


def keep_tail(text: str, budget: int, tokenizer: Tokenizer) -> str:
    """The end of the text, at most `budget` tokens of it."""
    return text[len(text) - _fitting(text, budget, tokenizer, True) :]


def _fitting(text: str, budget: int, tokenizer: Tokenizer, tail: bool) -> int:
    """A number of characters at one end of the text that has at most `budget` tokens: proportional steps downward."""
    size = len(text)
    while size > 0:
        part = text[len(text) - size :] if tail else text[:size]
        # A token has at least one byte, so a short text needs no counting.
        used = 0 if len(part.encode()) <= budget else count(part, tokenizer)
        if used <= budget:
            break
        size = min(size * max(budget, 0) // used, size - 1)
    return size
