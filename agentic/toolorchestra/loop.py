"""One rollout: the policy decides, the environment acts, until one of them or a budget ends it.

    prompt -> turn of the policy -> parse -> calls | message | error observation -> prompt ...

| exit                                                        | `End.kind` |
| the environment ended (answer, stop of the user, tau2 limit) | completed  |
| too many malformed turns in a row; a turn without end token  | completed, outcome 0 |
| generation limit, context or turn budget reached             | truncated  |
| engine aborted; expert, retriever or user down; time is over | an `InfrastructureError` leaves `run` |

Inputs: what all rollouts share (`Crew`), an environment, sampling parameters. Invariants: turns, tokens and wall clock are
checked before a call, and no call outlives the rollout's deadline; a malformed turn is an observation, not an exit; what a
turn cost is in the ledger before the next one begins; what was recorded stays readable after an error.
Leaves out: samples and rewards (`rollout`), rows (`layouts`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from agentic.common.errors import InfrastructureError, PromptTooLong
from agentic.common.turns import TurnRecord
from agentic.toolorchestra.crew import Crew
from agentic.toolorchestra.environment import Observation, Outcome, TaskEnvironment
from agentic.toolorchestra.experts import ORCHESTRATOR, ExpertDesk
from agentic.toolorchestra.layouts import LAYOUTS
from agentic.toolorchestra.parsing import ParsedTurn, parse_turn

T = TypeVar("T")

# The engine's text must show control tokens, and its ids the token that ended the turn.
ENGINE_OPTIONS = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
TRUNCATIONS = ("truncated", "context_full", "turn_limit")


class Episode:
    """One rollout. Build a new one for every sample."""

    def __init__(
        self,
        crew: Crew,
        environment: TaskEnvironment,
        desk: ExpertDesk,
        sampling_params: Mapping[str, Any],
        deadline: float,
        session_id: str | None = None,
    ) -> None:
        """`deadline` on the clock of `time.monotonic`; `session_id` pins the rollout to one engine."""
        self.crew = crew
        self.environment = environment
        self.desk = desk
        self.layout = LAYOUTS[crew.config.layout](crew.chat, crew.config, environment)
        self.turns: list[TurnRecord] = []
        self.valid_turns = self.malformed_turns = 0
        self.ended: str | None = None
        """Why the loop ended the rollout; None when the environment did."""
        self.outcome: Outcome | None = None
        self.tool_seconds = 0.0
        """Wall clock outside the policy."""
        self._deadline = deadline
        self._session_id = session_id
        self._sampling = _sampling(sampling_params, crew.config.max_new_tokens)
        self._malformed_in_a_row = 0

    @property
    def truncated(self) -> bool:
        """A generation, context or turn limit ended the rollout."""
        return self.ended in TRUNCATIONS

    async def run(self) -> Outcome:
        """The whole rollout.

        Raises:
            InfrastructureError: the world failed or the time is over.
            PromptTooLong: not even the first prompt fits.
            Unscored: the judge could not score the answer.
        """
        self.layout.start(await self._outside(self.environment.start()))
        going = True
        while going:
            turn = await self._ask()
            going = turn is not None and await self._take(turn)
        self.outcome = await self._outside(self.environment.outcome(self.ended))
        return self.outcome

    async def _ask(self) -> TurnRecord | None:
        """The next turn; None when a budget leaves no room for it."""
        if len(self.turns) >= self.crew.config.max_turns:
            self.ended = "turn_limit"
            return None
        start, ask = time.monotonic(), self.crew.policy.generate_ids
        try:
            call = ask(self.layout.prompt(), self._sampling, ORCHESTRATOR, session_id=self._session_id)
            turn = await self._within(call)
        except PromptTooLong:
            if not self.turns:
                raise
            self.ended = "context_full"
            return None
        self._charge(turn, time.monotonic() - start)
        if turn.finish_reason == "abort":
            raise InfrastructureError("engine_aborted", f"during turn {len(self.turns) + 1}")
        return turn

    async def _take(self, turn: TurnRecord) -> bool:
        """Carry out a turn; whether another may follow."""
        parsed = self._parse(turn)
        self.turns.append(turn)
        self.layout.add(turn, parsed.format_ok)
        if turn.finish_reason == "length":
            self.ended = "truncated"
            return False
        self.valid_turns += parsed.format_ok
        self.malformed_turns += not parsed.format_ok
        self._malformed_in_a_row = 0 if parsed.format_ok else self._malformed_in_a_row + 1
        if self._malformed_in_a_row >= self.crew.config.max_format_errors:
            self.ended = "format_errors"
            return False
        observation = await self._react(parsed)
        if observation.kind == "end":
            return False
        if not self.layout.observe(observation):
            self.ended = "no_end_token"
        return self.ended is None

    def _parse(self, turn: TurnRecord) -> ParsedTurn:
        if turn.finish_reason == "length":
            return ParsedTurn(errors=("the turn reached its generation limit",))
        chat, environment = self.crew.chat, self.environment
        text = turn.text.removesuffix(chat.end_text)
        limit = self.crew.config.max_calls_per_turn
        return parse_turn(text, environment.tools, environment.category, limit, chat.opens_thought)

    async def _react(self, parsed: ParsedTurn) -> Observation:
        if not parsed.format_ok:
            return Observation("tool", (self._explain("format_error", parsed),))
        if not parsed.calls:
            return await self._outside(self.environment.say(parsed.message_text))
        observation = await self._outside(self.environment.act(parsed.calls))
        if observation.kind == "tool" and (parsed.errors or parsed.ignored):
            return Observation("tool", (*observation.texts, self._explain("partly_done", parsed)))
        return observation

    def _explain(self, name: str, parsed: ParsedTurn) -> str:
        ignored = (f"{parsed.ignored} further calls were ignored",) if parsed.ignored else ()
        return self.crew.prompts.text(name, errors="; ".join((*parsed.errors, *ignored)))

    async def _outside(self, call: Coroutine[Any, Any, T]) -> T:
        """Time outside the policy, within the deadline."""
        start = time.monotonic()
        try:
            return await self._within(call)
        finally:
            self.tool_seconds += time.monotonic() - start

    async def _within(self, call: Coroutine[Any, Any, T]) -> T:
        left = self._deadline - time.monotonic()
        try:
            if left <= 0:
                call.close()  # it must not even begin
                raise asyncio.TimeoutError
            return await asyncio.wait_for(call, left)
        except asyncio.TimeoutError as error:
            limit = self.crew.config.episode_timeout_s
            raise InfrastructureError("episode_timeout", f"{limit:g} s are over, {len(self.turns)} turns") from error

    def _charge(self, turn: TurnRecord, seconds: float) -> None:
        price_in, price_out = self.desk.price(ORCHESTRATOR)
        prompt, completion = turn.prompt_length, turn.response_length
        dollars = prompt * price_in + completion * price_out
        self.desk.ledger.record(ORCHESTRATOR, prompt, completion, seconds, dollars)


def _sampling(hook_params: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The hook's parameters; the lower of its limit and the method's holds."""
    limit = hook_params.get("max_new_tokens") or max_new_tokens
    return {**hook_params, **ENGINE_OPTIONS, "max_new_tokens": min(limit, max_new_tokens)}
