"""The policy's chat template as the stream needs it: the first prompt, and what stands between two of its turns.

Inputs: a Hugging Face tokenizer with a chat template. Invariants: a delta is what the template itself writes behind an
assistant turn's end token, up to and with the next generation prefix, encoded as one string; that this equals the whole
conversation's ids is checked once for the template (`ChatFormat` raises otherwise); texts that come from outside cannot
contain control tokens, and are cut to their budget before they are rendered.
Leaves out: thoughts. Templates that drop earlier thoughts when a user speaks do so only when a prompt is rendered anew;
in a stream the policy keeps seeing its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from agentic.common.errors import ConfigError
from agentic.toolorchestra.parsing import THINK_CLOSE, THINK_OPEN

Message = Mapping[str, Any]
_TURN = "probe of an assistant turn"
_ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "probe of a question"},
    {"role": "assistant", "content": _TURN},
]
_PROBES = ('first "probe"\nof a result', "second probe")
_TOOL = {"type": "function", "function": {"name": "probe_tool", "description": "d", "parameters": {"type": "object"}}}
CUT_NOTE = "\n[cut: {} characters left out]"
NOTE_TOKENS = 16


class ChatFormat:
    """First prompt and deltas of one tokenizer and its template options."""

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        describe_tools: Callable[[Sequence[Mapping[str, Any]]], str] | None = None,
        continued: bool = True,
    ) -> None:
        """`options` go to the template; `describe_tools` writes the tools into the system message where the template
        does not show them. With `continued=False` there are no deltas, and any template will do.

        Raises:
            ConfigError: the template cannot be continued turn by turn; says which property it lacks.
        """
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._describe_tools = describe_tools
        self._control = _control_pattern(tokenizer)
        before, prefix = self._probe_prefix()
        self.opens_thought = THINK_OPEN in prefix.rpartition(THINK_CLOSE)[2]
        """The generation prefix opens the thought, so a completion does not."""
        self.end_text: str = tokenizer.eos_token or ""
        self.end_id: int = tokenizer.eos_token_id
        """The token with which the policy ends a turn."""
        if continued:
            self.end_text, self.end_id = self._probe_end(before, prefix)
            for role, texts in (("tool", _PROBES[:1]), ("tool", _PROBES), ("user", _PROBES[:1])):
                self._check_delta(role, texts, prefix)
        self.shows_tools = "probe_tool" in self._render(_ASKED[:1], tools=[_TOOL])

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a prompt that is ready for the policy's turn; what users and tools say is neutralised."""
        foreign = ("user", "tool")
        shown = [{**m, "content": self.neutralise(m["content"])} if m["role"] in foreign else m for m in messages]
        if tools and not self.shows_tools and self._describe_tools is not None:
            shown = _with_system(shown, self._describe_tools(tools))
            tools = ()
        return self._encode(self._render(shown, tools=list(tools) or None))

    def delta(self, role: str, texts: Sequence[str], budget: int | None = None) -> list[int]:
        """Ids between the end token of a turn and the next turn: messages of `role` (`tool` or `user`), one per text.

        Each text is neutralised and cut to `budget` tokens.
        """
        messages = [{"role": role, "content": self.clean(text, budget)} for text in texts]
        return self._encode(self._split(messages)[1])

    def clean(self, text: str, budget: int | None = None) -> str:
        """The text without control tokens, at most `budget` tokens long."""
        text = self.neutralise(text)
        return text if budget is None else self._cut(text, budget)

    def neutralise(self, text: str) -> str:
        """Break up every spelling of an added token (`<|im_end|>` becomes `< |im_end|>`) and mend lone surrogates."""
        return break_up(text, self._control)

    def _cut(self, text: str, budget: int) -> str:
        """A beginning that fits, with a note; the text itself when it fits whole."""
        if len(text.encode()) <= budget:
            return text  # a token is at least a byte
        # Hardly any text has more characters to a token; what is behind them need not be encoded to know that it is cut.
        shown = text[: 8 * budget]
        while shown and (count := len(self._encode(_noted(text, shown)))) > budget:
            shown = shown[: int(len(shown) * max(budget - NOTE_TOKENS, 0) / count)]
        return _noted(text, shown)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def _render(self, messages: Sequence[Message], tools: Any = None, generate: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generate, **self._options
        )
        return text

    def _split(self, messages: Sequence[Message]) -> tuple[str, str]:
        """(text up to and with the end token of the probe turn, what follows)."""
        text = self._render([*_ASKED, *messages])
        cut = text.index(_TURN) + len(_TURN) + len(self.end_text)
        return text[:cut], text[cut:]

    def _probe_prefix(self) -> tuple[str, str]:
        """(rendered question, generation prefix)."""
        try:
            before, prompt = self._render(_ASKED[:1], generate=False), self._render(_ASKED[:1])
        except (TemplateError, ValueError, AttributeError) as error:
            raise _unsuited(f"it cannot be rendered ({error})") from error
        if not prompt.startswith(before) or prompt == before:
            raise _unsuited("add_generation_prompt adds nothing behind the conversation")
        return before, prompt[len(before) :]

    def _probe_end(self, before: str, prefix: str) -> tuple[str, int]:
        text = self._render(_ASKED, generate=False)
        header, found, rest = text.removeprefix(before).partition(_TURN)
        # An empty thought may be part of the header, of the prefix, or of both.
        alike = header and (header.startswith(prefix) or prefix.startswith(header))
        if not text.startswith(before) or not found or not alike:
            raise _unsuited("an assistant turn does not stand behind the generation prefix")
        end = self._control.match(rest) if self._control is not None else None
        ids = self._encode(end.group()) if end else []
        if end is None or len(ids) != 1:
            raise _unsuited(f"an assistant turn ends with {rest[:40]!r}, not with a control token")
        return end.group(), ids[0]

    def _check_delta(self, role: str, texts: Sequence[str], prefix: str) -> None:
        extra = [{"role": role, "content": text} for text in texts]
        try:
            text = self._render([*_ASKED, *extra])
        except (TemplateError, ValueError) as error:
            raise _unsuited(f"it has no {role} messages ({error})") from error
        found = text.partition(_TURN)[2]
        if text.count(_TURN) != 1 or not found.startswith(self.end_text) or not text.endswith(prefix):
            raise _unsuited(f"a {role} message behind an assistant turn changes how that turn ends")
        if not all(probe.split()[0] in found for probe in texts):
            raise _unsuited(f"it leaves out {role} messages")
        head, delta = self._split(extra)
        if self._encode(text) != self._encode(head) + self._encode(delta):
            raise _unsuited(f"the ids of a {role} message depend on what stands before it")


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _noted(text: str, shown: str) -> str:
    left_out = len(text) - len(shown)
    return shown + CUT_NOTE.format(left_out) if left_out else shown


def break_up(text: str, control: re.Pattern[str] | None) -> str:
    """The text with a blank behind the first visible character of every match, and without lone surrogates."""
    text = text.encode(errors="replace").decode()
    while control is not None and control.search(text):
        text = control.sub(_broken, text)
    return text


def _broken(match: re.Match[str]) -> str:
    spelling = match.group()
    # Behind a leading blank a further one would leave the spelling whole, and the search without end.
    cut = len(spelling) - len(spelling.lstrip()) + 1
    return f"{spelling[:cut]} {spelling[cut:]}"


def spelling_pattern(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the spellings but blanks, longest first; None when there are none."""
    longest_first = sorted({text for text in spellings if len(text.strip()) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _control_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the spelling of any added token."""
    return spelling_pattern(map(str, getattr(tokenizer, "added_tokens_decoder", {}).values()))


def _unsuited(what: str) -> ConfigError:
    return ConfigError(
        f"the chat template of the policy's tokenizer does not suit orchestra_layout: stream: {what}; use a model "
        "whose template only appends between turns (as Qwen3's does), or orchestra_layout: turns"
    )
