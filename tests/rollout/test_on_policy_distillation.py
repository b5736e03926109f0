"""The engine teacher: what is sent, what is read, and what is refused."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.rollout import conversion
from slime.rollout import on_policy_distillation as opd
from slime.utils.types import Sample

ARGS = Namespace(rm_url="http://127.0.0.1:1/generate", rollout_temperature=0.7)


def answer(tokens: list[int], shift: float = 0.0) -> dict[str, Any]:
    """What a server returns: one (log-prob, id, text) per token, None for the first."""
    first, *rest = tokens
    return {
        "meta_info": {"input_token_logprobs": [[None, first, None], *([-float(t) - shift, t, None] for t in rest)]}
    }


def make(tokens: list[int], length: int, **more: Any) -> Sample:
    return Sample(tokens=tokens, response_length=length, index=3, status=Sample.Status.COMPLETED, **more)


async def test_ids_are_sent_and_the_raw_answer_is_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
        seen.append((url, payload))
        return answer(payload["input_ids"])

    monkeypatch.setattr(opd, "post", post)
    reward = await opd.reward_func(ARGS, make([5, 6, 7], 2))
    assert reward == answer([5, 6, 7])
    ((url, payload),) = seen
    assert url == ARGS.rm_url and payload == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    both = await opd.reward_func(ARGS, [make([5, 6], 1), make([7, 8], 1)])
    assert both == [answer([5, 6]), answer([7, 8])], "as a group or a rollout cut in several is scored"
    with pytest.raises(ValueError, match="--rm-url"):
        await opd.reward_func(Namespace(rm_url=None), make([5, 6], 1))


def test_last_values_belong_to_the_response_and_rewards_are_zero() -> None:
    samples = [
        make(tokens, length, reward=answer(tokens)) for tokens, length in (([5, 6, 7], 2), ([8, 9], 1), ([8, 9], 0))
    ]
    assert opd.post_process_rewards(ARGS, samples) == ([0.0] * 3, [0.0] * 3)
    assert [sample.teacher_log_probs for sample in samples] == [[-6.0, -7.0], [-9.0], []]


def test_the_last_id_of_the_vocabulary_is_reported_as_zero() -> None:
    sample = make([5, 303, 7], 2, reward=answer([5, 0, 7]))
    opd.post_process_rewards(ARGS, [sample])
    assert sample.teacher_log_probs == [0.0, -7.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (None, "sample 3: no answer of the teacher"),
        ({"error": "x"}, "sample 3: no answer of the teacher"),
        (answer([5, 6, 8]), "sample 3: the teacher scored 2 other tokens than the 2 sent"),
        (answer([5, 6]), "sample 3: the teacher scored 1 other tokens than the 2 sent"),
    ],
)
def test_missing_or_foreign_answers_are_named(reward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opd.post_process_rewards(ARGS, [make([5, 6, 7], 2, reward=reward)])


def test_conversion_brings_teacher_log_probs_and_masks_failures() -> None:
    good = make([5, 6, 7], 2, reward=answer([5, 6, 7]), rollout_log_probs=[-0.1, -0.2])
    failed = Sample(tokens=[5, 6], response_length=1, status=Sample.Status.FAILED, rollout_log_probs=[-0.1])
    args = Namespace(
        custom_reward_post_process_path="slime.rollout.on_policy_distillation.post_process_rewards",
        custom_convert_samples_to_train_data_path=None,
        reward_key=None,
    )
    data = conversion.convert_samples_to_train_data(args, [good, failed])
    assert data["teacher_log_probs"] == [[-6.0, -7.0], [0.0]]
    assert data["loss_masks"] == [[1, 1], [0]] and data["rewards"] == [0.0, 0.0]
