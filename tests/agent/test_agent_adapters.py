"""Agents' requests through the adapters to a scripted engine: wire formats, sessions, and what is stored of a turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from helpers_agent import ScriptedEngine, byte_tokenizer, call_text, sse_events, tool_schema, trained_ids, whole_ids

from slime.agent.adapters import common
from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.common import BaseAdapter, flatten_content, manager_finish_reason, tool_call_dict
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.trajectory import TurnRecord
from slime.utils.types import Sample

TOKENIZER = byte_tokenizer()
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LOOK = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}


@asynccontextmanager
async def serving(
    script: list[Any], adapter_class: type[BaseAdapter] = OpenAIAdapter, **options: Any
) -> AsyncIterator[tuple[TestClient, BaseAdapter, ScriptedEngine]]:
    engine = ScriptedEngine(TOKENIZER, script)
    async with engine.serving() as url:
        adapter = adapter_class(tokenizer=TOKENIZER, sglang_url=url, **options)
        async with TestClient(TestServer(adapter.app)) as client:
            yield client, adapter, engine


async def ask(client: TestClient, path: str, sid: str | None = "s", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {sid}"} if sid else {}
    response = await client.post(path, json=body, headers=headers)
    return (await response.json()) | {"http": response.status}


async def samples_of(adapter: BaseAdapter, sid: str = "s", **more: Any) -> list[Sample]:
    return await adapter.finish_session(sid, base_sample=Sample(index=1), reward=1.0, **more)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_health_and_models() -> None:
    async with serving([]) as (client, _, _):
        for path in ("/healthz", "/v1/models"):
            assert await (await client.get(path)).json() == {"ok": True}


async def test_chat_conversation_with_a_tool_is_one_sample_of_the_engines_ids() -> None:
    script = [call_text("look", q="x"), "It is 7."]
    async with serving(script) as (client, adapter, engine):
        adapter.open_session("s", sampling_defaults={"temperature": 0.7, "top_p": 0.9})
        tools = [tool_schema("look")]
        first = await ask(client, CHAT, messages=[user("what?")], tools=tools, model="m", temperature=0.2)
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls" and message["content"] is None
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"q": "x"})
        history = [user("what?"), message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
        second = await ask(client, CHAT, messages=history, tools=tools)
        assert second["choices"][0]["message"] == {"role": "assistant", "content": "It is 7."}
        assert second["usage"] == {
            "prompt_tokens": len(engine.requests[1]["input_ids"]),
            "completion_tokens": len(engine.answers[1][0]),
            "total_tokens": len(engine.requests[1]["input_ids"]) + len(engine.answers[1][0]),
        }
        (sample,) = await samples_of(adapter)
    asked = [request["input_ids"] for request in engine.requests]
    assert asked[0] == whole_ids(TOKENIZER, [user("what?")], tools)
    assert asked[1][: len(asked[0]) + len(engine.answers[0][0])] == asked[0] + engine.answers[0][0]
    assert sample.tokens == asked[1] + engine.answers[1][0]
    assert trained_ids(sample) == engine.answers[0][0] + engine.answers[1][0]
    kept = [p for p, keep in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if keep]
    assert kept == engine.answers[0][1] + engine.answers[1][1]
    assert sample.response == TOKENIZER.decode(sample.tokens[len(asked[0]) :])
    assert sample.weight_versions == ["7", "7"]
    assert adapter.renderer.counts == {"first": 1, "continued": 1}
    assert [r["sampling_params"] for r in engine.requests] == [
        {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 4096},
        {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 4096},
    ]
    assert set(engine.requests[0]) == {"rid", "input_ids", "sampling_params", "return_logprob"}
    assert engine.headers[0]["X-SMG-Routing-Key"] == "s"


async def test_chat_stream() -> None:
    async with serving(["thinking of " + call_text("look", q="x")]) as (client, adapter, _):
        body = {"messages": [user("a")], "tools": [tool_schema("look")], "stream": True}
        response = await client.post(CHAT, json=body | {"stream_options": {"include_usage": True}, "user": "s"})
        text = await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert adapter.manager.turn_count("s") == 1
    assert text.endswith("data: [DONE]\n\n")
    events = sse_events(text)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "thinking of"
    (call,) = next(delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
    assert (call["index"], call["function"]["name"]) == (0, "look")
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("headers", "body", "sid"),
    [
        ({"Authorization": "Bearer one"}, {"user": "two"}, "one"),
        ({}, {"metadata": {"session_id": "three"}, "user": "two"}, "three"),
        ({}, {"user": "two"}, "two"),
        ({}, {}, "default"),
    ],
)
async def test_openai_session_id(headers: dict, body: dict, sid: str) -> None:
    async with serving(["x"]) as (client, adapter, engine):
        await client.post(CHAT, json={"messages": [user("a")]} | body, headers=headers)
        assert adapter.manager.turn_count(sid) == 1
    assert engine.headers[0].get("X-SMG-Routing-Key") == (None if sid == "default" else sid)


@pytest.mark.parametrize(
    ("headers", "sid"),
    [({"Authorization": "Bearer one", "X-Api-Key": "two"}, "one"), ({"X-Api-Key": "two"}, "two"), ({}, "default")],
)
async def test_anthropic_session_id(headers: dict, sid: str) -> None:
    async with serving(["x"], AnthropicAdapter) as (client, adapter, _):
        await client.post(MESSAGES, json={"messages": [user("a")], "max_tokens": 9}, headers=headers)
        assert adapter.manager.turn_count(sid) == 1


async def test_output_limits() -> None:
    async with serving(["x" * 50] * 5) as (client, adapter, engine):
        prompt = len(whole_ids(TOKENIZER, [user("a")]))
        adapter.open_session("s", max_context_tokens=prompt + 20, sampling_defaults={"max_new_tokens": 30})
        adapter.open_session("full", max_context_tokens=prompt)
        for body in (
            {"max_completion_tokens": 5, "max_tokens": 6},
            {"max_tokens": 6, "max_output_tokens": 7},
            {"max_output_tokens": 7},
            {},
        ):
            answer = await ask(client, CHAT, messages=[user("a")], **body)
            assert answer["choices"][0]["finish_reason"] == "length"
        assert [r["sampling_params"]["max_new_tokens"] for r in engine.requests] == [5, 6, 7, 20]
        empty = await ask(client, CHAT, "full", messages=[user("a")])
        assert empty["choices"][0] == {
            "index": 0,
            "message": {"role": "assistant", "content": ""},
            "finish_reason": "length",
            "logprobs": None,
        }
        assert len(engine.requests) == 4
        assert await samples_of(adapter, "full") == []


async def test_stop_strings_are_sent_and_not_shown() -> None:
    async with serving(["before STOP"]) as (client, adapter, engine):
        answer = await ask(client, CHAT, messages=[user("a")], stop="STOP")
        assert answer["choices"][0]["message"]["content"] == "before"
        assert engine.requests[0]["sampling_params"]["stop"] == ["STOP"]
        (sample,) = await samples_of(adapter)
        assert trained_ids(sample) == engine.answers[0][0]


async def test_stop_strings_of_the_session() -> None:
    async with serving(["before STOP"]) as (client, adapter, _):
        adapter.open_session("s", sampling_defaults={"stop": ["STOP"], "max_new_tokens": None})
        answer = await ask(client, CHAT, messages=[user("a")])
        assert answer["choices"][0]["message"]["content"] == "before"


async def test_malformed_arguments_and_parallel_calls_of_the_history() -> None:
    async with serving(["x"]) as (client, adapter, _):
        calls = [{"id": str(i), "type": "function", "function": {"name": "f", "arguments": "{no"}} for i in range(2)]
        history = [
            user("a"),
            {"role": "assistant", "content": "text", "reasoning_content": "r", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "0", "content": [{"type": "text", "text": "t"}, {"type": "image_url"}]},
        ]
        await ask(client, CHAT, messages=history)
        (leaf,) = adapter.manager._sessions["s"].root.leaves()
        path = [node.message for node in leaf.path_from_root()[1:]]
    assert path == [
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": [tool_call_dict("f", {"_raw_arguments": "{no"})]},
        {"role": "tool", "content": "t\n[image omitted]"},
        {"role": "assistant", "content": "x"},
    ]


async def test_responses_conversation_with_a_tool() -> None:
    async with serving(["see " + call_text("look", q="x"), "It is 7."]) as (client, adapter, engine):
        tools = [{"type": "function", **tool_schema("look")["function"]}, {"type": "web_search"}]
        items: list[dict[str, Any]] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "w"}]}
        ]
        first = await ask(client, RESPONSES, instructions="Be brief.", input=items, tools=tools, max_output_tokens=999)
        assert [item["type"] for item in first["output"]] == ["message", "function_call"]
        assert first["output"][0]["content"][0]["text"] == "see" and first["status"] == "completed"
        result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "7"}
        thought = {"type": "reasoning", "summary": []}
        items += [thought, *first["output"], result]
        second = await ask(client, RESPONSES, instructions="Be brief.", input=items, tools=tools)
        assert second["output"][0]["content"][0]["text"] == "It is 7."
        (sample,) = await samples_of(adapter)
    assert trained_ids(sample) == engine.answers[0][0] + engine.answers[1][0]
    messages = [{"role": "system", "content": "Be brief."}, user("w")]
    assert engine.requests[0]["input_ids"] == whole_ids(TOKENIZER, messages, [tool_schema("look")])
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 999


async def test_responses_stream() -> None:
    async with serving(["see " + call_text("look", q="x")]) as (client, _, _):
        body = {"input": "w", "tools": [{"type": "function", **tool_schema("look")["function"]}], "stream": True}
        events = sse_events(await (await client.post(RESPONSES, json=body)).text())
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["message", "function_call"]
    arguments = next(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"q": "x"}
    assert events[-1]["response"]["usage"]["output_tokens"] > 0


async def test_anthropic_conversation_with_a_tool() -> None:
    async with serving(["see " + call_text("look", q="x"), "It is 7."], AnthropicAdapter) as (client, adapter, engine):
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        messages: list[dict[str, Any]] = [user("w")]
        first = await ask(client, MESSAGES, system=system, messages=messages, tools=[LOOK], max_tokens=99)
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        assert (first["stop_reason"], first["content"][1]["input"]) == ("tool_use", {"q": "x"})
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][1]["id"],
            "content": [{"type": "text", "text": "7"}],
        }
        reminder = {"type": "text", "text": "remember"}
        messages += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [reminder, result]},
        ]
        counted = await ask(client, MESSAGES + "/count_tokens", system=system, messages=messages, tools=[LOOK])
        second = await ask(client, MESSAGES, system=system, messages=messages, tools=[LOOK], max_tokens=99)
        assert (second["stop_reason"], second["content"]) == ("end_turn", [{"type": "text", "text": "It is 7."}])
        (sample,) = await samples_of(adapter)
    assert trained_ids(sample) == engine.answers[0][0] + engine.answers[1][0]
    assert counted["input_tokens"] == second["usage"]["input_tokens"] == len(engine.requests[1]["input_ids"])
    tail = TOKENIZER.decode(engine.requests[1]["input_ids"]).partition("</tool_call>")[2]
    assert tail == (
        "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>user\nremember<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_anthropic_stream() -> None:
    async with serving(["<think>hm</think>see " + call_text("look", q="x")], AnthropicAdapter) as (client, adapter, _):
        adapter.reasoning_parser = "fake"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("slime.agent.parsing._engine_reasoning_parser", lambda name: None)
            body = {"messages": [user("w")], "tools": [LOOK], "max_tokens": 99, "stream": True}
            text = await (await client.post(MESSAGES, json=body)).text()
    events = sse_events(text)
    assert [line[7:] for line in text.splitlines() if line.startswith("event: ")] == [e["type"] for e in events]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use"] and starts[2]["input"] == {}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert (deltas[0]["thinking"], deltas[1]["text"]) == ("hm", "see")
    assert json.loads(deltas[2]["partial_json"]) == {"q": "x"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_anthropic_history_is_normalised() -> None:
    dialect = AnthropicAdapter.dialects[MESSAGES]
    history = [
        user("u"),
        {"role": "system", "content": "note"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": " see "},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"q": "x"}},
                {"type": "tool_use", "id": "2", "name": "look", "input": {}},
            ],
        },
        {"role": "system", "content": "before"},
        {"role": "user", "content": [{"type": "image", "source": {}}, {"type": "text", "text": "t"}]},
    ]
    messages, tools = dialect.translate({"messages": history, "tools": [LOOK, {"type": "bash_20250124", "name": "b"}]})
    assert messages == [
        user("u\nnote"),
        {
            "role": "assistant",
            "content": "see",
            "reasoning_content": "hm",
            "tool_calls": [tool_call_dict("look", {"q": "x"}), tool_call_dict("look", None)],
        },
        user("before\n[image omitted]\nt"),
    ]
    assert [tool["function"]["name"] for tool in tools] == ["look"]
    assert dialect.translate({"messages": history[:1], "tools": [LOOK], "tool_choice": {"type": "none"}})[1] == []


@pytest.mark.parametrize(
    ("adapter_class", "path", "body"),
    [
        (OpenAIAdapter, CHAT, {}),
        (OpenAIAdapter, CHAT, {"messages": []}),
        (OpenAIAdapter, CHAT, {"messages": ["x"]}),
        (OpenAIAdapter, CHAT, {"messages": [{"role": "judge", "content": ""}]}),
        (OpenAIAdapter, CHAT, {"messages": [user("a")], "n": 2}),
        (OpenAIAdapter, CHAT, {"messages": [user("a")], "max_tokens": 0}),
        (OpenAIAdapter, CHAT, {"messages": [user("a")], "stop": [1]}),
        (OpenAIAdapter, RESPONSES, {"input": []}),
        (OpenAIAdapter, RESPONSES, {"input": "a", "previous_response_id": "r"}),
        (OpenAIAdapter, RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        (AnthropicAdapter, MESSAGES, {"messages": []}),
        (AnthropicAdapter, MESSAGES, {"messages": [{"role": "tool", "content": ""}]}),
        (AnthropicAdapter, MESSAGES, {"messages": [user("a")], "tools": ["x"]}),
        (AnthropicAdapter, MESSAGES + "/count_tokens", {"messages": "x"}),
    ],
)
async def test_bad_requests_are_answered_with_400(adapter_class: Any, path: str, body: dict) -> None:
    async with serving([], adapter_class) as (client, adapter, engine):
        answer = await ask(client, path, **body)
        assert answer["http"] == 400 and answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"]
        assert not engine.requests and adapter.manager.turn_count("s") == 0


async def test_no_json_is_answered_with_400() -> None:
    async with serving([]) as (client, _, _):
        for data in (b"{", b"[]", b"\xff", b"[" * 9999, b'{"a":' * 200 + b"1" + b"}" * 200):
            assert (await client.post(CHAT, data=data)).status == 400


async def test_turn_limit_and_closed_sessions() -> None:
    async with serving(["x", "y"], max_turns_per_sid=1) as (client, adapter, _):
        adapter.open_session("s")
        with pytest.raises(ValueError, match="opened before"):
            adapter.open_session("s")
        assert (await ask(client, CHAT, messages=[user("a")]))["http"] == 200
        limited = await ask(client, CHAT, messages=[user("a")])
        assert (limited["http"], limited["error"]["type"]) == (429, "rate_limit_error")
        assert len(await samples_of(adapter)) == 1
        assert await samples_of(adapter) == []
        assert (await ask(client, CHAT, messages=[user("a")]))["http"] == 503
        await adapter.drop_session("s")
        await adapter.drop_session("never opened")


async def test_finish_waits_for_turns_in_flight_and_cancels_late_ones() -> None:
    async with serving(["x", "y"]) as (client, adapter, engine):
        engine.gate = asyncio.Event()
        running = asyncio.create_task(ask(client, CHAT, messages=[user("a")]))
        while not engine.requests:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, engine.gate.set)
        assert len(await samples_of(adapter)) == 1
        assert (await running)["http"] == 200

        engine.gate.clear()
        late = asyncio.create_task(
            client.post(CHAT, json={"messages": [user("a")]}, headers={"Authorization": "Bearer t"})
        )
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        assert await samples_of(adapter, "t", wait_timeout=0.05) == []
        assert engine.aborted == [engine.requests[1]["rid"]]
        engine.gate.set()
        await asyncio.gather(late, return_exceptions=True)
        assert adapter.manager.turn_count("t") == 0


async def test_a_disconnected_agents_turn_is_aborted_and_not_recorded() -> None:
    async with serving(["x"]) as (client, adapter, engine):
        engine.gate = asyncio.Event()
        running = asyncio.create_task(ask(client, CHAT, messages=[user("a")]))
        while not engine.requests:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        while "s" in adapter._live:
            await asyncio.sleep(0.01)
        engine.gate.set()
        assert engine.aborted == [engine.requests[0]["rid"]]
        assert adapter.manager.turn_count("s") == 0


async def test_engine_faults_are_retried_then_answered_with_502(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.agent.engine._FIRST_DELAY_S", 0.0)
    async with serving(["x"]) as (client, adapter, engine):
        engine.failures = [503, 500]
        assert (await ask(client, CHAT, messages=[user("a")]))["http"] == 200
        engine.failures = [400]
        answer = await ask(client, CHAT, messages=[user("a")])
        assert (answer["http"], answer["error"]["type"]) == (502, "api_error")
        assert "scripted failure" in answer["error"]["message"]
        assert len(engine.requests) == 4 and adapter.manager.turn_count("s") == 1
        assert len({request["rid"] for request in engine.requests}) == 4


async def test_deadline_of_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWE_GENERATE_TIMEOUT_SEC", "0.05")
    async with serving(["x"]) as (client, adapter, engine):
        engine.gate = asyncio.Event()
        answer = await ask(client, CHAT, messages=[user("a")])
        engine.gate.set()
        assert answer["http"] == 504 and engine.aborted == [engine.requests[0]["rid"]]


async def test_generation_is_found_by_name_and_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests and wrappers replace `common.call_sglang_generate`; turns are reported after they were recorded."""
    seen: list[dict[str, Any]] = []

    async def fake(prompt_ids: Any, session: Any, body: dict, *, adapter: Any, session_id: str | None = None) -> Any:
        assert session.max_context_tokens == 77 and body["messages"] and session_id == "s"
        return TurnRecord(list(prompt_ids), TOKENIZER.encode("hi"), "stop", [-0.5, -0.25])

    monkeypatch.setattr(common, "call_sglang_generate", fake)
    async with serving([], debug_callback=lambda **kwargs: seen.append(kwargs)) as (client, adapter, _):
        adapter.open_session("s", max_context_tokens=77)
        assert (await ask(client, CHAT, messages=[user("a")]))["choices"][0]["message"]["content"] == "hi"
        (sample,) = await samples_of(adapter, extra_metadata={"solved": True})
    assert sample.metadata == {"solved": True} and sample.rollout_log_probs == [-0.5, -0.25]
    assert seen[0]["sid"] == "s" and seen[0]["reply"].finish_reason == "stop"


async def test_thoughts_stripped_from_history_do_not_fork_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.agent.parsing._engine_reasoning_parser", lambda name: None)
    script = [f"<think>long {i}</think>\n\nanswer {i}" for i in range(4)]
    async with serving(script, reasoning_parser="qwen3") as (client, adapter, engine):
        messages: list[dict[str, Any]] = []
        for i in range(4):
            messages.append(user(f"question {i}"))
            message = (await ask(client, CHAT, messages=messages))["choices"][0]["message"]
            assert message == {"role": "assistant", "content": f"answer {i}", "reasoning_content": f"long {i}"}
            messages.append({"role": "assistant", "content": message["content"]})
        (sample,) = await samples_of(adapter)
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        assert later["input_ids"][: len(earlier["input_ids"])] == earlier["input_ids"]
    assert trained_ids(sample) == [token for ids, _ in engine.answers for token in ids]


async def test_changed_tools_fork() -> None:
    async with serving(["x", "y"]) as (client, adapter, _):
        await ask(client, CHAT, messages=[user("a")], tools=[tool_schema("look")])
        history = [user("a"), {"role": "assistant", "content": "x"}, user("b")]
        await ask(client, CHAT, messages=history, tools=[tool_schema("count")])
        assert len(await samples_of(adapter)) == 2
        assert adapter.renderer.counts["whole: other tools"] == 1


def test_small_helpers() -> None:
    assert flatten_content(None) == "" and flatten_content("a") == "a"
    assert (
        flatten_content([{"type": "text", "text": "a"}, "b", {"type": "input_image"}, None]) == "a\nb\n[image omitted]"
    )
    assert manager_finish_reason([{"name": "f"}], "stop") == "tool_calls"
    assert manager_finish_reason([], "length") == "length"
    assert tool_call_dict("f", None) == {"type": "function", "function": {"name": "f", "arguments": {}}}
