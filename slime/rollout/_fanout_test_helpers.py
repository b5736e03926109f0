"""Two hooks that cut an episode into several samples, for trying out fan-out through dotted paths.

Not for training: the cut is arbitrary. What a real fan-out hook must keep is shown here: every part shares the
`rollout_id` and the full reward, and a token is trained in exactly one part.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.rollout.conversion import post_process_rewards
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample


async def compact_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Generates once and returns two samples: the first half of the response, and the rest with that half as prompt."""
    whole = await generate(args, sample, sampling_params)
    whole.rollout_id = whole.index if whole.rollout_id is None else whole.rollout_id
    cut = whole.response_length // 2
    if cut == 0:
        return [whole]
    end = len(whole.tokens) - whole.response_length + cut
    return [_part(whole, whole.tokens[:end], slice(0, cut)), _part(whole, whole.tokens, slice(cut, None))]


def _part(whole: Sample, tokens: list[int], span: slice) -> Sample:
    part = copy.deepcopy(whole)
    part.tokens = list(tokens)
    part.response_length = len(range(whole.response_length)[span])
    part.loss_mask = (whole.loss_mask or [1] * whole.response_length)[span]
    part.rollout_log_probs = None if whole.rollout_log_probs is None else whole.rollout_log_probs[span]
    return part


def grpo_normalize_by_group_index(args: Any, samples: list[Sample]) -> tuple[list[Any], list[float]]:
    """Group normalisation over distinct rollouts of one `group_index`, as the default conversion does it."""
    without_hook = copy.copy(args)
    without_hook.custom_reward_post_process_path = None
    return post_process_rewards(without_hook, samples)
