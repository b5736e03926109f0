r"""Finds the final `\boxed{...}` of a solution by counting braces.

Invariant: the text found is balanced; an unfinished box (a truncated response) is no answer.
Left out: any interpretation of the content.
"""

from __future__ import annotations

_MARKERS = ("\\boxed", "\\fbox")


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` or `\fbox{...}` with its braces, or `\boxed 5` up to the next `$`; None if there is none."""
    start = max(string.rfind(marker) for marker in _MARKERS)
    if start < 0:
        return None
    marker = next(marker for marker in _MARKERS if string.startswith(marker, start))
    body = start + len(marker)
    if string.startswith(" ", body) and not string[body:].lstrip().startswith("{"):
        return string[start:].split("$")[0].rstrip()
    opening = string.find("{", body)
    if opening < 0 or string[body:opening].strip():
        return None
    closing = _closing_brace(string, opening)
    return None if closing is None else string[start : closing + 1]


def _closing_brace(string: str, opening: int) -> int | None:
    depth = 0
    position = opening
    while position < len(string):
        character = string[position]
        if character == "\\":  # an escaped brace (\{ or \}) is text, not structure
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None


def remove_boxed(s: str | None) -> str | None:
    r"""The content of a string that `last_boxed_only_string` returned; None stays None."""
    if s is None:
        return None
    for marker in _MARKERS:
        if s.startswith(marker):
            body = s[len(marker) :].lstrip()
            return body[1:-1].strip() if body.startswith("{") else body.strip()
    return None
