"""MemAgent against a scripted engine, with a small real byte-level BPE tokenizer (Qwen2's pre-tokenizer, ChatML)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_agentic import FakeEngine, Reply
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from slime.utils.types import Sample

START, END = "<|im_start|>", "<|im_end|>"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the memory of the article is updated.",
    "Problem, question, section and answer: the Chief of Protocol of the United States (1990) lived there.",
    "It's what they don't know that we'll tell; New York City was founded in 1624 by settlers.",
    "word alpha beta gamma delta code value none known yet below article old new",
]


def make_backend(vocabulary: int = 480) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS * 4, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END)])
    return backend


class SmallTokenizer:
    """What MemAgent uses of a Hugging Face tokenizer, without importing transformers."""

    def __init__(self, backend: Tokenizer | None = None) -> None:
        self.backend_tokenizer = backend or make_backend()
        self.eos_token_id = self.backend_tokenizer.token_to_id(END)
        self.pad_token_id = 0
        self.all_special_ids = [self.eos_token_id]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict], tokenize: bool = True, add_generation_prompt: bool = False, **_: Any
    ) -> Any:
        text = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
        text += f"{START}assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


TOKENIZER = SmallTokenizer()
Script = Callable[[str], "str | Reply"]


class Play:
    """Scripted replies: the k-th memory turn gets `memories[k]` (the last one repeats), the answer turn `answer`."""

    def __init__(self, *memories: str | Reply, answer: str | Reply = r"It is \boxed{blue}.") -> None:
        self.memories, self.answer = memories or ("noted",), answer
        self.roles: list[str] = []

    def __call__(self, prompt: str) -> str | Reply:
        role = "memory" if "<section>" in prompt or "\nc\n" in prompt else "answer"
        number = self.roles.count("memory")
        self.roles.append(role)
        return self.memories[min(number, len(self.memories) - 1)] if role == "memory" else self.answer


SMALL: dict[str, Any] = {"chunk_tokens": 40, "memory_tokens": 16, "question_tokens": 32, "answer_tokens": 32}


def document(tokens: int) -> str:
    """A text of exactly so many tokens (each word is one)."""
    words = " the the" * (tokens // 2 + 1)
    ids = TOKENIZER.encode(words)[:tokens]
    text = TOKENIZER.decode(ids)
    assert len(TOKENIZER.encode(text)) == tokens
    return text


class Stage:
    """Engine, arguments and samples for one test."""

    def __init__(self, engine: FakeEngine, play: Script, args: Namespace) -> None:
        self.engine, self.play, self.args = engine, play, args

    def sample(self, context: Any = None, index: int = 0, group: int = 0, **fields: Any) -> Sample:
        metadata = {"context": document(100) if context is None else context, "ground_truth": ["blue", "navy"]}
        given = {"prompt": "What colour is it?", "label": "blue", "metadata": metadata} | fields
        return Sample(index=index, group_index=group, **given)

    async def run(self, sample: Sample | None = None, evaluation: bool = False, **params: Any) -> Any:
        from agentic.memagent.rollout import generate

        sample = self.sample() if sample is None else sample
        return await generate(self.args, sample, {"temperature": 1.0, **params}, evaluation=evaluation)

    def sent(self) -> list[list[int]]:
        return [request.body["input_ids"] for request in self.engine.requests]


@contextmanager
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Script, **settings: Any) -> Iterator[Stage]:
    """A scripted engine and an argument namespace that points at it; budgets are small unless given."""
    from agentic.memagent import agent

    with FakeEngine(play, TOKENIZER) as engine:
        host, _, port = engine.url.removeprefix("http://").partition(":")
        args = Namespace(sglang_router_ip=host, sglang_router_port=int(port), save=str(tmp_path / "save"))
        args.rewards_normalization = args.grpo_std_normalization = True
        args.global_batch_size, args.calculate_per_token_loss = 4, False
        for name, value in {**SMALL, "timeout_s": 60, "retries": 0, **settings}.items():
            setattr(args, f"memagent_{name}", value)
        monkeypatch.setattr(agent, "GenerateState", lambda args: Namespace(tokenizer=TOKENIZER))
        agent._AGENTS.clear()
        yield Stage(engine, play, args)
