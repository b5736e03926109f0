"""How the turns of a rollout become prompts and rows: one growing stream, or a prompt rebuilt for every turn.

    stream   prompt = all ids so far and the delta of the last observation          -> one row
    turns    prompt = the environment's own, else the conversation rendered anew     -> one row per turn

Inputs: first messages and tools, turns of the policy, observations. Invariants: rows hold exactly what the engine was sent
and returned; both layouts make the same calls in the same order. Leaves out: budgets of time and turns (`loop`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentic.common.errors import PromptTooLong
from agentic.common.turns import TurnRecord
from agentic.toolorchestra.chat_format import ChatFormat
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.environment import Observation, RebuildsPrompt, TaskEnvironment
from agentic.toolorchestra.stream import PolicyStream


@dataclass
class Row:
    """One training row: P prompt ids and R response ids."""

    tokens: list[int]
    loss_mask: list[int]
    """Length R."""
    log_probs: list[float]
    """Length R."""
    turn_spans: list[list[Any]]
    """[start, end, format_ok] of each turn of the policy, in response positions."""
    text: str


class StreamLayout:
    """Everything in one row; what was seen once stays."""

    def __init__(self, chat: ChatFormat, config: OrchestraConfig, environment: TaskEnvironment) -> None:
        self._chat, self._config, self._environment = chat, config, environment
        self._stream = PolicyStream(())
        self._spans: list[list[Any]] = []
        self._texts: list[str] = []

    def start(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """The first prompt."""
        self._stream = PolicyStream(self._chat.first_prompt(messages, self._environment.tools))

    def prompt(self) -> list[int]:
        """Ids of the next request."""
        return self._stream.next_prompt()

    def add(self, turn: TurnRecord, format_ok: bool) -> None:
        """A turn as the engine answered it."""
        self._stream.add_turn(turn)
        end = self._stream.response_length
        self._spans.append([end - turn.response_length, end, format_ok])
        self._texts.append(turn.text)

    def observe(self, observation: Observation) -> bool:
        """What the policy sees next; False when the last turn has no end token, so that nothing can follow it."""
        if self._stream.tokens[-1] != self._chat.end_id:
            return False
        delta = self._chat.delta(observation.kind, observation.texts, self._config.max_tool_tokens)
        self._stream.observe(delta)
        return True

    def rows(self) -> list[Row]:
        """The row, or none before the first turn."""
        stream = self._stream
        row = Row(stream.tokens, stream.loss_mask, stream.log_probs, self._spans, "\n".join(self._texts))
        return [row] if stream.response_length else []


class TurnsLayout:
    """A row per turn; the prompt is bounded, its oldest messages go first."""

    def __init__(self, chat: ChatFormat, config: OrchestraConfig, environment: TaskEnvironment) -> None:
        self._chat, self._config, self._environment = chat, config, environment
        self._messages: list[Mapping[str, Any]] = []
        self._kept = 0
        self._rows: list[Row] = []

    def start(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """The messages that are never left out."""
        self._messages, self._kept = list(messages), len(messages)

    def prompt(self) -> list[int]:
        """Ids of the next request: the environment's prompt, else the conversation without its oldest middle.

        Raises:
            PromptTooLong: not even the first messages and the last one leave room for a turn.
        """
        if isinstance(self._environment, RebuildsPrompt):
            return self._chat.first_prompt(self._environment.state_prompt(), self._environment.tools)
        messages, limit = self._messages, self._config.max_context_len - self._config.max_new_tokens
        ids = self._chat.first_prompt(messages, self._environment.tools)
        while len(ids) > max(limit, 1) and len(messages) > self._kept:
            # The policy's turn and what came of it go together.
            rest = messages[self._kept + 1 :]
            while rest and rest[0]["role"] != "assistant":
                rest = rest[1:]
            messages = [*messages[: self._kept], *rest]
            ids = self._chat.first_prompt(messages, self._environment.tools)
        if len(ids) >= self._config.max_context_len:
            raise PromptTooLong(f"prompt of {len(ids)} tokens in a context of {self._config.max_context_len}")
        self._messages = messages
        return ids

    def add(self, turn: TurnRecord, format_ok: bool) -> None:
        """A turn as the engine answered it."""
        span = [0, turn.response_length, format_ok]
        self._rows.append(Row(turn.tokens, turn.loss_mask, turn.rollout_log_probs, [span], turn.text))
        self._messages.append({"role": "assistant", "content": turn.text.removesuffix(self._chat.end_text)})

    def observe(self, observation: Observation) -> bool:
        """What the policy sees next, cut to its budget; always True."""
        for text in observation.texts:
            content = self._chat.clean(text, self._config.max_tool_tokens)
            self._messages.append({"role": observation.kind, "content": content})
        return True

    def rows(self) -> list[Row]:
        """One row per turn."""
        return self._rows


LAYOUTS: dict[str, type[StreamLayout] | type[TurnsLayout]] = {"stream": StreamLayout, "turns": TurnsLayout}
