"""SFT rollout: tokens and masks of chats, cutting, chats without a trained token."""

from __future__ import annotations

import pytest
from helpers_rollout import rollout_args, save_tiny_tokenizer, write_jsonl

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sft_rollout import generate_rollout
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "AAA"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "BB"},
]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tok"))


def sft(tokenizer_dir, tmp_path, chats, **overrides):
    data = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": chat} for chat in chats])
    values = {"n_samples_per_prompt": 1, "rollout_batch_size": len(chats), "prompt_data": data, "label_key": None}
    args = rollout_args(tokenizer_dir, **{**values, **overrides})
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_tokens_are_the_rendered_chat_and_the_mask_covers_the_answers(tokenizer_dir, tmp_path):
    output = sft(tokenizer_dir, tmp_path, [TURNS])
    ((sample,),) = output.samples
    tokenizer = load_tokenizer(tokenizer_dir)
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert sample.tokens == tokenizer.encode(text, add_special_tokens=False)
    assert len(sample.loss_mask) == sample.response_length and sample.loss_mask[0] == 1
    trained = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    decoded = tokenizer.decode(trained)
    assert "AAA" in decoded and "BB" in decoded and "two" not in decoded and "user" not in decoded
    assert (sample.reward, sample.status) == (0.0, Sample.Status.COMPLETED)


def test_long_chats_are_cut_at_the_end(tokenizer_dir, tmp_path):
    whole = sft(tokenizer_dir, tmp_path, [TURNS]).samples[0][0]
    output = sft(tokenizer_dir, tmp_path, [TURNS], rollout_max_context_len=len(whole.tokens) - 4)
    ((sample,),) = output.samples
    assert sample.tokens == whole.tokens[:-4] and sample.loss_mask == whole.loss_mask[:-4]
    assert sample.status is Sample.Status.TRUNCATED and output.metrics["rollout/sft_truncated"] == 1


def test_a_chat_without_trained_tokens_stays_fully_masked(tokenizer_dir, tmp_path):
    silent = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "A", "step_loss_mask": 0}]
    output = sft(tokenizer_dir, tmp_path, [silent, TURNS])
    sample = output.samples[0][0]
    assert sample.response_length == 1 and sample.loss_mask == [0] and len(output.samples) == 2
    assert output.metrics["rollout/sft_untrained"] == 1


@pytest.mark.parametrize("overrides, match", [({"n_samples_per_prompt": 2}, "--n-samples-per-prompt")])
def test_wrong_settings_are_errors(tokenizer_dir, tmp_path, overrides, match):
    with pytest.raises(ValueError, match=match):
        sft(tokenizer_dir, tmp_path, [TURNS], **overrides)


def test_text_prompts_are_an_error(tokenizer_dir, tmp_path):
    with pytest.raises(ValueError, match="list of chat messages"):
        sft(tokenizer_dir, tmp_path, ["plain text"])


def test_evaluation_is_an_error(tokenizer_dir):
    with pytest.raises(ValueError, match="no evaluation"):
        generate_rollout(rollout_args(tokenizer_dir), 0, None, evaluation=True)
