"""Chat messages to prompt ids, at the price of the new messages only.

Inputs: a tokenizer with a chat template; the messages of a request; the ids a session holds for their beginning.
A continued prompt is: held ids (as the engine consumed and produced them) + what the template writes behind an assistant
turn for the new messages. So nothing generated is ever encoded again, thoughts that a template would drop from history
stay, and a conversation of N turns costs N turns, not N^2.
Invariants: that the template only appends is checked once per tokenizer, for user and for tool messages: the ids of a
whole conversation equal the ids of its two parts, and the new part does not depend on what stands before it. A template
or a turn that does not pass is rendered whole, and counted in `counts` with the reason. Control tokens spelled out in
what users and tools say are broken up. Leaves out: media.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_TURN = "probe-of-an-assistant-turn"
_ASKED: list[Message] = [{"role": "user", "content": "probe of a question"}, {"role": "assistant", "content": _TURN}]
_QUESTION: list[Message] = [
    {"role": "user", "content": "probe of an earlier question"},
    {"role": "assistant", "content": "probe of an earlier answer"},
]
_CALLED: list[Message] = [
    {"role": "system", "content": "probe of instructions"},
    {"role": "user", "content": "probe of an earlier question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "probe_tool", "arguments": {"probe": 1}}}],
    },
    {"role": "tool", "content": "probe of an earlier result"},
]
_WORDS = ("first-probe\nof a text", "second-probe")
_FOREIGN = ("user", "tool")
# What a template, or a tokenizer that is none of transformers', may raise at a conversation it does not know.
RENDER_ERRORS = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)


class PromptRenderer:
    """Renders for one tokenizer; `counts` says how often a prompt was continued, and why one was not."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.counts: Counter[str] = Counter()
        """`first`: nothing was held; `continued`; `whole: <reason>`: something was held but could not be used."""
        self._control: re.Pattern[str] | None = None
        self._special_ids: frozenset[int] = frozenset()
        self._unsuited: dict[str, str] | None = None

    def whole(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """Ids of the whole conversation, ready for the assistant's turn. Raises one of `RENDER_ERRORS`."""
        shown = [self._neutralised(message) for message in messages]
        rendered = self.tokenizer.apply_chat_template(
            shown, tools=list(tools) if tools else None, tokenize=True, add_generation_prompt=True
        )
        return self._ids(rendered)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        held_ids: Sequence[int] = (),
        covered: int = 0,
        tools_changed: bool = False,
    ) -> list[int]:
        """Ids of the conversation whose first `covered` messages are `held_ids`. Raises one of `RENDER_ERRORS`."""
        reason = "first"
        if covered:
            continued, reason = self._continued(held_ids, messages[covered:], tools_changed)
            if continued is not None:
                self.counts["continued"] += 1
                return continued
        self.counts[reason] += 1
        return self.whole(messages, tools)

    def neutralise(self, text: str) -> str:
        """Break up every spelling of a control token: `<|im_end|>` becomes `< |im_end|>`."""
        self._look_up_tokens()
        return break_up(text, self._control)

    def _continued(
        self, held_ids: Sequence[int], new: Sequence[Message], tools_changed: bool
    ) -> tuple[list[int] | None, str]:
        """(ids, '') or (None, why the conversation has to be rendered whole)."""
        if tools_changed:
            return None, "whole: other tools"
        roles = {str(message.get("role")) for message in new}
        if not roles or not roles <= {*_FOREIGN, "assistant"}:
            return None, "whole: roles " + (", ".join(sorted(roles)) or "none")
        unsuited = self.unsuited()
        reason = unsuited.get("tool", "") if "tool" in roles else ""
        if reason := unsuited.get("user", "") or reason:
            return None, f"whole: {reason}"
        delta = self._encode(self._tail([*_ASKED, *map(self._neutralised, new)]))
        if held_ids[-1] == delta[0]:  # the turn ended with the token the template writes there
            return [*held_ids, *delta[1:]], ""
        if held_ids[-1] in self._special_ids:
            return None, "whole: another end token"
        return [*held_ids, *delta], ""

    def unsuited(self) -> dict[str, str]:
        """Kinds of messages (`user`, `tool`) the template cannot append, with the reason; checked once."""
        if self._unsuited is None:
            self._look_up_tokens()
            found = {role: self._why_unsuited(role) for role in _FOREIGN}
            self._unsuited = {role: reason for role, reason in found.items() if reason}
            for role, reason in self._unsuited.items():
                logger.warning("%s messages are rendered with their whole conversation: %s", role, reason)
        return self._unsuited

    def _why_unsuited(self, role: str) -> str:
        sizes = (1, 2) if role == "tool" else (1,)
        try:
            reasons = [self._check_delta([{"role": role, "content": word} for word in _WORDS[:n]]) for n in sizes]
        except RENDER_ERRORS as error:
            return f"the template does not render the probe ({type(error).__name__})"
        return next(filter(None, reasons), "")

    def _check_delta(self, new: list[Message]) -> str:
        """Why these messages cannot be appended, '' when they can."""
        text = self._text([*_ASKED, *new])
        if not isinstance(text, str) or text.count(_TURN) != 1:
            return "the template gives no text to take apart"
        tail = self._tail([*_ASKED, *new])
        ids = self._encode(tail)
        if not all(message["content"] in tail for message in new):
            return "the template leaves out or rewrites new messages"
        if not ids or ids[0] not in self._special_ids:
            return "an assistant turn does not end with a control token"
        if self._encode(text) != self._encode(text.removesuffix(tail)) + ids:
            return "the ids of new messages depend on what stands before them"
        if self._tail([*_QUESTION, *_ASKED, *new]) != tail or not self._same_after_calls(new, tail):
            return "the text of new messages depends on the conversation"
        return ""

    def _same_after_calls(self, new: list[Message], tail: str) -> bool:
        """Whether earlier calls leave `tail` as it is; for tool messages also a call right before them."""
        try:
            same = self._tail([*_CALLED, *_ASKED, *new]) == tail
            return same and (new[0]["role"] != "tool" or self._text([*_CALLED[:-1], *new]).endswith(tail))
        except RENDER_ERRORS:
            # A template without instructions or calls: fine for what users say.
            return new[0]["role"] == "user"

    def _text(self, messages: Sequence[Message]) -> str:
        text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text

    def _tail(self, messages: Sequence[Message]) -> str:
        """What stands behind the probe of an assistant turn."""
        return self._text(messages).partition(_TURN)[2]

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def _ids(self, rendered: Any) -> list[int]:
        """Plain ids of whatever `apply_chat_template` returned: ids, a batch of one, an encoding, or text."""
        if isinstance(rendered, str):
            return self._encode(rendered)
        if hasattr(rendered, "keys"):
            rendered = rendered["input_ids"]
        ids = rendered.tolist() if hasattr(rendered, "tolist") else list(rendered)
        if ids and isinstance(ids[0], (list, tuple)):
            ids = ids[0]
        return [int(token) for token in ids]

    def _neutralised(self, message: Message) -> Message:
        content = message.get("content")
        if message.get("role") not in _FOREIGN or not isinstance(content, str):
            return message
        return {**message, "content": self.neutralise(content)}

    def _look_up_tokens(self) -> None:
        if self._special_ids:
            return
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        special = {int(i): str(token) for i, token in added.items() if getattr(token, "special", False)}
        eos = getattr(self.tokenizer, "eos_token_id", None)
        self._special_ids = frozenset({*special, *([eos] if eos is not None else [])})
        self._control = spelling_pattern(special.values())


def spelling_pattern(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the spellings, longest first, with or without the blanks around it; None when there are none."""
    longest_first = sorted({text.strip() for text in spellings if len(text.strip()) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def break_up(text: str, control: re.Pattern[str] | None) -> str:
    """The text with a blank behind the first character of every match, until nothing matches.

    A spelling has no blanks around it and at least two characters, so a blank behind its first one always breaks it.
    """
    while control is not None and control.search(text):
        text = control.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", text)
    return text
