"""Rollout function of supervised fine-tuning: a "rollout" tokenises the next chats and asks no engine.

Input: records whose prompt is a list of chat messages that holds the answers; `metadata["tools"]` is rendered with
them. Output: one sample per prompt, response from the first trained token on, reward 0.
Invariants: masks come from `MultiTurnLossMaskGenerator`; rows longer than `--rollout-max-context-len` are cut at the
end; a row without a trained token stays, fully masked, so that the batch keeps its size.
Left out: evaluation, packing (the trainer's work), records that are tokenised already.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def _mask_generator(hf_checkpoint: str, loss_mask_type: str, boundary: bool) -> MultiTurnLossMaskGenerator:
    tokenizer = load_tokenizer(hf_checkpoint, trust_remote_code=True)
    return MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=loss_mask_type, train_boundary_token=boundary)


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Takes `rollout_batch_size` chats from the data source and turns them into training samples.

    Raises ValueError for evaluation, for `--n-samples-per-prompt` other than 1 and for a prompt that is not a chat.
    """
    if evaluation:
        raise ValueError("sft_rollout has no evaluation; set --eval-function-path or leave --eval-interval out")
    if args.n_samples_per_prompt != 1:
        raise ValueError(f"sft_rollout needs --n-samples-per-prompt 1, got {args.n_samples_per_prompt}")
    generator = _mask_generator(args.hf_checkpoint, args.loss_mask_type, getattr(args, "train_boundary_token", False))
    groups: list[list[Sample]] = data_buffer.get_samples(args.rollout_batch_size)
    max_length = getattr(args, "rollout_max_context_len", None)
    for (sample,) in groups:
        _fill(sample, generator, max_length)
    untrained = sum(not any(sample.loss_mask or []) for (sample,) in groups)
    truncated = sum(sample.status is Sample.Status.TRUNCATED for (sample,) in groups)
    if untrained:
        logger.warning("rollout %d: %d of %d chats have no trained token", rollout_id, untrained, len(groups))
    return RolloutFnTrainOutput(
        samples=groups, metrics={"rollout/sft_untrained": untrained, "rollout/sft_truncated": truncated}
    )


def _fill(sample: Sample, generator: MultiTurnLossMaskGenerator, max_length: int | None) -> None:
    """Writes tokens, mask, status and reward of one chat into the sample."""
    messages = sample.prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"sample {sample.index}: SFT needs a list of chat messages, got {messages!r:.80}; "
            "check --input-key and leave --apply-chat-template out"
        )
    tokens, mask = generator.get_loss_mask(messages, tools=sample.metadata.get("tools"))
    truncated = max_length is not None and len(tokens) > max_length
    tokens, mask = tokens[:max_length], mask[:max_length]
    # A chat without a trained token keeps its last token as a masked response: the batch size does not change.
    response_length = max(generator.get_response_lengths([mask])[0], 1)
    sample.tokens = tokens
    sample.loss_mask = mask[-response_length:]
    sample.response_length = response_length
    sample.reward = 0.0
    sample.status = Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED
