"""How the arms of an evaluation do a task, and what becomes of it.

Inputs: jobs of the generic loop (`agentic.common.evaluation`), one crew per policy. Invariants: both arms take the path of
training (`rollout.play`) with the limits of evaluation, the same user, experts, retrieval and judge; a failure of the
infrastructure is an outcome without a score; money, time and calls are those of the rollout's ledger.
Leaves out: settings and files (`eval`), statistics (`eval_summary`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentic.common.errors import PromptTooLong
from agentic.common.evaluation import Job, Outcome, sampling_seed
from agentic.toolorchestra.crew import Crew
from agentic.toolorchestra.environment import TaskEnvironment
from agentic.toolorchestra.eval_data import EvalTask
from agentic.toolorchestra.loop import Episode
from agentic.toolorchestra.qa.environment import QAEpisode
from agentic.toolorchestra.rollout import Played, play
from slime.utils.types import Sample

ARMS = ("untrained", "trained")
"""In the order in which differences are taken: later minus earlier."""
JUDGED_BY = "judged_by_"


@dataclass(frozen=True)
class Arm:
    """One policy among the same experts."""

    crew: Crew
    seeded: bool
    """The engine samples deterministically, so each trial gets a `sampling_seed` of its own."""


class Evaluator:
    """Does and scores jobs; the `answer` function of the generic loop."""

    def __init__(self, arms: Mapping[str, Arm], sampling: Mapping[str, Any], seed: int) -> None:
        self.arms, self.sampling, self.seed = arms, dict(sampling), seed

    async def answer(self, job: Job) -> Outcome:
        """One trial of one task."""
        arm, task, start = self.arms[job.arm], job.question, time.monotonic()
        seed = sampling_seed(self.seed, job) if arm.seeded else None
        params = self.sampling | ({} if seed is None else {"sampling_seed": seed})
        played = await play(arm.crew, sample_of(task), params, evaluation=True)
        details = {"orch": played.record, "seed": seed, **_transcript(played.episode)}
        tokens = {name: _tokens(entry) for name, entry in played.record["ledger"].items()}
        seconds, failure = time.monotonic() - start, played.failure
        if failure is None:
            score, by = played.record["outcome"], _judged_by(played, task)
            return Outcome(details["answer"], score, by, None, tokens, seconds, None, details)
        details["failure_detail"] = str(failure)
        # A prompt that does not fit is a limit of the protocol and fails every time: a failed task, not a mishap.
        score, by = (0.0, "budget") if isinstance(failure, PromptTooLong) else (None, "none")
        return Outcome(details["answer"], score, by, None, tokens, seconds, failure.reason, details)


def sample_of(task: EvalTask) -> Sample:
    """The sample as a rollout gets it in training."""
    return Sample(index=0, prompt=task.prompt, label=task.label, metadata=dict(task.metadata))


def _judged_by(played: Played, task: EvalTask) -> str:
    if task.category == "func_call":
        return "tau2"
    names = (name.removeprefix(JUDGED_BY) for name in played.record["breakdown"] if name.startswith(JUDGED_BY))
    return next(names, "none")


def _tokens(entry: Mapping[str, Any]) -> dict[str, int]:
    return {"prompt": entry["prompt_tokens"], "completion": entry["completion_tokens"], "calls": entry["calls"]}


def _transcript(episode: Episode | None) -> dict[str, Any]:
    """Turns of the policy, and what the environment recorded; plain JSON types."""
    if episode is None:
        return {"answer": "", "trace": [], "truncated": False}
    trace = [{"text": turn.text, "finish_reason": turn.finish_reason} for turn in episode.turns]
    versions = sorted({turn.weight_version for turn in episode.turns if turn.weight_version is not None})
    recorded = _recorded(episode.environment)
    facts = {"trace": trace, "truncated": episode.truncated, "weight_versions": versions}
    return {"answer": trace[-1]["text"] if trace else "", **facts, **recorded}


def _recorded(environment: TaskEnvironment) -> dict[str, Any]:
    if isinstance(environment, QAEpisode):
        state, prediction = environment.toolkit.state, environment.toolkit.prediction
        found = {"documents": len(state.documents), "code": [list(pair) for pair in state.code]}
        return {**found, **({} if prediction is None else {"answer": prediction})}
    from agentic.toolorchestra.tau2.episode import Tau2Episode  # questions do without the package

    if not isinstance(environment, Tau2Episode):
        return {}
    return {"messages": [message.model_dump(mode="json", exclude_none=True) for message in environment.messages]}
