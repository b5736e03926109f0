"""On-policy distillation with an engine as the teacher: the reward of a sample is the teacher's log-probs of its tokens.

    --use-opd --opd-type sglang --rm-url http://TEACHER/generate
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards

The teacher is a plain SGLang server of a model with the same tokenizer. The sample's own token ids are sent, never text, and the ids
that come back are compared. The trainer then subtracts `--opd-kl-coef` x (student - teacher log-prob) from each token's advantage.

Invariants: `teacher_log_probs` has one value per response token; a failed sample gets none (its loss mask is 0).
Left out: images, and teachers on the trainer. An engine computes these log-probs at temperature 1.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> Any:
    """The teacher's raw answer for the sample's tokens (POST to `--rm-url`); `post_process_rewards` reads it.

    A list of samples (one rollout cut in several, or `--group-rm`) gives the list of answers.
    """
    if isinstance(sample, list):
        return list(await asyncio.gather(*(reward_func(args, each) for each in sample)))
    if not args.rm_url:
        raise ValueError("--rm-url: needed by on-policy distillation, the /generate address of the teacher")
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await post(args.rm_url, payload)


def post_process_rewards(args: Namespace, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Move the answers into `sample.teacher_log_probs`; raw and processed rewards are all 0.

    Raises ValueError naming a sample whose answer is missing or belongs to other tokens.
    """
    for sample in samples:
        if sample.status not in (Sample.Status.FAILED, Sample.Status.ABORTED):  # these are never scored
            sample.teacher_log_probs = _teacher_log_probs(sample)
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)


def _teacher_log_probs(sample: Sample) -> list[float]:
    """The last R of the teacher's input log-probs. Entry 0 of the answer is dropped: the first token has no context."""
    answer: Any = sample.reward
    entries = answer["meta_info"]["input_token_logprobs"][1:] if _is_answer(answer) else None
    if entries is None:
        raise ValueError(f"sample {sample.index}: no answer of the teacher, got {sample.reward!r:.200}")
    ids = [int(entry[1]) for entry in entries]
    if len(ids) != len(sample.tokens) - 1 or not all(map(_same_token, ids, sample.tokens[1:])):
        raise ValueError(
            f"sample {sample.index}: the teacher scored {len(ids)} other tokens than the {len(sample.tokens) - 1} sent; "
            "it must have the student's tokenizer and no truncation"
        )
    count = sample.response_length
    return [float(entry[0]) for entry in entries[len(entries) - count :]]


def _same_token(reported: int, sent: int) -> bool:
    # SGLang reports the last id of the vocabulary as 0 (it takes it for the placeholder of an image), with the right log-prob.
    return reported in (sent, 0)


def _is_answer(reward: Any) -> bool:
    meta = reward.get("meta_info") if isinstance(reward, dict) else None
    return isinstance(meta, dict) and isinstance(meta.get("input_token_logprobs"), list)
