"""Aliases, prices and the account; fact 35 and what else an expert's server may do wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_agentic import FakeEngine
from helpers_orchestra import QWEN, RawServer, call, chat_answer, refused_url, schema

from agentic.common.errors import BadRecord, ConfigError, InfrastructureError, RoleBadResponse
from agentic.common.ledger import CostLedger
from agentic.common.roles import RoleTable
from agentic.toolorchestra.environment import ToolCall
from agentic.toolorchestra.experts import Alias, ExpertDesk, Experts, load_aliases

ASKED = [{"role": "user", "content": "hello"}]
TOOLS = [schema("get_order", "order_id")]


def table(tmp_path: Path, **roles: Any) -> RoleTable:
    path = tmp_path / "roles.yaml"
    given = {"orchestrator": {"url": "policy", "price_in": 0.2, "price_out": 0.2}, **roles}
    path.write_text(json.dumps({"defaults": {"timeout_s": 5, "retries": 0}, "roles": given}))
    return RoleTable.load(path, "http://policy", None, ("orchestrator",))


def chat(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "api": "chat", "model": "big/model", "price_in": 1.25, "price_out": 10.0, **more}


def desk(experts: Experts, seconds: float = 10.0, **metadata: Any) -> ExpertDesk:
    return experts.desk(metadata, CostLedger(), time.monotonic() + seconds)


@contextmanager
def one_expert(tmp_path: Path, answer: Any, delay_s: float = 0.0, **role: Any) -> Iterator[ExpertDesk]:
    with RawServer(answer, delay_s) as server:
        yield desk(Experts.build('{"answer-1": "big"}', table(tmp_path, big=chat(server.url, **role))))


# --------------------------------------------------------------------------------------------------------------------
# Settings.


def test_aliases_from_a_file_and_from_text(tmp_path):
    path = tmp_path / "aliases.yaml"
    path.write_text("answer-1: big\nanswer-2: {model: small, description: Quick., latency_s: 3, price_in: 1}\n")
    expected = {"answer-1": Alias("big"), "answer-2": Alias("small", "Quick.", 3, 1)}
    assert load_aliases(str(path)) == expected
    assert load_aliases('{"answer-1": {"model": "big"}}') == {"answer-1": Alias("big")} and load_aliases("") == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{a: [", "not valid YAML"),
        ("{answer-1: 3}", "answer-1: must be the name"),
        ("{answer-1: {model: big, prise_in: 1}}", "did you mean 'price_in'"),
        ("{answer-1: {model: big, price_in: -1}}", "price_in is -1"),
        ("{answer-1: {model: big, description: 4}}", "description is 4"),
    ],
)
def test_wrong_aliases(text: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        load_aliases(text)


def test_files_and_models_that_are_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.yaml does not exist"):
        load_aliases("nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- big\n")
    with pytest.raises(ConfigError, match="must map aliases"):
        load_aliases(str(tmp_path / "list.yaml"))
    roles = table(tmp_path, big=chat("http://x"), judge=chat("http://x", model="judged"))
    with pytest.raises(ConfigError, match="answer-1: no role .* serves the model 'bigg' .did you mean 'big'"):
        Experts.build('{"answer-1": "bigg"}', roles)
    with pytest.raises(ConfigError, match="serves the model 'judged'"):
        Experts.build('{"answer-1": "judged"}', roles)


def test_mapping_and_listing_of_a_sample(tmp_path):
    experts = Experts.build(
        '{"answer-1": "big", "answer-2": "small", "search-1": "small"}',
        table(tmp_path, big=chat("http://a"), small=chat("http://b", model="other/model")),
    )
    assert desk(experts).aliases() == ("answer-1", "answer-2", "search-1")
    assert desk(experts).aliases("answer-") == ("answer-1", "answer-2")
    assert desk(experts, tools=["answer-2", "search"]).aliases() == ("answer-2", "search-1")
    own = desk(experts, model_mapping={"answer-1": "other/model"})
    assert own.aliases() == ("answer-1",) and own.model("answer-1") == "other/model"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"model_mapping": {"answer-1": "nobody"}}, "unknown_model"),
        ({"model_mapping": ["answer-1"]}, "bad_model_mapping"),
        ({"tool_pricing": {"big": {"input": 1}}}, "bad_tool_pricing"),
        ({"tool_pricing": {"search": -1}}, "bad_tool_pricing"),
        ({"tool_pricing": [1]}, "bad_tool_pricing"),
    ],
)
def test_records_that_cannot_be_used(tmp_path, metadata: dict[str, Any], reason: str):
    experts = Experts.build("", table(tmp_path, big=chat("http://a")))
    with pytest.raises(BadRecord) as caught:
        desk(experts, **metadata)
    assert caught.value.reason == reason


def test_prices_of_sample_setting_and_role(tmp_path):
    aliases = (
        '{"answer-1": {"model": "big", "price_in": 3, "description": "Best.", "latency_s": 96}, "answer-2": "big"}'
    )
    experts = Experts.build(aliases, table(tmp_path, big=chat("http://a"), small=chat("http://b", price_in=0)))
    plain = desk(experts)
    assert plain.price("answer-1") == pytest.approx((3e-6, 1e-5)) and plain.price("answer-2") == pytest.approx(
        (1.25e-6, 1e-5)
    )
    assert plain.price("orchestrator") == pytest.approx((0.2e-6, 0.2e-6))
    assert plain.fee("search", 0.5) == 0.5
    assert plain.describe("answer-").splitlines() == [
        "answer-1: Best. $3 per million input tokens, $10 per million output tokens, about 96 s a call",
        "answer-2: $1.25 per million input tokens, $10 per million output tokens",
    ]
    pricing = {"big": {"input": 1e-6, "output": 2e-6}, "answer-2": {"input": 0, "output": 0}, "search": 0.07}
    own = desk(experts, tool_pricing=pricing)
    assert own.price("answer-1") == (1e-6, 2e-6) and own.price("answer-2") == (0, 0) and own.fee("search", 0.5) == 0.07
    moved = desk(experts, model_mapping={"answer-1": "small"})
    assert moved.price("answer-1")[0] == 0, "the setting's price is that of its own model"


# --------------------------------------------------------------------------------------------------------------------
# Calls.


async def test_an_answer_is_in_the_account(tmp_path):
    with one_expert(tmp_path, lambda *_: chat_answer("<think>hm ###STOP###</think>\nfour", (1000, 100))) as d:
        reply = await d.ask("answer-1", ASKED, temperature=0.7, max_new_tokens=9)
        assert (reply.text, reply.tool_calls, reply.prompt_tokens) == ("four", (), 1000)
        entry = d.ledger.entries["answer-1"]
        assert (entry.calls, entry.failures, entry.prompt_tokens, entry.completion_tokens) == (1, 0, 1000, 100)
        assert entry.dollars == pytest.approx(1000 * 1.25e-6 + 100 * 1e-5) and entry.seconds > 0
        with pytest.raises(TypeError, match="sampling takes"):
            await d.ask("answer-1", ASKED, temprature=1)


async def test_what_the_server_is_sent(tmp_path):
    with RawServer(lambda *_: chat_answer()) as server:
        experts = Experts.build('{"answer-1": "big"}', table(tmp_path, big=chat(server.url)))
        await desk(experts).ask("answer-1", ASKED, TOOLS, temperature=0.7, max_new_tokens=9)
    (body,) = server.bodies
    assert body["model"] == "big/model" and body["tools"] == TOOLS
    assert body["temperature"] == 0.7 and body["max_tokens"] == 9


def sent_call(name: Any = "get_order", arguments: Any = '{"order_id": "W1"}') -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


ORDER = (ToolCall("get_order", {"order_id": "W1"}),)


@pytest.mark.parametrize(
    ("message", "calls", "text"),
    [
        ({"content": None, "tool_calls": [sent_call()]}, ORDER, ""),
        ({"content": f"<think>x</think>{call('get_order', order_id='W1')}"}, ORDER, ""),
        ({"content": "Hello.", "tool_calls": [sent_call("nope"), sent_call(arguments="{"), 7]}, (), "Hello."),
        ({"content": "<think>never closed"}, (), ""),
        ({"content": "<tool_call>{broken"}, (), ""),
        ({"content": None}, (), ""),
    ],
)
async def test_replies_with_and_without_calls(tmp_path, message: dict[str, Any], calls: Any, text: str):
    """What a model writes badly is a reply, not a failure."""
    with one_expert(tmp_path, lambda *_: chat_answer(**message)) as d:
        reply = await d.ask("answer-1", ASKED, TOOLS)
    assert (reply.tool_calls, reply.text) == (calls, text)


async def test_a_generate_role_renders_the_tools_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("agentic.common.clients._load_tokenizer", lambda path: QWEN)
    with FakeEngine(lambda prompt: call("get_order", order_id="W1"), QWEN) as engine:
        roles = table(tmp_path, local={"url": engine.url, "tokenizer": "x", "price_in": 1.0})
        d = desk(Experts.build('{"expert-1": "local"}', roles))
        reply = await d.ask("expert-1", ASKED, TOOLS, max_new_tokens=77)
    assert reply.tool_calls == ORDER and '"get_order"' in engine.prompts()[0]
    assert engine.requests[0].body["sampling_params"]["max_new_tokens"] == 77
    assert d.ledger.dollars == pytest.approx(reply.prompt_tokens * 1e-6)


HTML = b"<html><body>502 Bad Gateway</body></html>"
BROKEN = {
    "html": (lambda *_: (200, HTML), "role_bad_response:big"),
    "html 502": (lambda *_: (502, HTML), "role_unavailable:big"),
    "not found": (lambda *_: (404, HTML), "role_bad_response:big"),
    "garbage": (lambda *_: (200, b"\x00\xff\xfe{{{"), "role_bad_response:big"),
    "other json": (lambda *_: (200, b'{"detail": "hello"}'), "role_bad_response:big"),
    "list": (lambda *_: (200, b"[1, 2]"), "role_bad_response:big"),
    "nested": (lambda *_: (200, b"[" * 100_000), "role_bad_response:big"),
    "content is a number": (lambda *_: chat_answer(4), "role_bad_response:big"),
    "10 MB": (lambda *_: chat_answer("x" * 10_000_000), "role_bad_response:big"),
    "no usage": (lambda *_: chat_answer("ok", (0, 0)), "role_bad_response:big"),
    "odd usage": (lambda *_: chat_answer("ok", ("many", 1)), "role_bad_response:big"),  # type: ignore[arg-type]
    "negative usage": (lambda *_: chat_answer("ok", (5, -1)), "role_bad_response:big"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_servers_are_typed_failures(tmp_path, name: str):
    answer, reason = BROKEN[name]
    with one_expert(tmp_path, answer) as d:
        with pytest.raises(InfrastructureError) as caught:
            await d.ask("answer-1", ASKED)
    assert caught.value.reason == reason and len(str(caught.value)) < 800
    entry = d.ledger.entries["answer-1"]
    assert (entry.calls, entry.failures, entry.dollars) == (0, 1, 0.0) and d.ledger.counts == {}


async def test_a_free_expert_needs_no_usage(tmp_path):
    with one_expert(tmp_path, lambda *_: chat_answer("ok", (0, 0)), price_in=0, price_out=0) as d:
        assert (await d.ask("answer-1", ASKED)).text == "ok"


async def test_nobody_listens(tmp_path):
    """Fact 35, the call: a typed failure after the configured retries."""
    d = desk(Experts.build('{"answer-1": "big"}', table(tmp_path, big=chat(refused_url(), retries=1))))
    start = time.monotonic()
    with pytest.raises(InfrastructureError, match="role_unavailable:big"):
        await d.ask("answer-1", ASKED)
    assert time.monotonic() - start < 5 and d.ledger.entries["answer-1"].failures == 1


async def test_slow_servers_time_out(tmp_path):
    with one_expert(tmp_path, lambda *_: chat_answer(), 30, timeout_s=0.1) as d:
        with pytest.raises(InfrastructureError, match="role_timeout:big"):
            await d.ask("answer-1", ASKED)
    assert 0.1 <= d.ledger.seconds < 5


async def test_the_episode_ends_before_the_expert_answers(tmp_path):
    with RawServer(lambda *_: chat_answer(), 30) as server:
        experts = Experts.build('{"answer-1": "big"}', table(tmp_path, big=chat(server.url)))
        for seconds in (0.1, -1.0):
            with pytest.raises(InfrastructureError, match="episode_timeout"):
                await desk(experts, seconds).ask("answer-1", ASKED)
    assert len(server.bodies) <= 1


async def test_a_negative_count_never_reaches_the_account(tmp_path):
    ledger = CostLedger()
    with pytest.raises(ValueError, match="completion_tokens is -1"):
        ledger.record("a", 5, -1, 1.0, 0.0)
    with pytest.raises(ValueError, match="dollars is nan"):
        ledger.charge("a", float("nan"), 1.0)
    with pytest.raises(ValueError, match="unknown keys"):
        CostLedger.from_dict({"a": {"cost": 1}})
    assert ledger.counts == {} and issubclass(RoleBadResponse, InfrastructureError)


def test_ledger_adds_up():
    ledger = CostLedger()
    ledger.record("a", 10, 5, 1.0, 0.25)
    ledger.record("a", 1, 1, 0.5, 0.25)
    ledger.charge("search", 0.07, 2.0)
    ledger.fail("b", 3.0)
    assert ledger.counts == {"a": 2} and ledger.dollars == pytest.approx(0.57) and ledger.seconds == 6.5
    again = CostLedger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again.entries == ledger.entries and again.entries["b"].failures == 1
