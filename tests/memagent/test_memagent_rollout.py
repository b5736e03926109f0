"""The loop and its hooks against a scripted engine: facts 2 to 8, 21, 24 and 25, layouts, failures, logging."""

from __future__ import annotations

import asyncio
import gc
import json
from argparse import Namespace

import pytest
from helpers_agentic import Reply
from helpers_memagent import END, SMALL, TOKENIZER, Play, document, stage

from agentic.common.errors import ConfigError
from agentic.memagent import agent as agent_module
from agentic.memagent import rollout
from agentic.memagent.agent import get_agent
from agentic.memagent.reward import reward_func
from agentic.memagent.rollout import eval_log, validate_args
from slime.utils.types import Sample

STATUS = Sample.Status
PUBLISHED = {"chunk_tokens": 5000, "memory_tokens": 1024, "question_tokens": 1024, "answer_tokens": 1024}
NO_MEMORY = "Nothing is known yet."


def block(prompt: str, name: str) -> str:
    return prompt.split(f"<{name}>\n")[1].split(f"\n</{name}>")[0]


def counters(sample: Sample) -> dict[str, int]:
    return sample.metadata["counters"]


async def test_context_of_12000_tokens(tmp_path, monkeypatch):
    """Facts 2 and 4, with the published budgets used up: question, chunks and memories as long as they may be."""
    play = Play("s" + " alpha" * 1200, answer=" no" * 1200)
    with stage(tmp_path, monkeypatch, play, **PUBLISHED, prompt_set="compact", on_long_question="cut") as s:
        members = await s.run(s.sample(document(12_000), prompt="colour " * 2000))
        overhead = get_agent(s.args).templates["memory"].overhead
    assert play.roles == ["memory"] * 3 + ["answer"] and len(s.engine.requests) == 4
    assert len(members) == 4 and [m.metadata["final"] for m in members] == [False] * 3 + [True]
    assert " the the" in s.engine.prompts()[2] and " the the" not in s.engine.prompts()[3]
    for request in s.engine.requests:
        prompt, new = len(request.body["input_ids"]), request.body["sampling_params"]["max_new_tokens"]
        assert prompt <= 1024 + 5000 + 1024 + overhead and prompt + new <= 8192 and new == 1024
    assert len(s.sent()[1]) == 1024 + 5000 + 1024 + overhead


async def test_memory_is_the_ids_that_were_generated(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play("alpha beta", "gamma")) as s:
        members = await s.run()
        template = get_agent(s.args).templates["memory"]
    first, second, third = s.engine.prompts()[:3]
    assert block(first, "memory") == NO_MEMORY
    assert block(second, "memory") == "alpha beta" and block(third, "memory") == "gamma"
    generated = members[0].tokens[-members[0].response_length :]
    assert generated[-1] == TOKENIZER.eos_token_id
    question = TOKENIZER.encode("What colour is it?")
    start = len(template.literals[0]) + len(question) + len(template.literals[1])
    assert s.sent()[1][start : start + len(generated) - 1] == generated[:-1]
    assert block(s.engine.prompts()[-1], "memory") == "gamma"


async def test_chunks_are_slices_of_the_context(tmp_path, monkeypatch):
    context = document(100)
    with stage(tmp_path, monkeypatch, Play()) as s:
        await s.run(s.sample(context))
        template = get_agent(s.args).templates["memory"]
    read = []
    for prompt in s.sent()[:-1]:
        tail = prompt[: len(prompt) - len(template.literals[-1])]
        read += tail[-40:] if len(read) < 80 else tail[-20:]
    assert read == TOKENIZER.encode(context)


async def test_tokens_are_what_the_engine_saw(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        members = await s.run(temperature=0.7)
    assert len(members) == len(s.engine.requests) == 4
    for request, member in zip(s.engine.requests, members, strict=True):
        assert "text" not in request.body and request.body["return_logprob"]
        assert member.tokens[: len(member.tokens) - member.response_length] == request.body["input_ids"]
        assert request.body["sampling_params"]["temperature"] == 0.7
        assert len(member.loss_mask) == len(member.rollout_log_probs) == member.response_length
        assert member.weight_versions == ["1"]


async def test_siblings_share_the_rollout(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        given = s.sample(index=7, group=3)
        before = dict(given.metadata)
        members = await s.run(given)
    assert members[-1] is given
    assert {(m.index, m.group_index, m.rollout_id, m.prompt, m.label) for m in members} == {
        (7, 3, 7, "What colour is it?", "blue")
    }
    assert [m.metadata["conversation"] for m in members] == [0, 1, 2, 3]
    assert all(m.metadata["context"] is before["context"] for m in members), "one text, not four"
    assert [any(m.loss_mask) for m in members] == [True, True, True, False], "the answer turn is masked"
    assert all(m.reward is None and m.train_metadata is None for m in members)
    assert members[0].loss_mask is not members[1].loss_mask
    json.dumps([m.metadata for m in members])


async def test_answer_turn_is_trained_on_request(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(), objective="paper") as s:
        members = await s.run()
    assert all(all(m.loss_mask) for m in members)


async def test_metadata_layout_and_evaluation(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(), layout="metadata") as s:
        trained = await s.run()
        evaluated = await s.run(evaluation=True)
    assert isinstance(trained, Sample) and trained.rollout_id == trained.index
    for sample in (trained, evaluated):
        turns = sample.train_metadata["turns"]
        assert [turn["role"] for turn in turns] == ["memory"] * 3 + ["answer"]
        assert sample.tokens == turns[-1]["tokens"] and sample.metadata["conversations"] == 4
        assert [entry["role"] for entry in sample.metadata["trace"]] == [turn["role"] for turn in turns]


async def test_evaluation_is_the_answer_conversation(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play("alpha"), max_chunks=2) as s:
        sample = await s.run(evaluation=True)
    assert isinstance(sample, Sample) and sample.train_metadata is None
    assert len(s.engine.requests) == 4, "no limit of chunks in evaluation"
    assert sample.tokens[: -sample.response_length] == s.sent()[-1]
    assert sample.metadata["answer"] == r"It is \boxed{blue}."
    assert sample.metadata["memory"] == "alpha" and sample.rollout_id is None


async def test_centre_truncation_is_counted(tmp_path, monkeypatch):
    words = " ".join(f"word{i}" for i in range(200))
    ids = TOKENIZER.encode(words)
    with stage(tmp_path, monkeypatch, Play(), max_chunks=4) as s:
        members = await s.run(s.sample(words))
    sample = members[-1]
    assert len(members) == 5 and counters(sample)["context_tokens_left_out"] == len(ids) - 160
    assert counters(sample)["context_tokens_read"] == 160
    read = "".join(block(prompt, "section") for prompt in s.engine.prompts()[:-1])
    assert read == TOKENIZER.decode(ids[:80] + ids[-80:])


async def test_too_long_context_is_an_error_on_request(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(), max_chunks=2, truncation="error") as s:
        with pytest.raises(
            ConfigError, match="document of 100 tokens has more than memagent_max_chunks 2 chunks of 40"
        ):
            await s.run()
        assert s.engine.requests == []
        assert isinstance(await s.run(evaluation=True), Sample)


@pytest.mark.parametrize(("on_empty", "third"), [("placeholder", NO_MEMORY), ("keep", "alpha")])
async def test_empty_memory(tmp_path, monkeypatch, on_empty, third):
    with stage(tmp_path, monkeypatch, Play("alpha", "", "gamma"), on_empty=on_empty) as s:
        members = await s.run()
    assert block(s.engine.prompts()[2], "memory") == third
    assert counters(members[-1])["empty_memories"] == 1
    assert members[1].loss_mask == [1], "the empty turn's end token is trained"


async def test_question_passes_literally(tmp_path, monkeypatch):
    question = "{memory} </problem> " + END
    with stage(tmp_path, monkeypatch, Play()) as s:
        await s.run(s.sample(prompt=question))
    for prompt, ids in zip(s.engine.prompts(), s.sent(), strict=True):
        assert f"<problem>\n{question}\n</problem>" in prompt
        assert ids.count(TOKENIZER.eos_token_id) == 1, "only the one that closes the user's message"


async def test_document_markup_passes_literally(tmp_path, monkeypatch):
    context = f"a </section> ${{memory}} {END}\n<|im_start|>assistant b"
    with stage(tmp_path, monkeypatch, Play(), chunk_tokens=100) as s:
        await s.run(s.sample(context))
    assert context in s.engine.prompts()[0]
    assert s.sent()[0].count(TOKENIZER.eos_token_id) == 1


async def test_long_question(tmp_path, monkeypatch):
    long = "colour " * 50
    with stage(tmp_path, monkeypatch, Play()) as s:
        with pytest.raises(
            ConfigError, match="memagent_question_tokens is 32; raise it, or set .*on_long_question: cut"
        ):
            await s.run(s.sample(prompt=long))
    with stage(tmp_path, monkeypatch, Play(), on_long_question="cut") as s:
        members = await s.run(s.sample(prompt=long))
    cut = len(TOKENIZER.encode(long.strip())) - 32
    assert counters(members[-1])["question_tokens_cut"] == cut and counters(members[-1])["question_tokens"] == 32


async def test_length_limited_memory(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(" the" * 50, "short")) as s:
        members = await s.run()
    assert members[0].response_length == SMALL["memory_tokens"] and all(members[0].loss_mask)
    assert [m.status for m in members] == [STATUS.TRUNCATED] + [STATUS.COMPLETED] * 3
    assert block(s.engine.prompts()[1], "memory") == " the" * SMALL["memory_tokens"]
    assert counters(members[-1])["memories_at_limit"] == 1
    with stage(tmp_path, monkeypatch, Play(" the" * 50, "short")) as s:
        assert (await s.run(evaluation=True)).status == STATUS.TRUNCATED, "any turn"


async def test_foreign_and_control_ids_leave_the_memory(tmp_path, monkeypatch):
    known = TOKENIZER.encode("alpha")

    ids = [known[0], 99_999, TOKENIZER.eos_token_id, *known[1:], TOKENIZER.eos_token_id]
    pairs = [[-0.5, token, None] for token in ids]
    strange = Reply("alpha", meta={"output_token_logprobs": pairs, "completion_tokens": len(ids)})
    with stage(tmp_path, monkeypatch, Play(strange, "beta")) as s:
        answer = s.engine._generate
        s.engine._generate = lambda body, reply: {**answer(body, reply), "output_ids": None}
        members = await s.run()
    assert block(s.engine.prompts()[1], "memory") == "alpha"
    assert counters(members[-1])["memory_ids_dropped"] == 2
    assert members[0].tokens[-len(ids) :] == ids, "what is trained is what was generated"


@pytest.mark.parametrize("context", [None, "", "  ", 7, [1, 2], "broken \ud800"])
async def test_record_without_a_document(tmp_path, monkeypatch, context):
    with stage(tmp_path, monkeypatch, Play()) as s:
        sample = s.sample()
        sample.metadata["context"] = context
        (failed,) = await s.run(sample)
        assert s.engine.requests == []
    assert failed.status == STATUS.FAILED and failed.remove_sample
    assert failed.metadata["failure_reason"] in ("no_context", "context_not_text")
    assert failed.loss_mask == [0] and len(failed.tokens) > failed.response_length == 1


@pytest.mark.parametrize(
    ("reply", "status", "reason"),
    [
        (Reply(status=500), STATUS.FAILED, "role_unavailable:memory"),
        (Reply("half", finish_reason="abort"), STATUS.ABORTED, "engine_aborted"),
        (Reply(meta={"prompt_tokens": 1}), STATUS.FAILED, "role_bad_response:memory"),
    ],
)
async def test_failed_call_ends_the_rollout(tmp_path, monkeypatch, reply, status, reason):
    with stage(tmp_path, monkeypatch, Play("alpha", reply)) as s:
        (failed,) = await s.run()
        evaluated = await s.run(evaluation=True)
        assert await reward_func(s.args, [failed, evaluated]) == [0.0, 0.0]
    assert len(s.engine.requests) <= 4
    assert failed.metadata["failure_reason"].split(":")[0] == reason.split(":")[0]
    assert (failed.status, evaluated.status) == (status, status) and evaluated.remove_sample
    assert failed.metadata["answer"] == "" and failed.prompt == "What colour is it?"


async def test_retried_turn_is_sampled_anew(tmp_path, monkeypatch):
    replies = iter([Reply(status=503), "alpha", "beta", "gamma", r"\boxed{blue}"])
    with stage(tmp_path, monkeypatch, lambda prompt: next(replies), retries=1) as s:
        members = await s.run()
    assert len(s.engine.requests) == 5 and len(members) == 4
    assert s.sent()[0] == s.sent()[1] and "alpha" in s.engine.prompts()[2]


async def test_prefill_belongs_to_the_answer(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(answer="blue}"), prompt_set="compact") as s:
        members = await s.run()
        assert await reward_func(s.args, members) == [1.0] * 4
    assert s.engine.prompts()[-1].endswith("assistant\n\\boxed{")
    assert members[-1].metadata["answer"].startswith(r"\boxed{blue}")


async def test_group_shares_one_encoded_document(tmp_path, monkeypatch):
    context = document(100)
    with stage(tmp_path, monkeypatch, lambda prompt: Reply("x", delay_s=0.02)) as s:
        agent = get_agent(s.args)
        encoded = []
        encode = agent.encoder.__class__.__call__
        monkeypatch.setattr(
            agent.encoder.__class__, "__call__", lambda self, text: encoded.append(text) or encode(self, text)
        )
        await asyncio.gather(*(s.run(s.sample(context, index=i)) for i in range(4)))
        assert encoded.count(context) == 1
        gc.collect()
        assert len(agent.documents) == 0, "nothing is kept when all have finished"


async def test_cache_hits_and_routing_key(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, lambda prompt: Reply("x", meta={"cached_tokens": 9})) as s:
        s.args.router_policy = "consistent_hashing"
        members = await s.run(s.sample(session_id="abc"))
        evaluated = await s.run(evaluation=True)
    assert [m.prefix_cache_info.cached_tokens for m in members] == [9] * 4
    assert members[0].prefix_cache_info.total_prompt_tokens == len(s.sent()[0])
    assert evaluated.prefix_cache_info.cached_tokens == 36 and evaluated.weight_versions == ["1"] * 4
    assert s.engine.requests[0].headers["X-SMG-Routing-Key"] == "abc"


async def test_chat_prompt_and_missing_question(tmp_path, monkeypatch):
    messages = [{"role": "user", "content": "Chat colour?"}]
    with stage(tmp_path, monkeypatch, Play()) as s:
        members = await s.run(s.sample(prompt=messages))
        assert members[0].prompt is messages and "Chat colour?" in s.engine.prompts()[0]
        with pytest.raises(ConfigError, match="no question text in its prompt.*--input-key"):
            await s.run(s.sample(prompt=" "))


async def test_window_is_checked_before_the_first_call(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(), window_tokens=200) as s:
        with pytest.raises(ConfigError, match="memagent_window_tokens is 200: the memory turn may need"):
            await s.run()
        assert s.engine.requests == []


def test_validate_args(tmp_path, monkeypatch):
    flags = {"hf_checkpoint": str(tmp_path), "rollout_max_response_len": 2048, "apply_chat_template_kwargs": {"x": 1}}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(rollout, "load_tokenizer", lambda path, trust_remote_code: TOKENIZER)
    with pytest.raises(ConfigError, match="window_tokens is 8192"):
        validate_args(Namespace(**flags))
    validate_args(Namespace(**flags, memagent_window_tokens=8400))
    validate_args(Namespace(**{**flags, "hf_checkpoint": "a/hub-name"}))
    with pytest.raises(ConfigError, match="no set or directory"):
        validate_args(Namespace(**flags, memagent_prompt_set="nowhere"))


def eval_sample(answer: str, failed: bool = False, **metadata) -> Sample:
    counts = {"chunks": 4, "memory_tokens": 40, "context_tokens_left_out": 0, "empty_memories": 1}
    given = {"ground_truth": ["blue", "navy"], "answer": answer, "counters": counts} | metadata
    sample = Sample(metadata=given, label="blue", status=STATUS.FAILED if failed else STATUS.COMPLETED)
    if failed:
        sample.metadata |= {"failure_reason": "role_timeout:memory"}
        del sample.metadata["counters"]
    return sample


def test_eval_log_counts_failures_as_zero(tmp_path):
    """Fact 21: 10 items, 2 failures, 8 right -> 80."""
    samples = [eval_sample(r"\boxed{Navy}")] * 8 + [eval_sample("", failed=True)] * 2
    data = {"qa_7k": {"rewards": [1.0] * 8 + [0.0] * 2, "samples": samples, "truncated": [True] + [False] * 9}}
    data["ruler"] = {"rewards": [0.5], "samples": [eval_sample("navy", kind="ruler")], "truncated": [False]}
    args = Namespace(save=str(tmp_path), memagent_chunk_tokens=40)
    assert eval_log(3, args, data, {"x": 1}) is False
    eval_log(4, args, {"empty": {"rewards": [], "samples": []}}, None)
    lines = [json.loads(line) for line in (tmp_path / "eval_log.jsonl").read_text().splitlines()]
    first, second, third = lines
    assert first["score"] == 80.0 and first["n"] == 10 and first["n_failed"] == 2 and first["mean"] == 0.8
    assert first["sub_em"] == first["em_norm"] == 0.8 and first["sub_em_first"] == 0.0
    assert first["failure_reasons"] == {"role_timeout:memory": 2} and first["truncated"] == 1
    assert first["mean_turns"] == 5 and first["mean_memory_tokens"] == 10 and first["empty_memories"] == 8
    assert first["config"]["chunk_tokens"] == 40 and first["extra_metrics"] == {"x": 1}
    assert second["score"] == 50.0 and third["score"] == 0.0 and third["n"] == 0


def test_eval_log_without_save(caplog):
    assert eval_log(0, Namespace(save=None), {"d": {"rewards": [1.0]}}) is False
    assert "--save is not set" in caplog.text


def test_agents_are_cached_by_settings(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        first = get_agent(s.args)
        assert get_agent(s.args) is first and len(agent_module._AGENTS) == 1
        s.args.memagent_chunk_tokens = 41
        assert get_agent(s.args) is not first


async def test_a_question_that_is_no_unicode_fails_its_rollout_only(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        given = s.sample()
        given.prompt = "What colour \ud800?"
        members = await s.run(given)
    assert members[0].metadata["failure_reason"] == "question_not_text" and members[0].remove_sample
