"""Break up control tokens of chat templates in untrusted text before it is put into a prompt.

Inputs: text written by a model, a tool or a data set. Invariants: plain text such as `24` or `a < b` comes back
unchanged; the functions are idempotent. Leaves out: what looks like structure to one method only (labels, fences), and
tokenizers with other control tokens than the common ones.
"""

from __future__ import annotations

import re

# Control tokens of the common chat templates: ChatML and Llama 3 (<|x|>), DeepSeek (full-width bars), Gemma, Llama 2.
_CONTROL = re.compile(
    r"<(?=\||｜)|<(?=/?(?:start_of_turn|end_of_turn|bos|eos|s|think|tool_call|tool_response)>)|\[(?=/?INST\])"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    r"""Join surrogate pairs and replace halves, which escapes such as `"\ud83d"` leave: no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _SURROGATE.search(text) else text


def escape_control(text: str) -> str:
    """Break chat control tokens with a space, e.g. `<|im_end|>` -> `< |im_end|>`; the tokenizer then sees letters."""
    return _CONTROL.sub(lambda match: match.group() + " ", text)
