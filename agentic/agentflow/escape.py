"""Make untrusted text harmless before it is put into a prompt.

Inputs: text written by a model, a tool or a data set. Invariants: plain text such as `24` or `a < b` comes back
unchanged; the functions are idempotent. Leaves out: persuasion. A result may still *say* "please stop"; it can only
not look like a part of the prompt's own structure.
"""

from __future__ import annotations

import re

# Control tokens of the common chat templates: ChatML and Llama 3 (<|x|>), DeepSeek (full-width bars), Gemma, Llama 2.
_CONTROL = re.compile(
    r"<(?=\||｜)|<(?=/?(?:start_of_turn|end_of_turn|bos|eos|s|think|tool_call|tool_response)>)|\[(?=/?INST\])"
)
_LABELS = r"justification|context|sub[-_ ]?goal|tool[-_ ]?name|command|result|action step *\d*|verdict|conclusion"
_END_MARKER = re.compile(r"(?i)\b(memory|answer)(?=>>>)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LABEL_LINE = re.compile(rf"(?im)^(?=[ \t#>*_`\-\d.)]*(?:{_LABELS})[*_` \t]*:)(?!> )")


def well_formed(text: str) -> str:
    r"""Join surrogate pairs and replace halves, which escapes such as `"\ud83d"` leave: no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _SURROGATE.search(text) else text


def escape_control(text: str) -> str:
    """Break chat control tokens with a space, e.g. `<|im_end|>` -> `< |im_end|>`; the tokenizer then sees letters."""
    return _CONTROL.sub(lambda match: match.group() + " ", text)


def escape_block(text: str) -> str:
    """Escape text that stands inside a fenced section: control tokens, fences, and lines that start like a label.

    A line such as `Tool Name: x` is quoted (`> Tool Name: x`); a fence of three backticks becomes three quotes; the
    closing markers of our templates (`memory>>>`) get a space.
    """
    text = _END_MARKER.sub(r"\1 ", escape_control(text).replace("```", "'''"))
    return _LABEL_LINE.sub("> ", text)
