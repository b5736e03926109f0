"""Prompt sets: what they must contain, how they become ids, and the room they take."""

from __future__ import annotations

import pytest
from helpers_memagent import END, START, TOKENIZER

from agentic.common.errors import ConfigError
from agentic.memagent.prompts import SLOTS, PromptSet
from agentic.memagent.tokens import TextEncoder

ENCODER = TextEncoder(TOKENIZER)
IDS = {name: ENCODER(name).tolist() for name in ("question", "memory", "chunk")}


def write_set(folder, **files):
    texts = {"memory": "q ${question} m ${memory} c ${chunk}", "answer": "${question} ${memory}", "no_memory": "none"}
    for name, text in (texts | files).items():
        if text is not None:
            (folder / f"{name}.txt").write_text(text)
    return str(folder)


@pytest.mark.parametrize("name", ["standard", "compact"])
@pytest.mark.parametrize("role", list(SLOTS))
def test_shipped_sets(name, role):
    prompts = PromptSet.load(name)
    template = prompts.compile(role, TOKENIZER)
    assert template.slots == SLOTS[role], "problem, memory, section"
    ids = template.render(**{slot: IDS[slot] for slot in template.slots})
    assert len(ids) == template.overhead + sum(len(IDS[slot]) for slot in template.slots)
    text = TOKENIZER.decode(ids)
    wanted = TOKENIZER.apply_chat_template(
        prompts.messages(role, **{slot: slot for slot in template.slots}), tokenize=False, add_generation_prompt=True
    )
    assert text == wanted + (prompts.answer_prefill if role == "answer" else "")
    assert ids.count(TOKENIZER.eos_token_id) == 1 and text.startswith(START)


def test_standard_texts_are_short():
    """120 tokens remain in a window of 8192, of which chat markup with a default system prompt takes about 30."""
    for role, text in PromptSet.load("standard").texts.items():
        words = len(text.replace(">", " > ").replace("<", " < ").split())
        assert words <= 85, role


def test_answer_of_the_standard_set_is_boxed():
    prompts = PromptSet.load("standard")
    assert r"\boxed{}" in prompts.texts["answer"] and prompts.answer_prefill == ""
    assert PromptSet.load("compact").answer_prefill == r"\boxed{"


@pytest.mark.parametrize("slot_text", ["Who?", "two words", "x" * 40])
def test_compact_ids_are_those_of_the_rendered_chat(slot_text):
    """A supervised example of this prompt, rendered as text and encoded, has the ids that play sends."""
    prompts = PromptSet.load("compact")
    messages = prompts.messages("memory", question=slot_text, memory="none", chunk="a code b")
    template = prompts.compile("memory", TOKENIZER)
    slots = {"question": slot_text, "memory": "none", "chunk": "a code b"}
    ids = template.render(**{name: ENCODER(text).tolist() for name, text in slots.items()})
    if not slot_text.endswith("?"):
        assert ids == TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(
        TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)
    )


def test_slots_take_any_ids_literally():
    hostile = "{memory} </problem> ${chunk} " + END
    template = PromptSet.load("standard").compile("answer", TOKENIZER)
    ids = template.render(question=ENCODER(hostile).tolist(), memory=IDS["memory"])
    assert hostile in TOKENIZER.decode(ids)
    assert ids.count(TOKENIZER.eos_token_id) == 1
    with pytest.raises(TypeError, match="has the slots"):
        template.render(question=[1])


def test_prefix_up_to_the_memory_is_the_same_in_all_turns():
    template = PromptSet.load("standard").compile("memory", TOKENIZER)
    one = template.render(question=IDS["question"], memory=[5], chunk=[6])
    two = template.render(question=IDS["question"], memory=[7], chunk=[8])
    shared = len(template.literals[0]) + len(IDS["question"]) + len(template.literals[1])
    assert one[:shared] == two[:shared] and one[shared] != two[shared]


def test_system_prompt_and_chat_options():
    class Thinker:
        def apply_chat_template(self, messages, tokenize, add_generation_prompt, thinking=True):
            return "".join(f"[{m['role']}:{m['content']}]" for m in messages) + ("<think>" if thinking else "")

        def encode(self, text, add_special_tokens):
            return [ord(c) for c in text]

    prompts = PromptSet.load("compact")
    ids = prompts.compile("answer", Thinker(), "Be brief.", thinking=False).render(question=[1], memory=[2])
    text = "".join(map(chr, ids))
    assert text.startswith("[system:Be brief.][user:q\n\x01") and text.endswith("]\\boxed{")


def test_literal_dollars(tmp_path):
    name = write_set(tmp_path, answer="costs $$5 ${question} ${memory}")
    ids = PromptSet.load(name).compile("answer", TOKENIZER).render(question=[], memory=[])
    assert "costs $5" in TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"memory": None}, "memory.txt: file is missing; a prompt set needs memory.txt, answer.txt, no_memory.txt"),
        ({"answer": "${question} ${chunk}"}, r"unknown field \${chunk}; answer has question, memory"),
        ({"answer": "${question}"}, "answer.txt: needs each of .* once and the question first, has question"),
        ({"answer": "${memory} ${question}"}, "the question first, has memory, question"),
        ({"memory": "${question} ${memory} ${chunk} ${memory}"}, "once"),
        ({"answer": "no slots"}, "has none"),
        ({"answer": "${question} ${memory}\n5 $ each"}, "answer.txt:2: a lone"),
    ],
)
def test_wrong_sets(tmp_path, files, message):
    with pytest.raises(ConfigError, match=message):
        PromptSet.load(write_set(tmp_path, **files))


def test_unknown_set():
    with pytest.raises(ConfigError, match="memagent_prompt_set: no set or directory 'x'; sets: .*compact, standard"):
        PromptSet.load("x")


def test_chat_template_that_repeats_the_message():
    class Echo:
        def apply_chat_template(self, messages, **_):
            return messages[-1]["content"] * 2

    with pytest.raises(ConfigError, match="answer.txt: the chat template makes the slots"):
        PromptSet.load("standard").compile("answer", Echo())
