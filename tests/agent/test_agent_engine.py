"""OpenAI's and Anthropic's clients against a real SGLang: what is stored equals the engine's answers to the last token."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import torch
from helpers_agent import AGENT_TEMPLATE, tool_schema, trained_ids
from helpers_sglang import running_server, save_tiny_model, tiny_tokenizer

from slime.agent.adapters import common
from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample

pytestmark = pytest.mark.engine

CALL = r'<tool_call>\{"name": "look", "arguments": \{"q": "[a-z]{3}"\}\}</tool_call>'
SYSTEM, SUB_SYSTEM = "Work.", "Explore."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    folder = tmp_path_factory.mktemp("agent_engine")
    model = save_tiny_model(folder / "model")
    with running_server(folder / "model", folder, max_total_tokens=8192) as server:
        yield server.url, model


class Recorder:
    """Passes calls on to the engine, with a grammar for calls of the script, and keeps its raw answers."""

    def __init__(self, adapter: BaseAdapter, monkeypatch: pytest.MonkeyPatch, grammars: list[str | None]) -> None:
        self.answers: list[dict[str, Any]] = []
        self.free: list[bool] = [grammar is None for grammar in grammars]
        ask, generate = common.call_sglang_generate, adapter.engine.generate

        async def scripted(prompt_ids: Any, session: Any, body: dict, **more: Any) -> Any:
            grammar = grammars.pop(0)
            defaults = session.sampling_defaults | ({"regex": grammar, "max_new_tokens": 200} if grammar else {})
            return await ask(prompt_ids, dataclasses.replace(session, sampling_defaults=defaults), body, **more)

        async def recorded(payload: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
            answer = await generate(payload, headers)
            self.answers.append({"prompt": list(payload["input_ids"]), **answer})
            return answer

        monkeypatch.setattr(common, "call_sglang_generate", scripted)
        monkeypatch.setattr(adapter.engine, "generate", recorded)

    def outputs(self) -> list[tuple[list[int], list[float]]]:
        rows = [answer["meta_info"]["output_token_logprobs"] for answer in self.answers]
        return [([row[1] for row in turn], [row[0] for row in turn]) for turn in rows]


class OpenAIClient:
    """Chat Completions, the main conversation as a stream."""

    def __init__(self, url: str, sid: str) -> None:
        from openai import AsyncOpenAI

        self.client = AsyncOpenAI(base_url=url + "/v1", api_key=sid, max_retries=0)
        self.tools = [tool_schema("look")]

    async def say(self, system: str, history: list[Any], stream: bool) -> tuple[str, dict[str, Any] | None, list[Any]]:
        messages = [{"role": "system", "content": system}, *history]
        create = self.client.chat.completions.create
        if not stream:
            message = (await create(model="m", messages=messages, tools=self.tools)).choices[0].message
            return message.content or "", None, [*history, message.model_dump(exclude_none=True)]
        text, call = "", None
        async for chunk in await create(model="m", messages=messages, tools=self.tools, stream=True):
            text += chunk.choices[0].delta.content or ""
            for part in chunk.choices[0].delta.tool_calls or []:
                call = part.model_dump(exclude={"index"})
        said: dict[str, Any] = {"role": "assistant", "content": text, **({"tool_calls": [call]} if call else {})}
        return text, call and json.loads(call["function"]["arguments"]), [*history, said]

    @staticmethod
    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    @staticmethod
    def result(history: list[Any], text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": text}

    async def close(self) -> None:
        await self.client.close()


class AnthropicClient:
    """Messages, the main conversation as a stream."""

    def __init__(self, url: str, sid: str) -> None:
        self.url = url + "/v1/messages"
        self.client = aiohttp.ClientSession(headers={"X-Api-Key": sid, "anthropic-version": "2023-06-01"})
        self.tools = [{"name": "look", "input_schema": tool_schema("look")["function"]["parameters"]}]

    async def say(self, system: str, history: list[Any], stream: bool) -> tuple[str, dict[str, Any] | None, list[Any]]:
        body = {"model": "m", "max_tokens": 999, "system": system, "messages": history, "tools": self.tools}
        async with self.client.post(self.url, json={**body, "stream": stream}) as response:
            assert response.status == 200, await response.text()
            content = [b async for b in read_stream(response)] if stream else (await response.json())["content"]
        text = "".join(block["text"] for block in content if block["type"] == "text")
        call = next((block["input"] for block in content if block["type"] == "tool_use"), None)
        return text, call, [*history, {"role": "assistant", "content": content}]

    @staticmethod
    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    @staticmethod
    def result(history: list[Any], text: str) -> dict[str, Any]:
        call = history[-1]["content"][-1]
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text}]}

    async def close(self) -> None:
        await self.client.close()


async def read_stream(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Content blocks of a streamed message."""
    block: dict[str, Any] = {}
    for line in (await response.text()).splitlines():
        event = json.loads(line[len("data: ") :]) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            block = event["content_block"]
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block["text"] = block["text"] + delta["text"]
        elif event.get("type") == "content_block_stop":
            yield block


async def converse(client: Any) -> None:
    """Three turns with a tool call; in between a sub-agent; then everything is compacted and goes on."""
    history = [client.user("Find it.")]
    _, call, history = await client.say(SYSTEM, history, stream=True)
    assert call is not None and len(call["q"]) == 3
    sub_text, _, _ = await client.say(SUB_SYSTEM, [client.user("Explore " + call["q"])], stream=False)
    history = [*history, client.result(history, "found: " + sub_text)]
    _, _, history = await client.say(SYSTEM, history, stream=True)
    text, _, _ = await client.say(SYSTEM, [*history, client.user("Go on.")], stream=True)
    await client.say(SYSTEM, [client.user("Summary: " + text)], stream=False)


@pytest.mark.parametrize(
    ("adapter_class", "client_class"), [(OpenAIAdapter, OpenAIClient), (AnthropicAdapter, AnthropicClient)]
)
async def test_stored_ids_and_log_probs_are_the_engines(
    adapter_class: Any, client_class: Any, engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, model = engine
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = AGENT_TEMPLATE
    adapter = adapter_class(tokenizer=tokenizer, sglang_url=url)
    recorder = Recorder(adapter, monkeypatch, [CALL, None, None, None, None])
    free = recorder.free
    adapter.open_session("s", sampling_defaults={"temperature": 1.0, "max_new_tokens": 12}, max_context_tokens=2000)
    handle = run_app_in_thread(adapter.app)
    client = client_class(f"http://127.0.0.1:{handle.port}", "s")
    try:
        await converse(client)
        samples = await adapter.finish_session("s", base_sample=Sample(index=3), reward=1.0)
    finally:
        await client.close()
        handle.stop()

    outputs, prompts = recorder.outputs(), [answer["prompt"] for answer in recorder.answers]
    main, compacted, sub = samples  # the compacted conversation has the main one's instructions
    assert [len(sample.weight_versions) for sample in samples] == [3, 1, 1]
    assert adapter.renderer.counts == {"first": 3, "continued": 2}
    assert main.tokens == prompts[3] + outputs[3][0]
    assert sub.tokens == prompts[1] + outputs[1][0] and compacted.tokens == prompts[4] + outputs[4][0]
    for sample, turns in ((main, (0, 2, 3)), (sub, (1,)), (compacted, (4,))):
        assert trained_ids(sample) == [token for turn in turns for token in outputs[turn][0]]
        kept = [p for p, keep in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if keep]
        assert kept == [log_prob for turn in turns for log_prob in outputs[turn][1]]
        assert (sample.reward, sample.rollout_id) == (1.0, 3)
    check_contexts(model, main, outputs, free)


@torch.no_grad()
def check_contexts(model: Any, main: Sample, outputs: list[tuple[list[int], list[float]]], free: list[bool]) -> None:
    """What the engine reported belongs to the stored context: the model says the same of it, where no grammar stood."""
    log_probs = torch.log_softmax(model(torch.tensor([main.tokens])).logits[0].float(), dim=-1)
    first = len(main.tokens) - main.response_length
    places = [first + i for i, keep in enumerate(main.loss_mask or []) if keep]
    reported = [p for turn in (0, 2, 3) for p in outputs[turn][1]]
    unconstrained = [free[turn] for turn in (0, 2, 3) for _ in outputs[turn][0]]
    checked = 0
    for place, value, compare in zip(places, reported, unconstrained, strict=True):
        if compare:
            assert abs(float(log_probs[place - 1, main.tokens[place]]) - value) < 2e-3
            checked += 1
    assert checked > 3
