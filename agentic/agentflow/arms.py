"""How the arms of an evaluation answer a question, and what becomes of the answer.

Inputs: jobs of the generic loop (`agentic.common.evaluation`), one crew per planner. Invariants: `untrained` and `trained`
run the loop of training with the limits of evaluation and a fresh memory; `baseline` asks the same policy once with the
same sampling; every answer is scored by the same rules and judge; a failure of the infrastructure is an outcome without
a score; tokens are counted by role.
Leaves out: settings and files (`eval`), rules of scoring (`benchmarks`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from agentic.agentflow.benchmarks import Question, Scored, score_answer
from agentic.agentflow.crew import Crew
from agentic.agentflow.solver import Solver
from agentic.common.clients import Completion, Messages
from agentic.common.errors import AgenticError, InfrastructureError, PromptTooLong, Unscored
from agentic.common.evaluation import Job, Outcome, sampling_seed
from agentic.common.judge import JudgeClient

ARMS = ("baseline", "untrained", "trained")
ANSWER_FORMAT = (
    "Think step by step, then state the final answer. If it is a number, a mathematical expression or the letter of an "
    "option, end with it in one single \\boxed{}. Otherwise end with a short span in answer tags: "
    "<answer>the answer</answer>"
)


@dataclass(frozen=True)
class Arm:
    """How one arm answers."""

    name: str
    crew: Crew
    seeded: bool
    """The engine samples deterministically, so each answer gets a `sampling_seed` of its own."""


class Reply(NamedTuple):
    """What an arm gave: final text, calls in order (plain json types), why it failed, further facts."""

    text: str
    trace: list[dict[str, Any]]
    failure: AgenticError | None
    facts: dict[str, Any]


class Evaluator:
    """Answers and scores jobs; the `answer` function of the generic loop."""

    def __init__(self, arms: Mapping[str, Arm], sampling: Mapping[str, Any], seed: int) -> None:
        self.arms = arms
        self.sampling = sampling
        self.seed = seed

    async def answer(self, job: Job) -> Outcome:
        """One question in one run of one arm."""
        arm, question, start = self.arms[job.arm], job.question, time.monotonic()
        seed = sampling_seed(self.seed, job)
        params = {**self.sampling, **({"sampling_seed": seed} if arm.seeded else {})}
        reply = await (_single_turn if job.arm == "baseline" else _agentflow)(arm.crew, question, params)
        tokens = _tokens_by_role(reply.trace)
        details = {**reply.facts, "seed": seed if arm.seeded else None, "trace": reply.trace}
        base = partial(Outcome, reply.text, tokens=tokens)
        if reply.failure is not None:
            details["failure_detail"] = str(reply.failure)
            # A prompt that does not fit is a limit of the protocol and fails every time: a wrong answer, not a mishap.
            over = isinstance(reply.failure, PromptTooLong)
            score, by = (0.0, "budget") if over else (None, "none")
            seconds = time.monotonic() - start
            return base(score, by, seconds=seconds, failure_reason=reply.failure.reason, details=details)
        judge_client = _Metered(arm.crew.judge) if arm.crew.judge else None
        try:
            scored = await score_answer(question, reply.text, judge_client, partial(arm.crew.prompts.render, "judge"))
        except Unscored as error:
            details["failure_detail"] = str(error)
            return base(None, "none", seconds=time.monotonic() - start, failure_reason=error.reason, details=details)
        if judge_client is not None and judge_client.counts:
            tokens["judge"] = dict(judge_client.counts)
        return _scored(scored, base, details, time.monotonic() - start)


def _scored(scored: Scored, base: partial[Outcome], details: dict[str, Any], seconds: float) -> Outcome:
    judgement = scored.judgement
    details = {"pred": judgement.pred, "label": judgement.gt} | scored.measures | details
    return base(judgement.score, judgement.judged_by, vote=scored.vote, seconds=seconds, details=details)


async def _agentflow(crew: Crew, question: Question, params: Mapping[str, Any]) -> Reply:
    """The loop that training runs, with the limits of evaluation and a fresh memory."""
    solver = Solver(crew, question.prompt, params, crew.config.eval_max_steps)
    failure: AgenticError | None = None
    try:
        await solver.solve()
    except (InfrastructureError, PromptTooLong) as error:
        failure = error
    done = solver.trajectory
    versions = sorted({turn.weight_version for turn in done.turns if turn.weight_version is not None})
    facts: dict[str, Any] = {
        "stop_reason": done.stop_reason if failure is None else "failure",
        "counters": dict(done.counters),
    }
    facts |= {"truncated": done.truncated, "weight_versions": versions}
    return Reply(done.final_output, done.trace, failure, facts)


async def _single_turn(crew: Crew, question: Question, params: Mapping[str, Any]) -> Reply:
    messages = [{"role": "user", "content": f"{question.prompt}\n\n{ANSWER_FORMAT}"}]
    try:
        turn = await crew.policy.generate(messages, dict(params), role_name="baseline", trained=False)
    except (InfrastructureError, PromptTooLong) as error:
        return Reply("", [], error, {})
    counts: dict[str, Any] = {"prompt_tokens": turn.prompt_length, "completion_tokens": turn.response_length}
    entry = {"role": "baseline", "step": 0, "text": turn.text, "finish_reason": turn.finish_reason, **counts}
    versions = [] if turn.weight_version is None else [turn.weight_version]
    facts: dict[str, Any] = {"truncated": turn.finish_reason == "length", "weight_versions": versions}
    failure = InfrastructureError("engine_aborted", "during baseline") if turn.finish_reason == "abort" else None
    return Reply(turn.text, [entry], failure, facts)


def _tokens_by_role(trace: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Tokens and calls of every role; calls of a tool's own model stand under the name of the tool."""
    tokens: dict[str, Counter[str]] = {}
    for entry in trace:
        counts = tokens.setdefault(entry.get("tool_name") or entry["role"], Counter(prompt=0, completion=0, calls=0))
        counts["prompt"] += entry.get("prompt_tokens", 0)
        counts["completion"] += entry.get("completion_tokens", 0)
        counts["calls"] += 1
    return {role: dict(counts) for role, counts in tokens.items()}


class _Metered:
    """The judge's client, counting what it uses."""

    def __init__(self, client: JudgeClient) -> None:
        self._client = client
        self.counts: Counter[str] = Counter()

    async def complete(self, messages: Messages) -> Completion:
        reply = await self._client.complete(messages)
        self.counts.update(prompt=reply.prompt_tokens, completion=reply.completion_tokens, calls=1)
        return reply
