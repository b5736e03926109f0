"""The loop and its hook against scripted engines: facts 12 to 14, 17, 18, 22 to 26, statuses and budgets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_agentflow import GOOD, Play, command, plan, role_of, stage
from helpers_agentic import Reply

from agentic.agentflow import rollout
from agentic.agentflow.rollout import eval_log, question_of
from agentic.common.errors import ConfigError
from agentic.common.turns import TurnRecord
from slime.utils.types import Sample

NEVER = {"verify": "Conclusion: CONTINUE"}
STATUS = Sample.Status


def turns_of(sample: Sample) -> list[TurnRecord]:
    return [TurnRecord.from_dict(turn) for turn in sample.train_metadata["turns"]]


def results_of(sample: Sample) -> list[str]:
    return [entry["text"] for entry in sample.metadata["trace"] if entry["role"] == "tool"]


async def test_one_step_and_stop(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        sample = await s.run()
    assert s.play.calls == ["analysis", "next_step", "command", "base_generator", "verify", "final"]
    assert sample.status == STATUS.COMPLETED and not sample.remove_sample
    assert sample.metadata["stop_reason"] == "verifier"
    assert sample.metadata["final_output"] == GOOD["final"]
    assert sample.prompt == "What is 3 + 4?"
    assert results_of(sample) == ["7"]
    json.dumps([sample.metadata, sample.train_metadata])


@pytest.mark.parametrize(
    ("train_roles", "trained"), [(["analysis", "next_step"], 4), (["next_step"], 3), (["next_step", "final"], 4)]
)
async def test_verifier_that_never_stops(tmp_path, monkeypatch, train_roles, trained):
    with stage(tmp_path, monkeypatch, Play(**NEVER), max_steps=3, train_roles=train_roles) as s:
        sample = await s.run()
    assert [s.play.calls.count(role) for role in ("analysis", "next_step", "base_generator", "final")] == [1, 3, 3, 1]
    assert sample.metadata["stop_reason"] == "max_steps"
    turns = turns_of(sample)
    assert sum(turn.trained for turn in turns) == trained
    assert all(turn.role in train_roles for turn in turns if turn.trained)
    assert all(sum(turn.loss_mask) == (turn.response_length if turn.trained else 0) for turn in turns)


async def test_evaluation_has_its_own_step_limit(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(**NEVER), max_steps=1, eval_max_steps=2) as s:
        await s.run(evaluation=True)
    assert s.play.calls.count("next_step") == 2


async def test_tokens_are_what_the_engine_saw(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(**NEVER), max_steps=2) as s:
        sample = await s.run(temperature=0.7)
    turns = turns_of(sample)
    assert len(s.policy.requests) == len(turns) == 3
    for request, turn in zip(s.policy.requests, turns, strict=True):
        assert "text" not in request.body and request.body["return_logprob"]
        assert turn.prompt_ids == request.body["input_ids"]
        assert request.body["sampling_params"]["temperature"] == 0.7
    assert {role_of(prompt) for prompt in s.policy.prompts()} == {"analysis", "next_step"}
    assert {role_of(prompt) for prompt in s.frozen.prompts()} == {"command", "verify", "final", "base_generator"}
    assert all(request.body["sampling_params"]["temperature"] == 0.0 for request in s.frozen.requests)
    last = turns[-1]
    assert sample.tokens == last.tokens and sample.loss_mask == last.loss_mask
    assert sample.rollout_log_probs == last.rollout_log_probs and sample.response_length == last.response_length
    assert sample.weight_versions == ["1"] * 3


async def test_next_prompt_contains_memory_and_steps(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(**NEVER), max_steps=2) as s:
        await s.run()
    second = [prompt for prompt in s.policy.prompts() if role_of(prompt) == "next_step"][1]
    assert "Action Step 1" in second and "```\n7\n```" in second
    assert "This is step 2. After it, 0 more" in second


@pytest.mark.parametrize("name", ["`python_coder`.", "Python Coder Tool", "PYTHON-CODER"])
async def test_tool_name_spellings_reach_the_coder(tmp_path, monkeypatch, name):
    with stage(tmp_path, monkeypatch, Play(next_step=plan(name))) as s:
        sample = await s.run()
    assert "python_coder" in s.play.calls
    assert results_of(sample) == ["7"]


@pytest.mark.parametrize(
    ("scripts", "counter", "shown"),
    [
        ({"next_step": [plan("Calculator"), plan()]}, "unknown_tool", "tools: base_generator, python_coder"),
        ({"next_step": ["no labels", plan()]}, "planner_malformed", "missing or empty: Context"),
        ({"command": ["import sys; sys.exit()", command()]}, "command_malformed", "not allowed in line 1"),
        (
            {"command": ['execution = tool.execute(query=open("/etc/passwd").read())', command()]},
            "command_malformed",
            "is not a literal value",
        ),
        ({"command": ['tool.execute(text="x")', command()]}, "tool_errors", "it takes query"),
        ({"command": ["tool.execute(query=3)", command()]}, "tool_errors", "not text parameter query"),
        ({"base_generator": ["  ", "7"]}, "tool_errors", "empty reply"),
    ],
)
async def test_a_bad_step_is_an_entry_and_the_loop_goes_on(tmp_path, monkeypatch, scripts, counter, shown):
    verify = ["Conclusion: CONTINUE", "Conclusion: STOP"]
    with stage(tmp_path, monkeypatch, Play(**scripts, verify=verify)) as s:
        sample = await s.run()
    assert sample.status == STATUS.COMPLETED
    assert sample.metadata["counters"][counter] == 1
    second = [prompt for prompt in s.policy.prompts() if role_of(prompt) == "next_step"][1]
    assert shown in second
    assert results_of(sample)[-1] == "7"


@pytest.mark.parametrize(
    ("code", "ok", "shown"),
    [
        ("import sys\nprint(7)\nsys.exit(0)", True, "7"),
        ("print(7)\nraise ValueError('no')", False, "ValueError: no"),
        ("while True: pass", False, "time limit of 3 s"),
        ("print('x' * 10_000_000)", False, "printed more than"),
        ("pass", True, "printed nothing"),
        ("import os\nprint(os.environ.get('AGENTIC_TEST_SECRET'))", True, "None"),
    ],
)
async def test_coder_results(tmp_path, monkeypatch, code, ok, shown):
    monkeypatch.setenv("AGENTIC_TEST_SECRET", "visible")
    scripts = {"next_step": plan("python_coder"), "python_coder": f"```python\n{code}\n```"}
    with stage(tmp_path, monkeypatch, Play(**scripts), sandbox_timeout_s=3.0) as s:
        sample = await s.run()
    (call,) = [entry for entry in sample.metadata["trace"] if entry["role"] == "tool"]
    assert shown in call["text"] and len(call["text"]) < 6000
    assert call["ok"] is ok
    assert sample.status == STATUS.COMPLETED


async def test_verifier_error_continues_then_stops(tmp_path, monkeypatch):
    broken = Reply(status=500)
    with stage(tmp_path, monkeypatch, Play(verify=broken), max_steps=5) as s:
        sample = await s.run()
    assert sample.metadata["counters"]["verifier_error"] == 2
    assert sample.metadata["stop_reason"] == "verifier_error"
    assert s.play.calls.count("next_step") == 2 and sample.status == STATUS.COMPLETED


async def test_single_verifier_error_only_counts(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(verify=[Reply(status=500), "Conclusion: STOP"]), max_steps=5) as s:
        sample = await s.run()
    assert sample.metadata["counters"]["verifier_error"] == 1
    assert sample.metadata["stop_reason"] == "verifier"


@pytest.mark.parametrize("broken", ["next_step", "command", "base_generator", "final", "analysis"])
async def test_infrastructure_failure_fails_the_trajectory(tmp_path, monkeypatch, broken):
    with stage(tmp_path, monkeypatch, Play(**{broken: Reply(status=503)})) as s:
        sample = await s.run()
    assert sample.status == STATUS.FAILED and sample.remove_sample
    assert sample.metadata["failure_reason"].startswith("role_unavailable:")
    assert sample.reward == 0.0
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length >= 1
    assert len(turns_of(sample)) == {"analysis": 0, "next_step": 1}.get(broken, 2)


async def test_a_failed_sample_can_be_generated_again(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(final=[Reply(status=503), "\\boxed{7}"])) as s:
        sample = await s.run()
        sample = await s.run(sample)
    assert sample.status == STATUS.COMPLETED and sample.reward is None and not sample.remove_sample
    assert sample.metadata["failure_reason"] is None


async def test_engine_abort_is_aborted(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(next_step=Reply("Context", finish_reason="abort"))) as s:
        sample = await s.run()
    assert sample.status == STATUS.ABORTED and sample.remove_sample
    assert sample.metadata["failure_reason"] == "engine_aborted"


async def test_trajectory_deadline_is_checked_before_a_call(tmp_path, monkeypatch):
    slow = Reply("one addition", delay_s=1.7)
    with stage(tmp_path, monkeypatch, Play(analysis=slow), trajectory_timeout_s=1.5) as s:
        sample = await s.run()
    assert s.play.calls == ["analysis"]
    assert sample.status == STATUS.ABORTED and sample.metadata["failure_reason"] == "trajectory_timeout"


async def test_programming_errors_are_not_swallowed(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        monkeypatch.setattr("agentic.agentflow.solver.parse_next_step", lambda text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await s.run()


async def test_cut_analysis_is_truncated(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(analysis="long " * 300)) as s:
        sample = await s.run()
    assert turns_of(sample)[0].finish_reason == "length"
    assert sample.status == STATUS.TRUNCATED


@pytest.mark.parametrize(
    ("role", "train_roles", "status"),
    [
        ("analysis", ["next_step"], STATUS.COMPLETED),
        ("final", ["next_step"], STATUS.TRUNCATED),
        ("final", ["next_step", "final"], STATUS.TRUNCATED),
    ],
)
async def test_what_truncation_counts(tmp_path, monkeypatch, role, train_roles, status):
    scripts = {role: "long " * 600}
    with stage(tmp_path, monkeypatch, Play(**scripts), train_roles=train_roles) as s:
        assert (await s.run()).status == status


async def test_token_budget_is_checked_before_a_call(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play(**NEVER), max_trajectory_tokens=4000, max_steps=9) as s:
        sample = await s.run()
    turns = turns_of(sample)
    used = [len(turn.tokens) for turn in turns]
    assert sum(used[:-1]) < 4000 <= sum(used)
    assert sample.metadata["stop_reason"] == "token_budget" and sample.metadata["final_output"]


async def test_full_context_ends_the_loop_with_an_answer(tmp_path, monkeypatch):
    play = Play(**NEVER, base_generator="w " * 240)
    with stage(tmp_path, monkeypatch, play, max_context_len=3500, max_steps=9) as s:
        sample = await s.run()
    assert sample.metadata["stop_reason"] == "context_full"
    assert sample.status in (STATUS.COMPLETED, STATUS.TRUNCATED) and sample.metadata["final_output"] == GOOD["final"]


async def test_concurrent_questions_share_nothing(tmp_path, monkeypatch):
    def executor(prompt: str) -> str:
        return command("alpha" if "alpha?" in prompt else "beta")

    def generator(prompt: str) -> str:
        return "result of alpha" if "alpha" in prompt else "result of beta"

    play = Play(**NEVER, command=executor, base_generator=generator)
    with stage(tmp_path, monkeypatch, play) as s:
        both = [s.sample("alpha?", index=0), s.sample("beta?", index=1)]
        await asyncio.gather(*(s.run(sample) for sample in both))
        prompts = s.policy.prompts()
    for own, other in (("alpha", "beta"), ("beta", "alpha")):
        mine = [prompt for prompt in prompts if f"{own}?" in prompt]
        assert len(mine) == 4 and not any(other in prompt for prompt in mine)


async def test_crew_is_built_once_per_setting(tmp_path, monkeypatch):
    from agentic.agentflow.crew import get_crew

    with stage(tmp_path, monkeypatch, Play()) as s:
        assert get_crew(s.args) is get_crew(s.args)
        first = get_crew(s.args)
        s.args.agentflow_max_steps = 4
        assert get_crew(s.args) is not first


def test_missing_role_is_a_config_error(tmp_path, monkeypatch):
    from agentic.agentflow.crew import get_crew

    with stage(tmp_path, monkeypatch, Play()) as s:
        path = Path(s.args.agentflow_roles)
        path.write_text(path.read_text().replace("judge:", "search:"))
        with pytest.raises(ConfigError, match="search"):
            get_crew(s.args)


WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 3 + 4?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


async def test_wrapper_is_stripped_and_prompt_kept(tmp_path, monkeypatch):
    prompt = [{"role": "user", "content": WRAPPED}]
    with stage(tmp_path, monkeypatch, Play()) as s:
        sample = await s.run(s.sample(prompt))
    assert sample.metadata["question"] == "What is 3 + 4?"
    assert sample.prompt == [{"role": "user", "content": WRAPPED}]
    assert not any("Remember to put" in text for text in s.policy.prompts() + s.frozen.prompts())


def test_question_forms():
    aime = "Find the number of triples. Remember that order matters."
    assert question_of(aime) == aime
    assert question_of(WRAPPED, strip_wrapper=False) == WRAPPED
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert question_of(chat) == "q"
    for empty in ("", " ", [], [{"role": "system", "content": "s"}]):
        with pytest.raises(ConfigError, match="no question text"):
            question_of(empty)


def eval_data() -> dict:
    samples = [Sample(index=i, status=STATUS.COMPLETED, metadata={"stop_reason": "verifier"}) for i in range(2)]
    failed = Sample(index=2, status=STATUS.FAILED, metadata={"failure_reason": "unscored"})
    return {"aime": {"rewards": [1.0, 0.0, 0.0], "truncated": [False, True, False], "samples": [*samples, failed]}}


def test_eval_log_appends_and_excludes_failures(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        assert eval_log(0, s.args, eval_data(), None) is False
        assert eval_log(1, s.args, eval_data(), {"x": 1}) is False
    path = tmp_path / "save" / "eval_log.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["rollout_id"], second["rollout_id"]) == (0, 1)
    assert (first["n"], first["n_failed"], first["mean"], first["truncated"]) == (2, 1, 0.5, 1)
    assert first["stderr"] == pytest.approx(0.5)
    assert first["failure_reasons"] == {"unscored": 1}
    assert {role["name"] for role in first["roles"]} >= {"planner", "judge"}


def test_eval_log_of_a_fresh_process_keeps_history(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, Play()) as s:
        eval_log(2, s.args, {"d": {"rewards": [0.0]}}, {})
    script = (
        "import json, sys; from argparse import Namespace; from agentic.agentflow.rollout import eval_log\n"
        "done = eval_log(3, Namespace(**json.loads(sys.argv[1])), {'d': {'rewards': [1.0]}}, {})\n"
        "sys.exit(0 if done is False else 1)"
    )
    root = Path(rollout.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, json.dumps(vars(s.args))], cwd=root, check=True)
    lines = (tmp_path / "save" / "eval_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout_id"] for line in lines] == [2, 3]


def test_eval_log_without_save(tmp_path, monkeypatch, caplog):
    with stage(tmp_path, monkeypatch, Play()) as s:
        s.args.save = None
        assert eval_log(0, s.args, eval_data(), None) is False
    assert "--save is not set" in caplog.text


async def test_half_characters_reach_no_tokenizer(tmp_path, monkeypatch):
    """Escapes in a plan or command make text that is no Unicode; encoding it would end the run."""
    step = json.dumps({"context": "\ud800", "sub_goal": "\udc00 add", "tool_name": "base_generator"})
    scripts = {"next_step": step, "command": r'tool.execute(query="3 + 4 \ud83d")'}
    with stage(tmp_path, monkeypatch, Play(**scripts)) as s:
        sample = await s.run(s.sample(prompt="What is 3 + 4? \ud800"))
    assert sample.status == STATUS.COMPLETED and results_of(sample) == ["7"]
    assert any("3 + 4 \ufffd" in prompt for prompt in s.frozen.prompts())
    assert any("\ufffd add" in prompt for prompt in s.frozen.prompts())
