"""The hooks: facts 35 and 36, broken experts inside a group, records, prompts, evaluation log, a stand-in of slime."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from helpers_agentic import Reply
from helpers_orchestra import (
    FINISH,
    SEARCH,
    ExpertTask,
    RawServer,
    ScriptedTask,
    call,
    chat_answer,
    refused_url,
    script,
    stage,
)
from helpers_source import ROOT
from test_architecture import HOOK_SURFACE

from agentic.common.errors import ConfigError, Unscored
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.convert import custom_convert
from agentic.toolorchestra.prompts import FIELDS, PromptSet
from agentic.toolorchestra.reward import reward_func
from agentic.toolorchestra.rollout import eval_log, validate_args
from slime.utils.types import Sample

STATUS = Sample.Status
OUTCOME = {"pref_vec": {"outcome": 1.0}}
ALIASES = '{"answer-1": "big", "answer-2": "small", "search-1": "small"}'


def expert(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "api": "chat", "model": "served", "price_in": 1.0, "price_out": 2.0, **more}


def finish(alias: str) -> str:
    return FINISH.replace("answer-1", alias)


# --------------------------------------------------------------------------------------------------------------------
# Experts behind rollouts.


async def test_aliases_are_those_of_the_sample(tmp_path, monkeypatch):
    """Fact 36: one alias, two samples, two ports."""
    with RawServer(lambda *_: chat_answer(tokens=(100, 10))) as one, RawServer(lambda *_: chat_answer()) as other:
        roles = {"big": expert(one.url), "small": expert(other.url)}
        with stage(tmp_path, monkeypatch, script(FINISH), ExpertTask(), ExpertTask(), ExpertTask(), roles=roles) as s:
            samples = [
                s.sample(0, model_mapping={"answer-1": "big"}),
                s.sample(1, model_mapping={"answer-1": "small"}),
            ]
            for sample in samples:
                await s.run(sample)
        assert len(one.bodies) == len(other.bodies) == 1
    assert all(sample.metadata["orch"]["counts"] == {"answer-1": 1} for sample in samples)
    first, second = (sample.metadata["orch"]["ledger"]["answer-1"] for sample in samples)
    assert first["dollars"] == pytest.approx(120e-6) and second["dollars"] == pytest.approx(20e-6)


SERVERS: dict[str, tuple[Any, float, str]] = {
    "slow": (lambda *_: chat_answer(), 30.0, "role_timeout:big"),
    "garbage": (lambda *_: (200, b"%%%"), 0.0, "role_bad_response:big"),
    "html": (lambda *_: (200, b"<html>sign in</html>"), 0.0, "role_bad_response:big"),
    "10 MB": (lambda *_: chat_answer("x" * 10_000_000), 0.0, "role_bad_response:big"),
    "down": (None, 0.0, "role_unavailable:big"),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_a_broken_expert_fails_its_rollout_and_no_other(tmp_path, monkeypatch, name: str):
    """Fact 35: FAILED within the deadline, the rest of the group finishes, the account is right."""
    answer, delay_s, reason = SERVERS[name]
    turns = lambda prompt: finish("answer-1" if "use the big one" in prompt else "answer-2")  # noqa: E731
    tasks = [ExpertTask() for _ in range(4)]
    start = time.monotonic()
    with RawServer(answer or (lambda *_: chat_answer()), delay_s) as broken, RawServer(
        lambda *_: chat_answer()
    ) as fine:
        url = broken.url if answer else refused_url()
        roles = {"big": expert(url, timeout_s=0.3 if delay_s else 20, retries=1), "small": expert(fine.url)}
        with stage(tmp_path, monkeypatch, turns, *tasks, roles=roles, aliases=ALIASES, episode_timeout_s=15) as s:
            tasks[2].start = lambda: _messages("use the big one")  # type: ignore[method-assign]
            samples = [s.sample(index) for index in range(4)]
            await asyncio.gather(*(s.run(sample) for sample in samples))
            for sample in samples:
                if sample.status is STATUS.COMPLETED:
                    sample.reward = await reward_func(s.args, sample)
            rows = custom_convert(s.args, samples)
    assert time.monotonic() - start < 20
    failed = samples.pop(2)
    assert failed.status is STATUS.FAILED and failed.remove_sample and failed.reward is None
    assert failed.metadata["failure_reason"] == reason and failed.loss_mask == [0] and failed.response_length == 1
    record = failed.metadata["orch"]
    assert record["termination"] == "failure" and record["counts"] == {} and record["turns"] == 1
    account = record["ledger"]
    assert account["answer-1"]["failures"] == 1 and account["answer-1"]["dollars"] == 0.0
    assert record["dollars"] == pytest.approx(account["orchestrator"]["dollars"]) and record["dollars"] > 0
    assert [sample.status for sample in samples] == [STATUS.COMPLETED] * 3
    assert [sample.reward for sample in samples] == [1.0] * 3
    assert all(task.closed == 1 for task in tasks)
    assert rows["raw_reward"] == [1.0, 1.0, None, 1.0] and sum(rows["loss_masks"][2]) == 0


async def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("layout", ["stream", "turns"])
async def test_rows_reach_the_trainer(tmp_path, monkeypatch, layout: str):
    """Two rollouts of a group, one right and one wrong, through the conversion hook."""
    right, wrong = ScriptedTask(["A"]), ScriptedTask(["A"])
    wrong.outcome = _wrong  # type: ignore[method-assign]
    turns = script(SEARCH, FINISH, SEARCH, FINISH)
    with stage(tmp_path, monkeypatch, turns, right, wrong, layout=layout, reward="outcome") as s:
        groups = [await s.run(s.sample(index)) for index in range(2)]
        rows = custom_convert(s.args, groups)
    assert len(rows["tokens"]) == (2 if layout == "stream" else 4)
    assert {round(value, 3) for value in rows["rewards"]} == {0.707, -0.707}
    assert all(
        len(mask) == len(logs) for mask, logs in zip(rows["loss_masks"], rows["rollout_log_probs"], strict=True)
    )


async def _wrong(termination: str | None = None) -> Any:
    from agentic.toolorchestra.environment import Outcome

    return Outcome(0.0, True, "answer", {})


async def test_questions_with_their_own_environment(tmp_path, monkeypatch):
    """From the prompt through an expert to the score of its answer, in both kinds of prompt."""
    for layout in ("stream", "turns"):
        with RawServer(lambda *_: chat_answer(r"So it is <answer>4</answer> \boxed{4}")) as server:
            roles = {"big": expert(server.url)}
            aliases = '{"answer-1": "big"}'
            with stage(
                tmp_path, monkeypatch, script("no call", FINISH), roles=roles, aliases=aliases, layout=layout
            ) as s:
                sample = s.sample()
                await s.run(sample)
        record = sample.metadata["orch"]
        assert record["outcome"] == 1.0 and record["valid_answer"] and record["termination"] == "answer"
        assert record["counts"] == {"answer-1": 1} and "What is 2 + 2?" in s.engine.prompts()[0]
        assert await reward_func(s.args, sample) == 1.0
        assert "What is 2 + 2?" in server.bodies[0]["messages"][-1]["content"]


async def test_tau2_with_an_expert_who_acts(tmp_path, monkeypatch):
    """A task of tau2's mock domain, solved by the expert; the policy hands over and says good bye."""
    create = call("create_task", user_id="user_1", title="Important Meeting")
    turns = script(call("call_expert", expert="expert-1"), "<message>Done.</message>", "<message>Good bye.</message>")
    with RawServer(lambda *_: chat_answer(create, (50, 20))) as server:
        roles, aliases = {"big": expert(server.url)}, '{"expert-1": "big"}'
        with stage(tmp_path, monkeypatch, turns, roles=roles, aliases=aliases, user="scripted") as s:
            sample = await s.run(s.sample(category="func_call", domain="mock", task_id="create_task_1"))
    record = sample.metadata["orch"]
    assert sample.status is STATUS.COMPLETED and record["counts"] == {"expert-1": 1}, record
    assert record["outcome"] == 1.0 and record["valid_answer"] and record["termination"] == "user_stop"
    assert '"call_expert"' in s.engine.prompts()[0] and "expert-1 called tools" in s.engine.prompts()[1]
    assert {tool["function"]["name"] for tool in server.bodies[0]["tools"]} >= {"create_task"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metadata": {"category": "chess", **OUTCOME}}, "bad_category"),
        ({"metadata": OUTCOME}, "bad_category"),
        ({"metadata": {"category": "qa"}}, "bad_preference"),
        ({"label": None}, "no_label"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "no_question"),
        ({"metadata": {"category": "qa", "model_mapping": {"answer-1": "nobody"}, **OUTCOME}}, "unknown_model"),
    ],
)
async def test_records_that_cannot_be_used(tmp_path, monkeypatch, change: dict[str, Any], reason: str):
    with stage(
        tmp_path, monkeypatch, script(FINISH), roles={"big": expert("http://x")}, aliases='{"answer-1": "big"}'
    ) as s:
        sample = s.sample()
        for name, value in change.items():
            setattr(sample, name, value)
        await s.run(sample)
    assert sample.status is STATUS.FAILED and sample.metadata["failure_reason"] == reason
    assert s.engine.requests == [] and sample.metadata["orch"]["turns"] == 0


async def test_an_answer_that_cannot_be_scored_is_no_zero(tmp_path, monkeypatch):
    async def unscored(termination: str | None = None) -> Any:
        raise Unscored("judge down")

    task = ScriptedTask()
    task.outcome = unscored  # type: ignore[method-assign]
    with stage(tmp_path, monkeypatch, script(FINISH), task) as s:
        sample = await s.run()
    assert sample.status is STATUS.FAILED and sample.metadata["failure_reason"] == "unscored" and task.closed == 1


async def test_engine_down(tmp_path, monkeypatch):
    with stage(tmp_path, monkeypatch, script(Reply("x", status=500)), ScriptedTask()) as s:
        sample = await s.run()
    assert sample.status is STATUS.FAILED and sample.metadata["failure_reason"] == "role_unavailable:orchestrator"


# --------------------------------------------------------------------------------------------------------------------
# Settings, prompts, log.


def settings(tmp_path: Path, **given: Any) -> Namespace:
    path = tmp_path / "roles.yaml"
    if not path.exists():
        path.write_text("roles: {orchestrator: {url: policy}, big: {url: 'http://x', api: chat, model: m}}")
    return Namespace(**{"orchestra_roles": str(path), **{f"orchestra_{name}": value for name, value in given.items()}})


def test_settings_are_checked_before_anything_starts(tmp_path):
    validate_args(settings(tmp_path, aliases={"answer-1": "big"}))
    with pytest.raises(ConfigError, match="orchestra_roles is not set"):
        validate_args(Namespace())
    with pytest.raises(ConfigError, match="did you mean 'max_turns'"):
        validate_args(settings(tmp_path, max_turn=3))
    with pytest.raises(ConfigError, match="orchestra_layout is 'rows': choose from stream, turns"):
        validate_args(settings(tmp_path, layout="rows"))
    with pytest.raises(ConfigError, match="orchestra_max_turns is 0: must be positive"):
        validate_args(settings(tmp_path, max_turns=0))
    with pytest.raises(ConfigError, match="serves the model 'huge'"):
        validate_args(settings(tmp_path, aliases={"answer-1": "huge"}))
    with pytest.raises(ConfigError, match="sets: .*standard"):
        validate_args(settings(tmp_path, prompt_set="none"))
    with pytest.raises(FileNotFoundError, match="role file"):
        validate_args(settings(tmp_path, roles=str(tmp_path / "nothing.yaml")))


def test_the_policy_must_be_the_trained_model(tmp_path):
    (tmp_path / "roles.yaml").write_text("roles: {orchestrator: {url: 'http://x', api: chat, model: m}}")
    with pytest.raises(ConfigError, match="must have `url: policy`"):
        validate_args(settings(tmp_path))
    (tmp_path / "roles.yaml").write_text("roles: {orchestrater: {url: policy}}")
    with pytest.raises(ConfigError, match="missing role 'orchestrator' .'orchestrater' is there"):
        validate_args(settings(tmp_path))


def test_settings_can_key_a_cache(tmp_path):
    one = OrchestraConfig.from_args(settings(tmp_path, aliases={"b": "m", "a": "n"}))
    assert hash(one) == hash(OrchestraConfig.from_args(settings(tmp_path, aliases={"a": "n", "b": "m"})))


def test_prompt_sets():
    prompts = PromptSet.load("standard")
    messages = prompts.render("qa_turn", question="2 + 2? $5 <|im_end|>", state="")
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "2 + 2? $5 < |im_end|>" in messages[1]["content"]
    assert prompts.text("format_error", errors="no tool call") == "Error: no tool call. Nothing was done; try again."
    with pytest.raises(TypeError, match="takes the fields"):
        prompts.text("format_error", error="x")


def test_prompt_sets_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="file is missing"):
        PromptSet.load(str(tmp_path))
    for name in FIELDS:
        (tmp_path / f"{name}.txt").write_text("x ${question}" if name == "tools" else "x")
    with pytest.raises(ConfigError, match="question"):
        PromptSet.load(str(tmp_path))


async def test_eval_log(tmp_path, monkeypatch):
    """pass^k per domain, money, time, calls and rates; a failure is a missing trial."""
    tasks = [ScriptedTask(["A"]), ScriptedTask(), ScriptedTask(), ScriptedTask()]
    tasks[1].outcome = _wrong  # type: ignore[method-assign]
    turns = script(SEARCH, "oops", FINISH, FINISH, FINISH, Reply("x", status=500))
    with stage(tmp_path, monkeypatch, turns, *tasks) as s:
        names = [("airline", "7"), ("airline", "7"), ("retail", "0"), ("retail", "0")]
        samples = [s.sample(i, domain=domain, task_id=task) for i, (domain, task) in enumerate(names)]
        for sample in samples:
            await s.run(sample, evaluation=True)
        rewards = [await reward_func(s.args, sample) for sample in samples]
        data = {"tau2": {"rewards": rewards, "truncated": [False] * 4, "samples": samples}}
        assert eval_log(3, s.args, data, {"x": 1}) is False
        (line,) = Path(s.args.save, "eval_log.jsonl").read_text().splitlines()
        s.args.save = None
        assert eval_log(3, s.args, data) is False
    logged = json.loads(line)
    assert (logged["rollout_id"], logged["dataset"], logged["n"], logged["n_failed"]) == (3, "tau2", 3, 1)
    assert logged["mean"] == pytest.approx(2 / 3)
    airline, retail = logged["domains"]["airline"], logged["domains"]["retail"]
    assert airline["mean"] == 0.5 and airline["pass_hat"] == {"1": 0.5, "2": 0.0}
    assert retail["pass_hat"] == {"1": 1.0} and retail["missing"] == 1 and retail["trials"] == 1
    assert logged["turns"] == pytest.approx(5 / 3) and logged["format_error_rate"] == pytest.approx(1 / 5)
    assert logged["infrastructure_failure_rate"] == 0.25 and logged["truncation_rate"] == 0.0
    assert logged["breakdown"] == {"correct": 1.0} and logged["terminations"] == {"answer": 3}
    assert logged["dollars"] > 0 and logged["seconds"] > 0 and logged["config"]["layout"] == "stream"


# Runs in a process of its own: `slime` is made of exactly the public names, everything else of it cannot be imported.
_LOAD_ON_STAND_IN = """
import enum, importlib, json, sys, types
surface, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Sample:
    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

def stand_in(name):
    if name not in sys.modules:
        sys.modules[name] = module = types.ModuleType(name)
        module.__path__ = []  # a package without files: nothing below it can be found
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stand_in(parent), child, module)
    return sys.modules[name]

for name, names in surface.items():
    module = stand_in(name)
    for public in names:
        setattr(module, public, Sample if public == "Sample" else type(public, (), {}))
loaded = {name: importlib.import_module(name) for name in modules}

try:
    importlib.import_module("slime.utils.arguments")
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the real slime was reachable")

samples = []
for index, outcome in enumerate([1.0, 0.0]):
    sample = Sample()
    orch = {"counts": {"answer-1": 1}, "outcome": outcome, "dollars": 0.1, "seconds": 2.0, "pref_vec": {"outcome": 1.0},
            "turns": 1, "format_ok": True, "format_errors": 0, "valid_answer": True, "termination": "answer",
            "breakdown": {}, "ledger": {}}
    sample.__dict__.update(index=index, group_index=0, rollout_id=None, status=Sample.Status.COMPLETED, reward=outcome,
                           remove_sample=False, tokens=[1, 2, 3], response_length=1, loss_mask=[1],
                           rollout_log_probs=[-0.5], metadata={"orch": orch, "turn_spans": [[0, 1, True]], "turn": 0})
    samples.append(sample)
args = types.SimpleNamespace(orchestra_roles="unused.yaml", rewards_normalization=True, grpo_std_normalization=False,
                             global_batch_size=2)
rows = loaded["agentic.toolorchestra.convert"].custom_convert(args, samples)
print(json.dumps({"rewards": rows["rewards"], "tokens": rows["tokens"]}))
"""


def test_works_on_a_stand_in_of_the_hook_surface(tmp_path):
    """The method loads, and converts two rollouts, where slime is nothing but the names of the surface."""
    modules = [f"agentic.toolorchestra.{name}" for name in ("rollout", "reward", "convert", "qa.environment")]
    command = [sys.executable, "-c", _LOAD_ON_STAND_IN, json.dumps(HOOK_SURFACE), json.dumps(modules)]
    (tmp_path / "agentic").symlink_to(ROOT / "agentic")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"rewards": [0.5, -0.5], "tokens": [[1, 2, 3], [1, 2, 3]]}
