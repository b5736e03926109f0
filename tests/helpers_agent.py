"""For tests of slime.agent: a byte tokenizer for any chat template, an engine that answers from a script, event readers.

The scripted engine speaks the wire format of `/generate`; what it says is decided by the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# ChatML with tools, calls and results, in the way of Qwen's templates.
AGENT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else '' }}# Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>|<｜[^｜<>\s]+｜>|<bos>|</s>")


def byte_tokenizer(template: str = AGENT_TEMPLATE, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """One id a byte, and one for every control token the template spells."""
    specials = sorted({"<|endoftext|>", "<|begin_of_text|>", eos, *_CONTROL.findall(template)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(specials)
    names = {"bos_token": "<|begin_of_text|>", "eos_token": eos, "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = template
    return tokenizer


def whole_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """What the template gives for the whole conversation."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
    )


class ScriptedEngine:
    """Answers the n-th `/generate` with the n-th text of the script, and an end token unless the text is cut."""

    def __init__(self, tokenizer: Any, script: list[str | Callable[[dict[str, Any]], str]]) -> None:
        self.tokenizer, self.script = tokenizer, list(script)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: list[str] = []
        self.answers: list[tuple[list[int], list[float]]] = []
        self.failures: list[int] = []
        """Statuses to answer with before the script goes on."""
        self.gate: Any = None
        """An event that generations wait for."""

    async def generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="scripted failure")
        if self.gate is not None:
            await self.gate.wait()
        said = self.script.pop(0)
        text = said(payload) if callable(said) else said
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        limit = payload["sampling_params"]["max_new_tokens"]
        finish = "length" if len(ids) >= limit else "stop"
        ids = ids[:limit] if finish == "length" else [*ids, self.tokenizer.eos_token_id]
        log_probs = [-(i + 1) / 64 - len(self.answers) for i in range(len(ids))]
        self.answers.append((ids, log_probs))
        meta = {
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(ids),
            "finish_reason": {"type": finish},
            "weight_version": "7",
            "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=True)],
        }
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.json_response({})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The engine's address while it serves."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"


def call_text(name: str, **arguments: Any) -> str:
    """A tool call as a model writes it."""
    return f'<tool_call>{json.dumps({"name": name, "arguments": arguments})}</tool_call>'


def tool_schema(name: str) -> dict[str, Any]:
    """An OpenAI function tool with one string parameter `q`."""
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


def sse_events(text: str) -> list[dict[str, Any]]:
    """The JSON of every `data:` line but `[DONE]`."""
    lines = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def trained_ids(sample: Any) -> list[int]:
    """Ids of a sample with mask 1."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return [token for token, keep in zip(response, sample.loss_mask, strict=True) if keep]
