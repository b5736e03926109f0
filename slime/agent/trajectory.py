"""One message tree per session, and the samples that are cut from it.

Inputs: turns as the engine answered them (prompt ids, output ids, log-probs), each under the messages it answered.
Invariants: the ids of a sample are ids the engine consumed and produced, in that order; mask 1 stands only on generated
ids that were generated in exactly the context the sample shows; every generated id has mask 1 in at most one sample,
and in exactly one unless the client rewrote it or a length limit cut it off; tokens, mask and log-probs have one length.
Every sample carries the full reward and one `rollout_id`: it is the reducer's business to count a rollout once.
Leaves out: where the ids come from (`adapters`), and decoding.

How the next turn's prompt compares with the ids held so far:
    CLEAN    it begins with all of them: the rest is appended with mask 0
    REALIGN  it differs inside the last response, and that response is short: the rest is overwritten, mask 0
    FORK     anything else: a new sample begins with that prompt
"""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

DEFAULT_FORK_THRESHOLD_TOKENS = 1024

_STATUS = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}


@dataclass(frozen=True)
class TurnRecord:
    """One engine call. P prompt ids, N output ids."""

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    output_log_probs: list[float] = field(default_factory=list)
    """Natural log-probability of each output id, length N; empty when the engine gave none (0.0 is stored then)."""
    ill_formed: bool = False
    """The text looks like a tool call that cannot be read."""
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if self.output_log_probs and len(self.output_log_probs) != len(self.output_ids):
            raise ValueError(f"{len(self.output_ids)} output ids but {len(self.output_log_probs)} log-probs")


class MessageNode:
    """One message of a conversation; the root has none. An assistant node the engine wrote has a `turn`."""

    def __init__(
        self,
        *,
        role: str | None = None,
        message: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        parent: MessageNode | None = None,
    ) -> None:
        self.role = role
        self.message = message
        self.metadata = dict(metadata or {})
        self.parent = parent
        self.children: list[MessageNode] = []
        self.turn: TurnRecord | None = None
        """None: the node only routes, nothing of it is trained."""
        self.trained = 0
        """How many of the turn's first output ids a sample already trains."""

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def add_child(self, child: MessageNode) -> MessageNode:
        """Hang `child` below this node; returns it."""
        child.parent = self
        self.children.append(child)
        return child

    def path_from_root(self) -> list[MessageNode]:
        """All nodes from the root (included) to this one."""
        path: list[MessageNode] = []
        node: MessageNode | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def leaves(self) -> Iterator[MessageNode]:
        """Childless nodes below (or this one), first branch first."""
        stack = [self]
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack.extend(reversed(node.children))

    def find_child(self, message: dict[str, Any]) -> MessageNode | None:
        """The latest child that is this message; clients may leave out reasoning they were shown."""
        same = next((c for c in reversed(self.children) if c.message == message), None)
        if same is not None or message.get("role") != "assistant":
            return same
        said = _without_reasoning(message)
        return next((c for c in reversed(self.children) if c.message and _without_reasoning(c.message) == said), None)


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


class DriftKind(enum.Enum):
    """How a prompt continues the ids held so far; see the module's docstring."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that are equal."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


@dataclass
class _Span:
    """Where a turn's output stands in a sample."""

    node: MessageNode
    start: int
    end: int


class _SampleBuilder:
    """One sample in the making: the first turn's prompt, then response ids with mask and log-probs."""

    def __init__(self, node: MessageNode) -> None:
        turn = _turn_of(node)
        self.tokens = list(turn.prompt_ids)
        self.prompt_length = len(self.tokens)
        self.mask: list[int] = []
        self.log_probs: list[float] = []
        self.spans: list[_Span] = []
        self.last = turn
        self.ill_formed = 0
        self.versions: list[str] = []
        self._append_output(node)

    def drift(self, prompt_ids: list[int], fork_threshold: int) -> tuple[DriftKind, int]:
        """(kind, number of held ids that stay)."""
        same = common_prefix_length(self.tokens, prompt_ids)
        if same == len(self.tokens):
            return DriftKind.CLEAN, same
        last = self.spans[-1]
        if same >= last.start and last.end - last.start < fork_threshold:
            return DriftKind.REALIGN, same
        return DriftKind.FORK, same

    def append(self, node: MessageNode, fork_threshold: int) -> bool:
        """Append a turn; False, and nothing changed, when it needs a sample of its own."""
        turn = _turn_of(node)
        kind, same = self.drift(turn.prompt_ids, fork_threshold)
        if kind is DriftKind.FORK:
            return False
        self._cut(same)
        tail = turn.prompt_ids[same:]
        self._extend(tail, [0] * len(tail), [0.0] * len(tail))
        self._append_output(node)
        return True

    def build(self, base: Sample, reward: Any, metadata: dict[str, Any], max_tokens: int) -> Sample | None:
        """The sample, at most `max_tokens` ids long when that is positive; None when it would train nothing."""
        cut = 0 < max_tokens < len(self.tokens)
        if cut:
            self._cut(max_tokens)
        if not any(self.mask):
            return None
        for span in self.spans:
            span.node.trained = max(span.node.trained, span.end - span.start)
        sample = copy.deepcopy(base)
        sample.tokens, sample.response_length = self.tokens, len(self.mask)
        sample.loss_mask, sample.rollout_log_probs = self.mask, self.log_probs
        sample.response = ""
        sample.reward = reward
        sample.rollout_id = base.rollout_id if base.rollout_id is not None else base.index
        sample.status = _STATUS["length"] if cut else _STATUS.get(self.last.finish_reason, Sample.Status.COMPLETED)
        sample.weight_versions = list(self.versions)
        sample.metadata = {**(sample.metadata or {}), **metadata}
        if self.ill_formed:
            sample.metadata["ill_formed_turns"] = self.ill_formed
        return sample

    def close(self, turn: TurnRecord) -> None:
        """Take note of a turn without output, which ends a chain when the context is full."""
        self.last = turn

    def _append_output(self, node: MessageNode) -> None:
        turn = _turn_of(node)
        start, size = len(self.tokens), len(turn.output_ids)
        # What an earlier sample trains already is context here.
        mask = [0] * min(node.trained, size) + [1] * (size - min(node.trained, size))
        self._extend(turn.output_ids, mask, turn.output_log_probs or [0.0] * size)
        self.spans.append(_Span(node, start, start + size))
        self.last = turn
        self.ill_formed += int(turn.ill_formed)
        self.versions += [turn.weight_version] if turn.weight_version is not None else []

    def _extend(self, ids: Sequence[int], mask: Sequence[int], log_probs: Sequence[float]) -> None:
        if not len(ids) == len(mask) == len(log_probs):
            raise ValueError(f"{len(ids)} ids, {len(mask)} mask values, {len(log_probs)} log-probs")
        self.tokens += ids
        self.mask += mask
        self.log_probs += log_probs

    def _cut(self, length: int) -> None:
        """Keep the first `length` ids."""
        kept = max(length - self.prompt_length, 0)
        del self.tokens[length:], self.mask[kept:], self.log_probs[kept:]
        for span in self.spans:
            span.end = max(min(span.end, length), span.start)


def _turn_of(node: MessageNode) -> TurnRecord:
    assert node.turn is not None, "a chain holds generated nodes only"
    return node.turn


@dataclass
class _Conversation:
    root: MessageNode = field(default_factory=MessageNode)
    turns: int = 0


class TrajectoryManager:
    """Message trees by session id. Not locked: a session's turns are recorded by one event loop."""

    def __init__(self, *, fork_threshold_tokens: int | None = None) -> None:
        """`fork_threshold_tokens` (None: 1024): outputs shorter than it are realigned when a client rewrote them."""
        default = DEFAULT_FORK_THRESHOLD_TOKENS
        self.fork_threshold_tokens = default if fork_threshold_tokens is None else fork_threshold_tokens
        self._sessions: dict[str, _Conversation] = {}

    def has_session(self, sid: str) -> bool:
        """Whether a turn of this session is held."""
        return sid in self._sessions

    def turn_count(self, sid: str) -> int:
        """Recorded turns of the session, 0 for an unknown one."""
        return self._sessions[sid].turns if sid in self._sessions else 0

    def find_held(self, sid: str, prompt_messages: Sequence[dict[str, Any]]) -> tuple[MessageNode | None, int]:
        """(the latest generated node these messages contain, how many of them it covers); (None, 0) without one."""
        node = self._sessions[sid].root if sid in self._sessions else None
        held, covered = None, 0
        for count, message in enumerate(prompt_messages, 1):
            node = node.find_child(message) if node is not None else None
            if node is None:
                break
            if node.turn is not None:
                held, covered = node, count
        return held, covered

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: list[dict[str, Any]],
        response_message: dict[str, Any] | None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Hang the engine's answer below the messages it answered; `response_message` None: no history will name it."""
        session = self._sessions.setdefault(sid, _Conversation())
        node = session.root
        for message in prompt_messages:
            node = node.find_child(message) or self._add_foreign(node, message)
        answer = MessageNode(role="assistant", message=copy.deepcopy(response_message), metadata=metadata)
        answer.turn = turn
        node.add_child(answer)
        session.turns += 1

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """The session's samples, first branch first; the session is forgotten. [] for an unknown one.

        `max_sample_tokens` > 0 cuts longer samples. Raises ValueError without a base sample.
        """
        if base_sample is None:
            raise ValueError(f"session {sid!r} needs a base_sample; use drop_session to clean up")
        session = self._sessions.pop(sid, None)
        if session is None:
            return []
        samples: list[Sample] = []
        for chain in _chains(session.root):
            # One after the other: what a sample trains, a later one must not.
            for builder in self._builders(chain):
                sample = builder.build(base_sample, reward, extra_metadata or {}, max_sample_tokens)
                samples += [sample] if sample is not None else []
        return samples

    def drop_session(self, sid: str) -> None:
        """Forget the session, if it is known."""
        self._sessions.pop(sid, None)

    def _add_foreign(self, node: MessageNode, message: dict[str, Any]) -> MessageNode:
        """A message we did not write. Where it stands for a short answer of ours, that answer only routes from now on."""
        if message.get("role") == "assistant":
            rewritten = next((c for c in reversed(node.children) if self._is_rewritable(c)), None)
            if rewritten is not None:
                logger.debug("the client rewrote a turn of %d tokens", len(_turn_of(rewritten).output_ids))
                rewritten.turn = None
        return node.add_child(MessageNode(role=message.get("role"), message=copy.deepcopy(message)))

    def _is_rewritable(self, node: MessageNode) -> bool:
        return node.turn is not None and not node.children and len(node.turn.output_ids) < self.fork_threshold_tokens

    def _builders(self, chain: list[MessageNode]) -> Iterator[_SampleBuilder]:
        """The samples of one chain of turns, each finished before the next begins."""
        builder: _SampleBuilder | None = None
        for node in chain:
            turn = _turn_of(node)
            if not turn.output_ids:
                if builder is not None:
                    builder.close(turn)
            elif builder is None or not builder.append(node, self.fork_threshold_tokens):
                if builder is not None:
                    yield builder
                builder = _SampleBuilder(node)
        if builder is not None:
            yield builder


def _chains(root: MessageNode) -> list[list[MessageNode]]:
    """Generated nodes along each branch, without chains that another one continues."""
    chains = [[node for node in leaf.path_from_root() if node.turn is not None] for leaf in root.leaves()]
    continued = {id(node) for chain in chains for node in chain[:-1]}
    ends: dict[int, list[MessageNode]] = {}
    for chain in chains:
        if chain and id(chain[-1]) not in continued:
            ends.setdefault(id(chain[-1]), chain)
    return list(ends.values())
