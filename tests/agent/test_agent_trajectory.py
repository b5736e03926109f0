"""Message tree to samples: drift, sibling branches, demotion, limits; every generated id is trained once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers_agent import trained_ids
from hypothesis import given
from hypothesis import strategies as st

from slime.agent.trajectory import MessageNode, TrajectoryManager, TurnRecord
from slime.utils.types import Sample


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turn(prompt: list[int], output: list[int], finish: str = "stop", **more: Any) -> TurnRecord:
    return TurnRecord(prompt, output, finish, [-float(i) for i in output], **more)


def base(**more: Any) -> Sample:
    return Sample(index=5, group_index=1, metadata={"task": "t"}, **more)


def record(manager: TrajectoryManager, messages: list[dict], record: TurnRecord, answer: dict | None) -> None:
    manager.record_turn("s", turn=record, prompt_messages=messages, response_message=answer)


def test_one_clean_conversation_is_one_sample() -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1, 2], [3, 4]), said("x"))
    record(manager, [user("a"), said("x"), user("b")], turn([1, 2, 3, 4, 5, 6], [7]), said("y"))
    assert manager.has_session("s") and manager.turn_count("s") == 2
    (sample,) = manager.get_trajectory("s", base_sample=base(), reward=0.5, extra_metadata={"k": 1})
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert sample.response_length == 5
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs == [-3.0, -4.0, 0.0, 0.0, -7.0]
    assert (sample.reward, sample.rollout_id, sample.index, sample.group_index) == (0.5, 5, 5, 1)
    assert sample.status is Sample.Status.COMPLETED
    assert sample.metadata == {"task": "t", "k": 1}
    assert not manager.has_session("s")
    assert manager.get_trajectory("s", base_sample=base()) == []


def test_divergence_inside_a_short_response_is_realigned() -> None:
    manager = TrajectoryManager(fork_threshold_tokens=4)
    record(manager, [user("a")], turn([1, 2], [3, 4, 5]), said("x"))
    record(manager, [user("a"), said("x"), user("b")], turn([1, 2, 3, 9, 5, 6], [7]), said("y"))
    (sample,) = manager.get_trajectory("s", base_sample=base())
    assert sample.tokens == [1, 2, 3, 9, 5, 6, 7]
    assert sample.loss_mask == [1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-3.0, 0.0, 0.0, 0.0, -7.0]


@pytest.mark.parametrize(
    ("threshold", "prompt"),
    [
        (3, [1, 2, 3, 9, 5, 6]),  # the response is not short
        (99, [1, 8, 3, 4, 5, 6]),  # the divergence lies before the response
    ],
)
def test_other_divergence_forks_with_the_full_reward(threshold: int, prompt: list[int]) -> None:
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(manager, [user("a")], turn([1, 2], [3, 4, 5]), said("x"))
    record(manager, [user("a"), said("x"), user("b")], turn(prompt, [7]), said("y"))
    first, second = manager.get_trajectory("s", base_sample=base(rollout_id=9), reward=1.0)
    assert (first.tokens, first.loss_mask) == ([1, 2, 3, 4, 5], [1, 1, 1])
    assert (second.tokens, second.loss_mask) == ([*prompt, 7], [1])
    assert [s.reward for s in (first, second)] == [1.0, 1.0]
    assert [s.rollout_id for s in (first, second)] == [9, 9]


def test_a_turn_shared_by_siblings_is_trained_in_the_first_branch() -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1], [2, 3]), said("x"))
    record(manager, [user("a"), said("x"), user("b")], turn([1, 2, 3, 4], [5]), said("y"))
    record(manager, [user("a"), said("x"), user("c")], turn([1, 2, 3, 6], [7]), said("z"))
    first, second = manager.get_trajectory("s", base_sample=base())
    assert (first.tokens, first.loss_mask) == ([1, 2, 3, 4, 5], [1, 1, 0, 1])
    assert (second.tokens, second.loss_mask) == ([1, 2, 3, 6, 7], [0, 0, 0, 1])


def test_what_the_first_branch_lost_the_second_trains() -> None:
    """The first branch rewrote the end of the shared turn; those ids are trained where they still stand."""
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1], [2, 3]), said("x"))
    record(manager, [user("a"), said("x"), user("b")], turn([1, 2, 9, 4], [5]), said("y"))
    record(manager, [user("a"), said("x"), user("c")], turn([1, 2, 3, 6], [7]), said("z"))
    first, second = manager.get_trajectory("s", base_sample=base())
    assert trained_ids(first) == [2, 5]
    assert trained_ids(second) == [3, 7]


def test_rewritten_short_answer_only_routes() -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1], [2, 3]), said("x"))
    record(manager, [user("a"), said("rewritten"), user("b")], turn([1, 8, 9], [5]), said("y"))
    (sample,) = manager.get_trajectory("s", base_sample=base())
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([1, 8, 9, 5], 1, [1])


def test_rewritten_long_answer_forks() -> None:
    manager = TrajectoryManager(fork_threshold_tokens=2)
    record(manager, [user("a")], turn([1], [2, 3]), said("x"))
    record(manager, [user("a"), said("rewritten"), user("b")], turn([1, 8, 9], [5]), said("y"))
    assert [s.tokens for s in manager.get_trajectory("s", base_sample=base())] == [[1, 2, 3], [1, 8, 9, 5]]


def test_left_out_reasoning_is_the_same_history() -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1], [2]), {**said("x"), "reasoning_content": "because"})
    held, covered = manager.find_held("s", [user("a"), said("x"), user("b")])
    assert held is not None and held.turn is not None and (held.turn.output_ids, covered) == ([2], 2)


def test_compaction_and_sub_agent_are_samples_of_one_rollout() -> None:
    manager = TrajectoryManager()
    record(manager, [user("task")], turn([1], [2]), said("x"))
    record(manager, [user("sub task")], turn([10], [11]), said("found"))
    record(manager, [user("task"), said("x"), user("found")], turn([1, 2, 3], [4]), said("y"))
    record(manager, [user("summary")], turn([20], [21]), said("z"))
    samples = manager.get_trajectory("s", base_sample=base(), reward=1.0)
    assert [s.tokens for s in samples] == [[1, 2, 3, 4], [10, 11], [20, 21]]
    assert {s.rollout_id for s in samples} == {5}
    assert sorted(token for s in samples for token in trained_ids(s)) == [2, 4, 11, 21]


def test_limit_cuts_all_lists_alike() -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1, 2], [3, 4, 5]), said("x"))
    (sample,) = manager.get_trajectory("s", base_sample=base(), max_sample_tokens=4)
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 3, 4], [1, 1], [-3.0, -4.0])
    assert (sample.response_length, sample.status) == (2, Sample.Status.TRUNCATED)
    record(manager, [user("a")], turn([1, 2], [3, 4, 5]), said("x"))
    assert manager.get_trajectory("s", base_sample=base(), max_sample_tokens=2) == []


@pytest.mark.parametrize(("finish", "status"), [("length", "truncated"), ("abort", "aborted"), ("stop", "completed")])
def test_status_is_the_last_turns(finish: str, status: str) -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1], [2], finish, weight_version="3", ill_formed=True), said("x"))
    (sample,) = manager.get_trajectory("s", base_sample=base())
    assert sample.status.value == status
    assert sample.weight_versions == ["3"]
    assert sample.metadata["ill_formed_turns"] == 1


def test_a_turn_without_output_trains_nothing_and_says_truncated() -> None:
    manager = TrajectoryManager()
    record(manager, [user("a")], turn([1], [2]), said("x"))
    record(manager, [user("a"), said("x"), user("b")], turn([1, 2, 3], [], "length"), said(""))
    (sample,) = manager.get_trajectory("s", base_sample=base())
    assert (sample.tokens, sample.status) == ([1, 2], Sample.Status.TRUNCATED)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="2 output ids but 1 log-probs"):
        TurnRecord([1], [2, 3], "stop", [0.0])
    with pytest.raises(ValueError, match="drop_session"):
        TrajectoryManager().get_trajectory("s", base_sample=None)  # type: ignore[arg-type]


def test_samples_do_not_share_state_with_their_base() -> None:
    manager, origin = TrajectoryManager(), base()
    record(manager, [user("a")], turn([1], [2]), said("x"))
    (sample,) = manager.get_trajectory("s", base_sample=origin, reward=1.0)
    sample.metadata["task"] = "other"
    assert origin.metadata == {"task": "t"} and origin.tokens == [] and origin.reward is None


def test_deep_conversations_do_not_recurse() -> None:
    root = node = MessageNode()
    for _ in range(3000):
        node = node.add_child(MessageNode(role="user", message=user("a")))
    assert list(root.leaves()) == [node] and len(node.path_from_root()) == 3001 and root.is_root


@given(st.integers(0, 10_000))
def test_every_generated_id_is_trained_exactly_once(seed: int) -> None:
    """Random trees of clean continuations, with compactions: unique output ids come back once each, in context."""
    rng, manager, fresh = random.Random(seed), TrajectoryManager(), iter(range(100, 100_000))
    states: list[tuple[list[dict], list[int]]] = [([user("0")], [1])]
    outputs: dict[int, list[int]] = {}
    for step in range(12):
        messages, prompt = rng.choice(states)
        output = [next(fresh) for _ in range(rng.randint(1, 3))]
        record(manager, messages, turn(prompt, output), said(f"a{step}"))
        outputs.update({token: [*prompt, *output[:i]] for i, token in enumerate(output)})
        tail = [next(fresh)]
        states.append(([*messages, said(f"a{step}"), user(f"u{step}")], [*prompt, *output, *tail]))
        if rng.random() < 0.2:
            states.append(([user(f"summary {step}")], [next(fresh)]))
    seen: list[int] = []
    for sample in manager.get_trajectory("s", base_sample=base()):
        first = len(sample.tokens) - sample.response_length
        for i, keep in enumerate(sample.loss_mask):
            if keep:
                token = sample.tokens[first + i]
                assert sample.tokens[: first + i] == outputs[token]
                assert sample.rollout_log_probs[i] == -float(token)
                seen.append(token)
    assert sorted(seen) == sorted(outputs)
