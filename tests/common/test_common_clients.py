"""Clients against a scripted server over real HTTP: tokens in, tokens out, deadlines, retries, typed errors."""

from __future__ import annotations

import asyncio
import time

import pytest
from helpers_agentic import IM_END, FakeEngine, FakeTokenizer, Reply, frozen_role, policy_role

from agentic.common import clients
from agentic.common.clients import FrozenClient, PolicyClient, check_reachable, room_for
from agentic.common.errors import InfrastructureError, PromptTooLong, RoleBadResponse, RoleTimeout, RoleUnavailable

MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]
HOOK = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 64}


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "BACKOFF_FIRST_S", 0.01)


async def test_policy_sends_ids_and_trains_on_exactly_those() -> None:
    with FakeEngine(lambda prompt: "two") as engine:
        engine.weight_version = "7"
        record = await PolicyClient(policy_role(engine.url), FakeTokenizer()).generate(
            MESSAGES, HOOK, role_name="next_step", session_id="abc"
        )
    request = engine.requests[0]
    assert "text" not in request.body and request.body["return_logprob"] is True
    assert record.prompt_ids == request.body["input_ids"]
    assert record.response_ids == [*FakeTokenizer().encode("two"), IM_END]
    assert record.loss_mask == [1] * 4 and len(record.rollout_log_probs) == 4
    assert record.rollout_log_probs[0] == pytest.approx(-0.25)
    assert (record.role, record.finish_reason, record.text, record.weight_version) == ("next_step", "stop", "two", "7")
    assert request.headers["X-SMG-Routing-Key"] == "abc"
    assert request.body["sampling_params"] == HOOK


async def test_policy_role_overrides_only_what_it_sets_and_caps_max_new_tokens() -> None:
    role_settings = {"temperature": 0.1, "max_new_tokens": 3, "stop": ("###",)}
    with FakeEngine(lambda prompt: "a long answer") as engine:
        client = PolicyClient(policy_role(engine.url, **role_settings), FakeTokenizer())
        record = await client.generate(MESSAGES, HOOK, trained=False)
    sent = engine.requests[0].body["sampling_params"]
    assert sent == {"temperature": 0.1, "top_p": 0.9, "max_new_tokens": 3, "stop": ["###"]}
    assert HOOK["temperature"] == 0.7
    assert record.finish_reason == "length" and record.response_length == 3
    assert record.loss_mask == [0, 0, 0] and record.trained is False


async def test_max_new_tokens_shrinks_to_the_context_and_too_long_prompts_are_not_sent() -> None:
    prompt_len = len(FakeTokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True))
    with FakeEngine(lambda prompt: "two") as engine:
        role = policy_role(engine.url)
        await PolicyClient(role, FakeTokenizer(), prompt_len + 5).generate(MESSAGES, HOOK)
        with pytest.raises(PromptTooLong, match=f"prompt of {prompt_len} tokens"):
            await PolicyClient(role, FakeTokenizer(), prompt_len).generate(MESSAGES, HOOK)
    assert len(engine.requests) == 1
    assert engine.requests[0].body["sampling_params"]["max_new_tokens"] == 5


def test_room_for() -> None:
    assert room_for("r", 10, 100, None) == 100
    assert room_for("r", 10, 100, 64) == 54
    assert room_for("r", 10, 20, 64) == 20


@pytest.mark.parametrize(
    "reply, message",
    [
        (Reply("x", meta={"prompt_tokens": 3}), "engine saw 3 prompt tokens"),
        (Reply("x", meta={"output_token_logprobs": []}), "no output_token_logprobs"),
        (Reply("x", meta={"output_token_logprobs": [[-0.1, 9, None]]}), "output_ids differ"),
        (Reply("x", meta={"output_token_logprobs": [[None, 9, None]]}), "no pairs of numbers"),
        (Reply("x", meta={"output_token_logprobs": [[-0.1]]}), "no pairs of numbers"),
        (Reply("x", finish_reason="weird"), "finish_reason"),
        (Reply("context too long", status=400), "HTTP 400"),
    ],
)
async def test_policy_protocol_errors_are_bad_responses_and_not_retried(reply: Reply, message: str) -> None:
    with FakeEngine(lambda prompt: reply) as engine:
        client = PolicyClient(policy_role(engine.url, retries=3), FakeTokenizer())
        with pytest.raises(RoleBadResponse, match=message):
            await client.generate(MESSAGES, HOOK)
    assert len(engine.requests) == 1


async def test_abort_keeps_partial_tokens_and_without_tokens_is_an_error() -> None:
    replies = [Reply("part", finish_reason="abort"), Reply("", finish_reason="abort")]
    with FakeEngine(lambda prompt: replies.pop(0)) as engine:
        client = PolicyClient(policy_role(engine.url), FakeTokenizer())
        record = await client.generate(MESSAGES, HOOK)
        assert (record.finish_reason, record.response_length) == ("abort", 4)
        with pytest.raises(InfrastructureError, match="engine_aborted"):
            await client.generate(MESSAGES, HOOK)


async def test_server_errors_are_retried_and_then_succeed() -> None:
    replies = [Reply("boom", status=500), Reply("busy", status=429), Reply("ok")]
    with FakeEngine(lambda prompt: replies.pop(0)) as engine:
        client = FrozenClient(frozen_role("executor", engine.url, retries=2), FakeTokenizer())
        assert (await client.complete(MESSAGES)).text == "ok"
    assert len(engine.requests) == 3


async def test_server_errors_on_all_attempts_raise_unavailable_with_the_role() -> None:
    with FakeEngine(lambda prompt: Reply("boom", status=503)) as engine:
        client = FrozenClient(frozen_role("executor", engine.url, retries=1), FakeTokenizer())
        with pytest.raises(RoleUnavailable, match="role_unavailable:executor.*HTTP 503") as caught:
            await client.complete(MESSAGES)
    assert caught.value.reason == "role_unavailable:executor" and len(engine.requests) == 2


async def test_a_dropped_connection_is_tried_again_at_once_even_without_retries() -> None:
    replies = [Reply(drop=True), Reply("ok")]
    with FakeEngine(lambda prompt: replies.pop(0)) as engine:
        client = FrozenClient(frozen_role("executor", engine.url, retries=0), FakeTokenizer())
        assert (await client.complete(MESSAGES)).text == "ok"
    assert len(engine.requests) == 2


async def test_timeout_has_a_deadline_per_attempt_and_is_typed() -> None:
    with FakeEngine(lambda prompt: Reply("late", delay_s=8.0)) as engine:
        client = FrozenClient(frozen_role("judge", engine.url, retries=1, timeout_s=0.1), FakeTokenizer())
        start = time.perf_counter()
        with pytest.raises(RoleTimeout) as caught:
            await client.complete(MESSAGES)
        assert time.perf_counter() - start < 6
    assert caught.value.reason == "role_timeout:judge" and len(engine.requests) == 2


async def test_nobody_listening_is_unavailable() -> None:
    with FakeEngine(lambda prompt: "x") as engine:
        url = engine.url
    role = frozen_role("judge", url)
    with pytest.raises(RoleUnavailable):
        await FrozenClient(role, FakeTokenizer()).complete(MESSAGES)
    with pytest.raises(RoleUnavailable, match="start its server"):
        await check_reachable(role)


async def test_frozen_generate_uses_own_tokenizer_and_settings() -> None:
    class Other(FakeTokenizer):
        def apply_chat_template(self, messages: list[dict], **_: object) -> list[int]:
            return self.encode("OTHER:" + messages[0]["content"])

    with FakeEngine(lambda prompt: "hello") as engine:
        await check_reachable(frozen_role("executor", engine.url))
        done = await FrozenClient(frozen_role("executor", engine.url, max_new_tokens=32), Other()).complete(MESSAGES)
    assert engine.prompts() == ["OTHER:What is 1 + 1?"]
    assert engine.requests[0].body["sampling_params"] == {"max_new_tokens": 32, "temperature": 0.0, "top_p": 1.0}
    assert (done.text, done.finish_reason, done.completion_tokens) == ("hello", "stop", 6)
    assert done.prompt_tokens == len(engine.requests[0].body["input_ids"]) and done.seconds > 0


async def test_frozen_chat_speaks_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k1")
    with FakeEngine(lambda prompt: "hello") as engine:
        role = frozen_role("judge", engine.url + "/v1", api="chat", model="m", api_key_env="SOME_KEY", stop=("END",))
        await check_reachable(role)
        done = await FrozenClient(role).complete(MESSAGES)
        monkeypatch.delenv("SOME_KEY")
        with pytest.raises(RoleBadResponse, match="SOME_KEY"):
            await FrozenClient(role).complete(MESSAGES)
    request = engine.requests[0]
    assert request.path == "/v1/chat/completions" and request.headers["Authorization"] == "Bearer k1"
    assert request.body["messages"] == MESSAGES and request.body["model"] == "m"
    assert request.body["max_tokens"] == 512 and request.body["stop"] == ["END"]
    assert (done.text, done.finish_reason, done.prompt_tokens) == ("hello", "stop", len("What is 1 + 1?"))


async def test_semaphore_bounds_calls_in_flight_per_role() -> None:
    with FakeEngine(lambda prompt: Reply("x", delay_s=0.03)) as engine:
        role = frozen_role("executor", engine.url, max_concurrency=2)
        await asyncio.gather(*(FrozenClient(role, FakeTokenizer()).complete(MESSAGES) for _ in range(8)))
    assert len(engine.requests) == 8 and engine.max_in_flight == 2


async def test_waiting_for_the_semaphore_does_not_use_up_the_deadline() -> None:
    with FakeEngine(lambda prompt: Reply("x", delay_s=0.3)) as engine:
        role = frozen_role("executor", engine.url, max_concurrency=1, timeout_s=1.5)
        done = await asyncio.gather(*(FrozenClient(role, FakeTokenizer()).complete(MESSAGES) for _ in range(6)))
    assert [one.text for one in done] == ["x"] * 6


def test_clients_work_from_one_event_loop_after_another() -> None:
    with FakeEngine(lambda prompt: "x") as engine:

        async def call() -> str:
            text = (await FrozenClient(frozen_role("executor", engine.url), FakeTokenizer()).complete(MESSAGES)).text
            return text

        assert [asyncio.run(call()), asyncio.run(call())] == ["x", "x"]


async def test_errors_of_the_socket_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reset(*_: object) -> tuple[int, bytes]:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(clients, "_post_once", reset)
    client = FrozenClient(frozen_role("executor", "http://127.0.0.1:9", retries=1), FakeTokenizer())
    with pytest.raises(RoleUnavailable, match="ConnectionResetError"):
        await client.complete(MESSAGES)
