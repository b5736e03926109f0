"""Shared by tests that need a real engine: a tiny random Qwen2 model on disk, a tokenizer for it, and a running server.

Leaves out: any fake engine. What talks to `running_server` talks to SGLang itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from slime.backends.sglang_utils.server import ServerSpec, SGLangServer, default_cpu_options
from slime.utils.misc import get_free_port

BELOW_EPHEMERAL = (16000, 20900)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: 3 special ids, then one id for each of the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIALS + alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A random fp32 Qwen2 model: hidden 64, 2 layers, 4 heads, vocabulary 304; weights large enough to be decisive."""
    config = Qwen2Config(
        vocab_size=304,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).float().eval()


def save_tiny_model(folder: Path, seed: int = 0) -> Qwen2ForCausalLM:
    """Writes `tiny_model(seed)` and its tokenizer in Hugging Face format to `folder`; returns the model."""
    model = tiny_model(seed)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def free_port() -> int:
    """A TCP port that was free a moment ago, and that the system does not hand out before a slow server binds it."""
    return get_free_port(random.randint(*BELOW_EPHEMERAL))


@contextmanager
def running_server(model_path: Path, log_dir: Path, **options: Any) -> Iterator[SGLangServer]:
    """A real SGLang server on CPU that has generated its first token; ended at the end of the block.

    `options` are server flags with underscores, such as `max_total_tokens=4096`.
    """
    port = free_port()
    given = {name.replace("_", "-"): value for name, value in options.items()}
    spec = ServerSpec(
        str(model_path), "127.0.0.1", port, default_cpu_options() | given, log_dir / f"sglang_{port}.log"
    )
    server = SGLangServer(spec)
    server.start()
    try:
        server.wait_ready(300)
        yield server
    finally:
        server.stop()


def generate(url: str, input_ids: list[int], max_new_tokens: int = 16, **sampling: Any) -> dict[str, Any]:
    """POST /generate, greedy unless told otherwise; returns the answer with ids and log-probs in `meta_info`."""
    params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | sampling
    payload = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}
    answer = httpx.post(f"{url}/generate", json=payload, timeout=60, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def ids_and_log_probs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Generated ids and their log-probs (nats) of one answer."""
    rows = answer["meta_info"]["output_token_logprobs"]
    return [int(row[1]) for row in rows], [float(row[0]) for row in rows]


@torch.no_grad()
def reference_greedy(
    model: Qwen2ForCausalLM, input_ids: list[int], max_new_tokens: int = 16
) -> tuple[list[int], list[float]]:
    """What `generate` must return, computed by Hugging Face in one full forward pass a token."""
    tokens, log_probs = list(input_ids), []
    for _ in range(max_new_tokens):
        row = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), dim=-1)
        tokens.append(int(row.argmax()))
        log_probs.append(float(row[tokens[-1]]))
    return tokens[len(input_ids) :], log_probs
