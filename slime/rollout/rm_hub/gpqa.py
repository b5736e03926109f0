r"""Rule reward of GPQA and other multiple-choice sets: the letter the response settles on must be the right one.

Input: response, label and metadata. The right letter is `metadata["correct_letter"]`, or the label when it is a
letter, a position in `metadata["choices"]`, or the text of a choice. `metadata["valid_letters"]` (default: as many as
there are choices, else A to H) bounds what counts as an answer.
Invariant: text is only matched, never evaluated; all patterns are linear. Left out: partial credit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DEFAULT_COUNT = 8
_THINK_END = "</think>"
_TAIL_CHARS = 2000

# Most explicit first; within a pattern the last match is the final word.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\\boxed\{[ \t]*(?:\\text(?:bf)?\{)?[ \t]*\(?([A-Z])\)?[ \t]*[.:)]?[ \t]*\}",
        r"<answer>\s{0,8}\(?([A-Z])\)?\s{0,8}\.?\s{0,8}</answer>",
        r"\banswer[ \t]*(?:is|:|=)[ \t]*(?:option|choice)?[ \t]*[*_(\[]{0,4}([A-Z])\b",
        r"\b(?:option|choice)[ \t]*(?:is|:)?[ \t]*[*_(\[]{0,4}([A-Z])\b",
        r"^[ \t]*[*_(\[]{0,4}([A-Z])[)\]*_.:]{0,4}[ \t]*$",
    )
)
_LINE_START = re.compile(r"^[ \t]*[*_(\[]{0,4}([A-Z])[)\].:]", re.MULTILINE)


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when the response's final letter (or, without one, the text of its choice) is right, else 0.0."""
    metadata = metadata or {}
    choices = _choices(metadata)
    letters = _valid_letters(metadata, choices)
    truth = _correct_letter(label, metadata, choices, letters)
    if not response or truth is None:
        return 0.0
    return float(_chosen_letter(response, choices, letters) == truth)


def _choices(metadata: dict[str, Any]) -> list[str]:
    choices = metadata.get("choices") or []
    if isinstance(choices, dict):
        choices = [choices[key] for key in sorted(choices)]
    return [str(choice) for choice in choices]


def _valid_letters(metadata: dict[str, Any], choices: Sequence[str]) -> str:
    given = metadata.get("valid_letters")
    if given:
        return "".join(str(letter).strip().upper()[:1] for letter in given)
    return _LETTERS[: len(choices) or _DEFAULT_COUNT]


def _correct_letter(label: Any, metadata: dict[str, Any], choices: Sequence[str], letters: str) -> str | None:
    for candidate in (metadata.get("correct_letter"), label):
        if isinstance(candidate, int) and not isinstance(candidate, bool):
            return letters[candidate] if 0 <= candidate < len(letters) else None
        text = str(candidate).strip() if candidate is not None else ""
        if len(text.strip("().")) == 1 and text.strip("().").upper() in letters:
            return text.strip("().").upper()
        position = _position_of(text, choices)
        if position is not None and position < len(letters):
            return letters[position]
    return None


def _normal(text: str) -> str:
    return " ".join(text.lower().split())


def _position_of(text: str, choices: Sequence[str]) -> int | None:
    normal = _normal(text)
    return next((i for i, choice in enumerate(choices) if normal and _normal(choice) == normal), None)


def _chosen_letter(response: str, choices: Sequence[str], letters: str) -> str | None:
    tail = response.rsplit(_THINK_END, 1)[-1][-_TAIL_CHARS:]
    for pattern in _PATTERNS:
        found = [letter.upper() for line in tail.splitlines() for letter in pattern.findall(line)]
        valid = [letter for letter in found if letter in letters]
        if valid:
            return valid[-1]
    starts = [letter for letter in _LINE_START.findall(tail) if letter in letters]
    if len(set(starts)) == 1:
        return str(starts[0])
    return _by_choice_text(tail, choices, letters)


def _by_choice_text(tail: str, choices: Sequence[str], letters: str) -> str | None:
    """The letter of the only choice whose text stands in the response."""
    normal = _normal(tail)
    named = [letter for letter, choice in zip(letters, choices, strict=False) if choice and _normal(choice) in normal]
    return named[0] if len(named) == 1 else None
