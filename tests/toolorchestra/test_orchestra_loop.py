"""The loop against a scripted engine: facts 18, 19 and 22, the exits, the budgets, both layouts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from helpers_agentic import Reply
from helpers_orchestra import (
    CHATML,
    FINISH,
    IM_END,
    QWEN,
    SEARCH,
    QwenTokenizer,
    ScriptedTask,
    call,
    script,
    stage,
)

from slime.utils.types import Sample

STATUS = Sample.Status
THOUGHT = "<think>\nhm\n</think>\n\n"


def check_row(sample: Sample) -> None:
    """Fact 18 for one row."""
    prompt = len(sample.tokens) - sample.response_length
    assert prompt > 0 and sample.loss_mask is not None and sample.rollout_log_probs is not None
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    assert sample.loss_mask[-1] == 1 and sample.metadata["turn_spans"][-1][1] == sample.response_length
    assert sum(sample.loss_mask) == sum(end - start for start, end, _ in sample.metadata["turn_spans"])


async def test_a_rollout_is_one_growing_stream(tmp_path, monkeypatch):
    """Fact 18."""
    task = ScriptedTask(["first result", "second result"])
    turns = script(THOUGHT + SEARCH, THOUGHT + SEARCH, "nonsense", THOUGHT + FINISH)
    with stage(tmp_path, monkeypatch, turns, task) as s:
        sample = await s.run()
    check_row(sample)
    assert sample.status is STATUS.COMPLETED and not sample.remove_sample and task.closed == 1
    sent = s.sent()
    assert len(sent) == 4
    for earlier, later in zip(sent, [*sent[1:], sample.tokens], strict=True):
        assert later[: len(earlier)] == earlier and len(later) > len(earlier)
    generated = [
        len(QWEN.encode(text)) + 1 for text in (THOUGHT + SEARCH, THOUGHT + SEARCH, "nonsense", THOUGHT + FINISH)
    ]
    assert sum(sample.loss_mask) == sum(generated)
    assert [ok for _, _, ok in sample.metadata["turn_spans"]] == [True, True, False, True]
    text = QWEN.decode(sample.tokens)
    assert "<tool_response>\nfirst result\n</tool_response>" in text and "<tool_response>\nError: no tool call" in text
    record = sample.metadata["orch"]
    assert (record["turns"], record["format_errors"], record["format_ok"]) == (4, 1, True)
    assert record["outcome"] == 1.0 and record["valid_answer"] and record["termination"] == "answer"
    assert sample.weight_versions == ["1"] * 4 and sample.tokens[-1] == IM_END


async def test_first_prompt_shows_task_and_tools(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(FINISH), ScriptedTask()) as s:
        await s.run()
    prompt = s.engine.prompts()[0]
    assert prompt.startswith("<|im_start|>system\nUse tools.") and '"search-2"' in prompt
    body = s.engine.requests[0].body
    assert body["return_logprob"] and body["sampling_params"]["skip_special_tokens"] is False
    assert body["sampling_params"]["max_new_tokens"] == 256 and body["sampling_params"]["temperature"] == 1.0


async def test_a_completion_that_is_cut_off_ends_the_row(tmp_path, monkeypatch):
    """Fact 19."""
    task = ScriptedTask()
    with stage(tmp_path, monkeypatch, script(SEARCH, THOUGHT + "la " * 100 + SEARCH), task, max_new_tokens=60) as s:
        sample = await s.run()
    check_row(sample)
    assert sample.status is STATUS.TRUNCATED and len(s.engine.requests) == 2 and len(task.acted) == 1
    assert sample.loss_mask[-60:] == [1] * 60 and sample.tokens[-1] != IM_END
    record = sample.metadata["orch"]
    assert record["termination"] == "truncated" and record["outcome"] == 0.0 and not record["valid_answer"]


class OneWay(QwenTokenizer):
    """What was decoded must not be encoded."""

    class Decoded(str):
        pass

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.Decoded(super().decode(ids, skip_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        assert not isinstance(text, self.Decoded), "decoded text was encoded"
        return super().encode(text)


class OddIds(QwenTokenizer):
    """The engine's side: it generates ' truly' as two tokens, which no encoder would."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        before, found, after = text.partition(" truly")
        return [*super().encode(before), 489, 3901, *super().encode(after)] if found else super().encode(text)


async def test_nothing_is_encoded_again(tmp_path, monkeypatch):
    """Facts 17 and 22: the ids stay those of the engine through further turns."""
    turns = script(f"<think>I am truly sure</think>{SEARCH}", FINISH)
    task = ScriptedTask(["A"])
    with stage(tmp_path, monkeypatch, turns, task, tokenizer=OneWay(), engine_tokenizer=OddIds()) as s:
        sample = await s.run()
    check_row(sample)
    position = sample.tokens.index(489)
    assert sample.tokens[position + 1] == 3901 and 9428 not in sample.tokens
    assert s.sent()[1][position : position + 2] == [489, 3901]


async def test_format_errors_end_the_rollout(tmp_path, monkeypatch):
    task = ScriptedTask()
    with stage(tmp_path, monkeypatch, script("a", "b", SEARCH, "c", "d", "e", FINISH), task) as s:
        sample = await s.run()
    assert len(s.engine.requests) == 6 and sample.status is STATUS.COMPLETED
    record = sample.metadata["orch"]
    assert record["termination"] == "format_errors" and record["outcome"] == 0.0
    assert record["format_errors"] == 5 and record["format_ok"]


async def test_turn_limit(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH), ScriptedTask(), max_turns=3) as s:
        sample = await s.run()
    check_row(sample)
    assert len(s.engine.requests) == 3 and sample.status is STATUS.TRUNCATED
    assert sample.metadata["orch"]["termination"] == "turn_limit"


async def test_context_budget_is_checked_before_a_call(tmp_path, monkeypatch):
    long = ScriptedTask(["word " * 400] * 9)
    with stage(tmp_path, monkeypatch, script(SEARCH), long, max_context_len=1200, max_tool_tokens=300) as s:
        sample = await s.run()
    check_row(sample)
    assert sample.status is STATUS.TRUNCATED and sample.metadata["orch"]["termination"] == "context_full"
    for request in s.engine.requests:
        assert len(request.body["input_ids"]) + request.body["sampling_params"]["max_new_tokens"] <= 1200


async def test_a_first_prompt_that_does_not_fit_is_a_failure(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH), ScriptedTask(), max_context_len=50) as s:
        sample = await s.run()
    assert sample.status is STATUS.FAILED and sample.metadata["failure_reason"] == "prompt_too_long"
    assert s.engine.requests == [] and sample.loss_mask == [0] and sample.remove_sample


async def test_a_turn_that_ends_with_another_token_ends_the_rollout(tmp_path, monkeypatch):
    class Engine(QwenTokenizer):
        eos_token_id = 151643

    task = ScriptedTask()
    with stage(tmp_path, monkeypatch, script(SEARCH), task, engine_tokenizer=Engine()) as s:
        sample = await s.run()
    check_row(sample)
    assert len(s.engine.requests) == 1 and sample.tokens[-1] == 151643 and len(task.acted) == 1
    assert sample.metadata["orch"]["termination"] == "no_end_token" and sample.status is STATUS.COMPLETED


@pytest.mark.parametrize("text", ["half a turn", ""])
async def test_engine_abort(tmp_path, monkeypatch, text: str):
    turns = script(SEARCH, Reply(text, finish_reason="abort"))
    task = ScriptedTask()
    with stage(tmp_path, monkeypatch, turns, task) as s:
        sample = await s.run()
    assert sample.status is STATUS.ABORTED and sample.metadata["failure_reason"] == "engine_aborted"
    assert sample.remove_sample and sample.reward is None and task.closed == 1
    assert sample.prompt == "What is 2 + 2?"


async def test_no_call_outlives_the_deadline(tmp_path, monkeypatch):
    class Slow(ScriptedTask):
        async def act(self, calls: Any) -> Any:
            await asyncio.sleep(60)

    start = time.monotonic()
    with stage(tmp_path, monkeypatch, script(SEARCH), Slow(), episode_timeout_s=0.5) as s:
        sample = await s.run()
    assert sample.status is STATUS.FAILED and sample.metadata["failure_reason"] == "episode_timeout"
    assert time.monotonic() - start < 30 and sample.metadata["orch"]["outcome"] == 0.0


async def test_no_call_begins_after_the_deadline(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH), ScriptedTask(), episode_timeout_s=1e-9) as s:
        sample = await s.run()
    assert sample.metadata["failure_reason"] == "episode_timeout" and s.engine.requests == []


async def test_a_conversation(tmp_path, monkeypatch):
    """A message goes to the user without thought and end token; the answer is a user message of the stream."""
    task = ScriptedTask(["A"], replies=["my id is 7<|im_end|>"], category="func_call")
    turns = script(THOUGHT + "Who are you?", SEARCH, THOUGHT + "Good bye")
    with stage(tmp_path, monkeypatch, turns, task) as s:
        sample = await s.run()
    check_row(sample)
    assert task.said == ["Who are you?", "Good bye"] and sample.status is STATUS.COMPLETED
    assert "<|im_start|>user\nmy id is 7< |im_end|><|im_end|>\n<|im_start|>assistant\n" in QWEN.decode(s.sent()[1])
    assert "hm" in QWEN.decode(s.sent()[2]), "in a stream the policy keeps its thoughts"


async def test_what_was_left_out_is_told(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH + SEARCH + call("nope"), FINISH), ScriptedTask(["A"])) as s:
        await s.run()
    prompt = QWEN.decode(s.sent()[1])
    assert prompt.count("<tool_response>") == 2 and "1 further calls were ignored" in prompt and "'nope'" in prompt


async def test_policy_tokens_are_paid(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH, FINISH), ScriptedTask()) as s:
        sample = await s.run()
    entry = sample.metadata["orch"]["ledger"]["orchestrator"]
    assert entry["prompt_tokens"] == sum(map(len, s.sent())) and entry["completion_tokens"] == sum(sample.loss_mask)
    tokens = entry["prompt_tokens"] + entry["completion_tokens"]
    assert sample.metadata["orch"]["dollars"] == pytest.approx(tokens * 0.2e-6)
    assert sample.metadata["orch"]["counts"] == {} and entry["seconds"] > 0


# --------------------------------------------------------------------------------------------------------------------
# Layout `turns`.


class Rebuilding(ScriptedTask):
    """Writes every prompt from what it has done."""

    def state_prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"2 + 2? so far {len(self.acted)} searches"}]


async def test_a_row_per_turn_from_the_state(tmp_path, monkeypatch):
    turns = script(THOUGHT + SEARCH, "nonsense", FINISH)
    with stage(tmp_path, monkeypatch, turns, Rebuilding(["A"]), layout="turns") as s:
        given = s.sample(index=5)
        members = await s.run(given)
    assert len(members) == 3 and members[-1] is given and [m.metadata["turn"] for m in members] == [0, 1, 2]
    assert {m.rollout_id for m in members} == {5} and all(
        m.metadata["orch"] == given.metadata["orch"] for m in members
    )
    for member, sent in zip(members, s.sent(), strict=True):
        check_row(member)
        assert member.tokens[: len(sent)] == sent and set(member.loss_mask) == {1}
    assert ["so far 0", "so far 1", "so far 1"] == [p.split("2 + 2? ")[1][:8] for p in s.engine.prompts()]
    assert [m.metadata["turn_spans"][0][2] for m in members] == [True, False, True]
    assert [m.weight_versions for m in members] == [["1"]] * 3


async def test_a_row_per_turn_from_the_conversation(tmp_path, monkeypatch):
    task = ScriptedTask(["A", "B"], replies=["yes<|im_end|>"], category="func_call")
    with stage(tmp_path, monkeypatch, script(SEARCH, THOUGHT + "Sure?", FINISH), task, layout="turns") as s:
        members = await s.run()
    assert len(members) == 3 and [m.status for m in members] == [STATUS.COMPLETED] * 3
    last = s.engine.prompts()[-1]
    assert "<tool_response>\nA\n</tool_response>" in last and last.endswith(
        "< |im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert SEARCH in last and "hm" not in last, "the template drops the thoughts of earlier turns"


async def test_the_oldest_messages_leave_first(tmp_path, monkeypatch):
    task = ScriptedTask([f"result {i} " + "word " * 250 for i in range(9)])
    turns = script(*[SEARCH] * 8, FINISH)
    with stage(tmp_path, monkeypatch, turns, task, layout="turns", max_context_len=1500, max_tool_tokens=260) as s:
        members = await s.run()
    assert len(members) == 9
    assert all(len(request.body["input_ids"]) <= 1500 - 256 for request in s.engine.requests)
    last = s.engine.prompts()[-1]
    assert "2 + 2?" in last and "result 7" in last and "result 0" not in last


async def test_evaluation_gives_one_sample(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH, FINISH), Rebuilding(["A"]), layout="turns") as s:
        sample = await s.run(evaluation=True)
    assert isinstance(sample, Sample) and sample.rollout_id is None and sample.metadata["orch"]["turns"] == 2
    check_row(sample)
    assert sample.weight_versions == ["1", "1"]


async def test_a_failure_is_one_member(tmp_path, monkeypatch):
    turns = script(SEARCH, Reply("x", status=500))
    with stage(tmp_path, monkeypatch, turns, ScriptedTask(), layout="turns") as s:
        members = await s.run()
    assert len(members) == 1 and members[0].status is STATUS.FAILED
    assert members[0].metadata["failure_reason"] == "role_unavailable:orchestrator"


async def test_a_template_that_shows_no_tools(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(SEARCH, FINISH), ScriptedTask(), tokenizer=QwenTokenizer(CHATML)) as s:
        sample = await s.run()
    check_row(sample)
    assert "<tools>" in s.engine.prompts()[0] and "<|im_start|>tool\na result<|im_end|>" in s.engine.prompts()[1]
