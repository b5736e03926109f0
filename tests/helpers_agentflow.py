"""A whole AgentFlow crew against scripted engines: one for the policy, one for all frozen roles."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_agentic import FakeEngine, FakeTokenizer, Reply

from slime.utils.types import Sample

MARKS = {
    "analysis": "You plan how",
    "next_step": "You choose the next action",
    "command": "You turn a sub-goal",
    "verify": "You check whether",
    "final": "You write the final answer",
    "python_coder": "You write short Python",
    "judge": "You compare an answer",
}
PLAN = "Justification: j\nContext: 3 and 4\nSub-Goal: add them\nTool Name: {tool}"
Script = str | Reply | list | Callable[[str], "str | Reply"]


def plan(tool: str = "base_generator") -> str:
    return PLAN.format(tool=tool)


def command(query: str = "add 3 and 4") -> str:
    return f'```python\nexecution = tool.execute(query="""{query}""")\n```'


GOOD: dict[str, Script] = {
    "analysis": "one addition",
    "next_step": plan(),
    "command": command(),
    "base_generator": "7",
    "python_coder": "```python\nprint(3 + 4)\n```",
    "verify": "Conclusion: STOP",
    "final": "The sum is \\boxed{7}",
    "judge": "VERDICT: True",
}


def role_of(prompt: str) -> str:
    return next((role for role, mark in MARKS.items() if mark in prompt), "base_generator")


class Play:
    """Scripted answers by role. A list gives successive answers, its last one repeats."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = GOOD | scripts
        self.calls: list[str] = []

    def __call__(self, prompt: str) -> str | Reply:
        role = role_of(prompt)
        script = self.scripts[role]
        if isinstance(script, list):
            script = script[min(self.calls.count(role), len(script) - 1)]
        self.calls.append(role)
        return script(prompt) if callable(script) else script


class Stage:
    """Engines, arguments and samples for one test."""

    def __init__(self, policy: FakeEngine, frozen: FakeEngine, play: Play, args: Namespace) -> None:
        self.policy, self.frozen, self.play, self.args = policy, frozen, play, args

    def sample(self, prompt: Any = "What is 3 + 4?", label: str = "7", index: int = 0) -> Sample:
        return Sample(prompt=prompt, label=label, index=index, group_index=0)

    async def run(self, sample: Sample | None = None, evaluation: bool = False, **params: Any) -> Sample:
        from agentic.agentflow.rollout import generate

        sample = self.sample() if sample is None else sample
        return await generate(self.args, sample, {"max_new_tokens": 512, **params}, evaluation=evaluation)


@contextmanager
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play, **settings: Any) -> Iterator[Stage]:
    """Fake engines on their own ports and an argument namespace that points at them."""
    from agentic.agentflow import crew

    with FakeEngine(play) as policy, FakeEngine(play) as frozen:
        roles = {name: {"url": frozen.url, "tokenizer": "fake"} for name in crew.ROLES}
        roles["planner"] = {"url": "policy"}
        path = tmp_path / "roles.yaml"
        path.write_text(yaml.safe_dump({"defaults": {"retries": 0, "timeout_s": 60}, "roles": roles}))
        host, _, port = policy.url.removeprefix("http://").partition(":")
        args = Namespace(sglang_router_ip=host, sglang_router_port=int(port), save=str(tmp_path / "save"))
        args.rewards_normalization = args.grpo_std_normalization = True
        args.agentflow_roles = str(path)
        for name, value in settings.items():
            setattr(args, f"agentflow_{name}", value)
        monkeypatch.setattr(crew, "GenerateState", lambda args: Namespace(tokenizer=FakeTokenizer()))
        monkeypatch.setattr("agentic.common.clients._load_tokenizer", lambda path: FakeTokenizer())
        crew._CREWS.clear()
        yield Stage(policy, frozen, play, args)
