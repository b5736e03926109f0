"""mask_utils on a real fast tokenizer (byte-level, built here) with ChatML, reasoning-dropping and distill templates."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3: consecutive tool messages share one user turn; reasoning survives only after the last user message.
REASONING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].strip() %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' }}\n</think>\n\n"
    "{% endif %}{{ text }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK_PROMPT = REASONING.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)
DISTILL = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
UNSTABLE = "{{ messages | length }}" + CHATML


def build_tokenizer(template: str, extra: tuple[str, ...] = ()) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<eos>", *extra]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["user assistant system tool the answer is four <think> </think>\n\n"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def msg(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


CHAT = [msg("user", "two plus two?"), msg("assistant", "four"), msg("user", "sure? näh"), msg("assistant", "yes, 4 ✓")]
TOOLED = [
    msg("user", "q"),
    msg("assistant", "<think>a</think>call both"),
    msg("tool", "r1"),
    msg("tool", "r2"),
    msg("assistant", "<think>b</think>again"),
    msg("tool", "r3"),
    msg("assistant", "<think>c</think>done"),
]


def mask_texts(
    template: str, messages: list[dict[str, Any]], kind: str = "qwen3", tools: Any = None
) -> tuple[Any, list[int], list[str]]:
    tokenizer = build_tokenizer(template)
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages, tools)
    full = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ids == tokenizer(full, add_special_tokens=False)["input_ids"] and len(mask) == len(ids)
    return tokenizer, mask, generator.get_text_from_loss_mask(ids, mask)


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_chatml_trains_answers_with_their_end_marker(kind: str) -> None:
    expected = ["four<|im_end|>\n", "yes, 4 ✓<|im_end|>\n"]
    assert mask_texts(CHATML, CHAT, kind)[2] == expected
    assert mask_texts(CHATML, [msg("system", "Be brief."), *CHAT], kind)[2] == expected


def test_step_loss_mask_turns_a_turn_off() -> None:
    chat = [CHAT[0], msg("assistant", "four", step_loss_mask=0), *CHAT[2:]]
    assert mask_texts(CHATML, chat)[2] == ["yes, 4 ✓<|im_end|>\n"]


def test_all_turns_off_gives_no_response() -> None:
    chat = [CHAT[0], msg("assistant", "four", step_loss_mask=0)]
    _, mask, texts = mask_texts(CHATML, chat)
    assert sum(mask) == 0 and texts == [] and get_response_lengths([mask]) == [0]


def test_parallel_tool_results_are_one_turn() -> None:
    _, mask, texts = mask_texts(REASONING, TOOLED, tools=[{"name": "t"}])
    assert texts == [
        "<think>\na\n</think>\n\ncall both<|im_end|>\n",
        "<think>\nb\n</think>\n\nagain<|im_end|>\n",
        "<think>\nc\n</think>\n\ndone<|im_end|>\n",
    ]
    assert get_response_lengths([mask])[0] > sum(mask)


def test_turns_whose_reasoning_the_template_drops_are_found() -> None:
    later = [*TOOLED, msg("user", "more"), msg("assistant", "<think>d</think>ok")]
    assert mask_texts(REASONING, later)[2] == [
        "call both<|im_end|>\n",
        "again<|im_end|>\n",
        "done<|im_end|>\n",
        "<think>\nd\n</think>\n\nok<|im_end|>\n",
    ]


def test_generation_prompt_that_opens_reasoning_is_not_trained() -> None:
    later = [*CHAT[:3], msg("assistant", "<think>d</think>ok")]
    assert mask_texts(THINK_PROMPT, later, "qwen3_5")[2] == ["four<|im_end|>\n", "d\n</think>\n\nok<|im_end|>\n"]


def test_conversation_that_starts_with_the_assistant() -> None:
    assert mask_texts(CHATML, [msg("assistant", "hello"), *CHAT[:2]])[2] == ["hello<|im_end|>\n", "four<|im_end|>\n"]


def test_distill_takes_the_last_turn_verbatim() -> None:
    tokenizer = build_tokenizer(DISTILL, ("<｜User｜>", "<｜Assistant｜>"))
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen")
    assert generator.tokenizer_type == "distill_qwen"
    chat = [*CHAT[:3], msg("assistant", "hm</think>yes")]
    ids, mask = generator.get_loss_mask(chat)
    assert generator.get_text_from_loss_mask(ids, mask) == ["hm</think>yes<eos>"]
    assert tokenizer.decode(ids).endswith("<｜Assistant｜><think>\nhm</think>yes<eos>")
    assert sum(generator.get_loss_mask([*CHAT[:3], msg("assistant", "x", step_loss_mask=0)])[1]) == 0
    with pytest.raises(ValueError, match="must be the assistant's"):
        generator.get_loss_mask(CHAT[:3])


def test_unstable_template_is_refused() -> None:
    with pytest.raises(ValueError, match="the chat template changes the first 1 of 4 messages"):
        MultiTurnLossMaskGenerator(build_tokenizer(UNSTABLE)).get_loss_mask(CHAT)


def test_unknown_type_and_slow_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="loss mask type 'llama': choose one of qwen, qwen3"):
        MultiTurnLossMaskGenerator(build_tokenizer(CHATML), "llama")
    with pytest.raises(ValueError, match="fast tokenizer"):
        MultiTurnLossMaskGenerator(object())


def test_response_lengths() -> None:
    assert get_response_lengths([[0, 1, 0, 1], [0, 0], [], [1]]) == [3, 0, 0, 1]
