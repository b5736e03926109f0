"""The training row of one rollout: exactly the ids the engine consumed and produced, in that order.

Inputs: ids of the first prompt, turns as the engine answered them, deltas (what the chat template adds between turns).
Invariants: one function appends, so ids, mask, log-probs and versions of the response have one length; mask 1 stands on
ids of the engine and nowhere else; every prompt is the stream so far; nothing is ever encoded again; a delta enters the
row only when a turn follows it, so none trails. Leaves out: what the deltas are (`chat_format`).
"""

from __future__ import annotations

from collections.abc import Sequence

from agentic.common.turns import TurnRecord


class PolicyStream:
    """One row: P prompt ids, then R response ids with mask, log-probs and weight versions of length R."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.tokens: list[int] = list(prompt_ids)
        self.prompt_length = len(self.tokens)
        self.loss_mask: list[int] = []
        """1 for ids the policy generated, 0 for deltas; length R."""
        self.log_probs: list[float] = []
        """Natural log-probabilities of the engine, 0.0 in deltas; length R."""
        self.versions: list[str | None] = []
        """Weight version each id was generated with, None in deltas; length R."""
        self._delta: list[int] = []

    @property
    def response_length(self) -> int:
        """R."""
        return len(self.tokens) - self.prompt_length

    def next_prompt(self) -> list[int]:
        """Ids of the next request: all of the row and the pending delta."""
        return [*self.tokens, *self._delta]

    def observe(self, delta: Sequence[int]) -> None:
        """Put a delta behind the last turn; it becomes part of the row when a turn follows."""
        self._delta += delta

    def add_turn(self, turn: TurnRecord) -> None:
        """Append what the engine returned for `next_prompt()`.

        Raises:
            ValueError: the turn is the answer to another prompt.
        """
        if turn.prompt_ids != self.next_prompt():
            raise ValueError(f"the turn continues {turn.prompt_length} ids, the stream has {len(self.next_prompt())}")
        delta, self._delta = self._delta, []
        self._append(delta, [0] * len(delta), [0.0] * len(delta), None)
        self._append(turn.response_ids, turn.loss_mask, turn.rollout_log_probs, turn.weight_version)

    def _append(
        self, ids: Sequence[int], mask: Sequence[int], log_probs: Sequence[float], version: str | None
    ) -> None:
        if not len(ids) == len(mask) == len(log_probs):
            raise ValueError(f"{len(ids)} ids, {len(mask)} mask values, {len(log_probs)} log-probs")
        self.tokens += ids
        self.loss_mask += mask
        self.log_probs += log_probs
        self.versions += [version] * len(ids)
