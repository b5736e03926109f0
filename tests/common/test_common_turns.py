"""Turn records: alignment of ids, mask and log-probs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentic.common.turns import TurnRecord


def record(**changes: Any) -> TurnRecord:
    values: dict[str, Any] = {"tokens": [5, 6, 7], "response_length": 2, "loss_mask": [1, 1]}
    values |= {"rollout_log_probs": [-0.1, -0.2], "role": "planner", "finish_reason": "stop"}
    return TurnRecord(**(values | changes))


def test_from_engine_joins_and_round_trips_through_json() -> None:
    made = TurnRecord.from_engine(
        [5], [6, 7], [-0.1, -0.2], trained=True, role="planner", finish_reason="length", text="ab", weight_version="3"
    )
    assert (made.prompt_ids, made.response_ids, made.prompt_length) == ([5], [6, 7], 1)
    assert TurnRecord.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_untrained_turns_have_a_zero_mask() -> None:
    made = TurnRecord.from_engine([5], [6], [-0.1], trained=False, role="final", finish_reason="stop")
    assert made.loss_mask == [0]
    with pytest.raises(ValueError, match="only 0 in a turn that is not trained"):
        record(trained=False).validate()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"response_length": 0, "loss_mask": [], "rollout_log_probs": []}, "must be at least 1"),
        ({"loss_mask": [1]}, "differ: 1, 2, 2"),
        ({"rollout_log_probs": [-0.1]}, "differ: 2, 1, 2"),
        ({"tokens": [5]}, "response_length 2 exceeds the 1 tokens"),
        ({"finish_reason": "eos"}, "finish_reason 'eos'"),
        ({"loss_mask": [1, 2]}, "only 0 and 1"),
        ({"rollout_log_probs": [-0.1, float("nan")]}, "not finite"),
    ],
)
def test_broken_invariants_raise_with_the_role(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="role 'planner'") as caught:
        record(**changes).validate()
    assert message in str(caught.value)


def test_from_dict_refuses_unknown_keys() -> None:
    with pytest.raises(ValueError, match="unknown keys \\['extra'\\]"):
        TurnRecord.from_dict({**record().to_dict(), "extra": 1})
