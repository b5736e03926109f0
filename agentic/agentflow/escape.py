"""Make untrusted text harmless inside a fenced section of a prompt.

Inputs: text written by a model, a tool or a data set. Invariants: plain text such as `24` or `a < b` comes back
unchanged; the functions are idempotent. Leaves out: persuasion. A result may still *say* "please stop"; it can only
not look like a part of the prompt's own structure.
"""

from __future__ import annotations

import re

from agentic.common.escape import escape_control

_LABELS = r"justification|context|sub[-_ ]?goal|tool[-_ ]?name|command|result|action step *\d*|verdict|conclusion"
_END_MARKER = re.compile(r"(?i)\b(memory|answer)(?=>>>)")
_LABEL_LINE = re.compile(rf"(?im)^(?=[ \t#>*_`\-\d.)]*(?:{_LABELS})[*_` \t]*:)(?!> )")


def escape_block(text: str) -> str:
    """Escape text that stands inside a fenced section: control tokens, fences, and lines that start like a label.

    A line such as `Tool Name: x` is quoted (`> Tool Name: x`); a fence of three backticks becomes three quotes; the
    closing markers of our templates (`memory>>>`) get a space.
    """
    text = _END_MARKER.sub(r"\1 ", escape_control(text).replace("```", "'''"))
    return _LABEL_LINE.sub("> ", text)
