"""The reward of a finished episode, by the package's own evaluators, in two equal ways.

`official_score` replays the recorded conversation in a fresh environment, as the benchmark does: for reported results.
`live_score` compares the hashes of the environment that the episode used with the cached ones of the reference
solution and runs the other evaluators: for training, a tenth of the work.
Inputs: task, conversation, and what ended it. Invariants: an episode that neither user nor agent ended is 0 without
further checks; an evaluator that raises is reward 0 and counted as `tau2_eval_exception`, never a crash and never a
failure of the world; only the bases that the task lists enter the product.
Leaves out: assertions in natural language (no task with such a basis is loaded).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter
from tau2.data_model.message import Message
from tau2.data_model.simulation import RewardInfo
from tau2.data_model.tasks import RewardType, Task
from tau2.environment.environment import Environment
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
from tau2.evaluator.evaluator_env import EnvironmentEvaluator

from agentic.toolorchestra.tau2.environments import environment_constructor, gold_hashes, state_hashes

logger = logging.getLogger(__name__)

EVAL_EXCEPTION = "tau2_eval_exception"
"""Key of the breakdown that counts evaluators that raised."""
OUT_OF_SCOPE = "out_of_scope"
"""The user gave up because the scenario does not cover the conversation; tau2 counts it as a stop of the user."""
REGULAR_ENDS = ("user_stop", "agent_stop", OUT_OF_SCOPE)
"""Endings that are evaluated; every other is 0."""
MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


@dataclass(frozen=True)
class TaskScore:
    """Reward with its parts; all values plain, so it passes between processes."""

    reward: float
    """0 or 1."""
    evaluated: bool
    """False when the episode ended prematurely or the evaluator raised."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Reward by basis (`DB`, `COMMUNICATE`, `ENV_ASSERTION`, `ACTION`), or `tau2_eval_exception: 1`."""
    actions_matched: int = 0
    """Reference actions found in the conversation; says nothing about the reward unless `ACTION` is a basis."""
    actions: int = 0
    """Reference actions."""
    error: str = ""
    """What the evaluator raised."""

    def to_dict(self) -> dict[str, Any]:
        """For the records of an evaluation."""
        return asdict(self)


PREMATURE = TaskScore(0.0, evaluated=False)


def official_score(domain: str, task: Task, messages: Sequence[Message], termination: str) -> TaskScore:
    """Replay and judge, as the package's `evaluate_simulation` does. `messages` is the whole conversation."""

    def judge_state() -> RewardInfo:
        return EnvironmentEvaluator.calculate_reward(environment_constructor(domain), task, list(messages))

    return _score(domain, task, messages, termination, judge_state)


def live_score(
    domain: str, task: Task, environment: Environment, messages: Sequence[Message], termination: str
) -> TaskScore:
    """The same reward from the environment in which `messages` happened; it must not have been used otherwise."""
    return _score(domain, task, messages, termination, lambda: _live_state(domain, task, environment))


def score_json(domain: str, task_json: str, messages_json: str, termination: str) -> dict[str, Any]:
    """`official_score` on JSON texts, for another process."""
    messages = MESSAGES.validate_json(messages_json)
    return official_score(domain, Task.model_validate_json(task_json), messages, termination).to_dict()


def _score(
    domain: str, task: Task, messages: Sequence[Message], termination: str, judge_state: Callable[[], RewardInfo]
) -> TaskScore:
    if termination not in REGULAR_ENDS:
        return PREMATURE
    if task.evaluation_criteria is None:
        return TaskScore(1.0, evaluated=True)
    try:
        state = judge_state()
        action = ActionEvaluator.calculate_reward(task, list(messages))
        communicate = CommunicateEvaluator.calculate_reward(task, list(messages))
    # A boundary to foreign code: evaluators and assertion methods of the domains raise whatever they like. One task that cannot be
    # judged is counted as such, with the error, and is no reward of 0 (`evaluated`).
    except Exception as error:  # noqa: BLE001
        shown = f"{type(error).__name__}: {str(error)[:500]}"
        logger.warning("%s: evaluating task '%s' of %s raised %s", EVAL_EXCEPTION, task.id, domain, shown)
        return TaskScore(0.0, evaluated=False, breakdown={EVAL_EXCEPTION: 1.0}, error=shown)
    return _product(task, state, action, communicate)


def _product(task: Task, state: RewardInfo, action: RewardInfo, communicate: RewardInfo) -> TaskScore:
    assert task.evaluation_criteria is not None
    bases = set(task.evaluation_criteria.reward_basis)
    parts = [
        (state, {RewardType.DB, RewardType.ENV_ASSERTION}),
        (action, {RewardType.ACTION}),
        (communicate, {RewardType.COMMUNICATE}),
    ]
    used = [info for info, kinds in parts if kinds & bases]
    breakdown = {kind.value: value for info in used for kind, value in (info.reward_breakdown or {}).items()}
    checks = action.action_checks or []
    reward = math.prod(info.reward for info in used)
    return TaskScore(reward, True, breakdown, sum(check.action_match for check in checks), len(checks))


def _live_state(domain: str, task: Task, environment: Environment) -> RewardInfo:
    criteria = task.evaluation_criteria
    assert criteria is not None
    if criteria.actions is None and criteria.env_assertions is None:
        return RewardInfo(reward=1.0)
    # The evaluator synchronises before it compares; in the live environment every call did.
    environment.sync_tools()
    assertions = criteria.env_assertions or []
    breakdown = {}
    # Hashes first: an assertion method may change what it looks at.
    if RewardType.DB in criteria.reward_basis:
        breakdown[RewardType.DB] = float(state_hashes(environment) == gold_hashes(domain, task))
    met = [environment.run_env_assertion(assertion, raise_assertion_error=False) for assertion in assertions]
    if RewardType.ENV_ASSERTION in criteria.reward_basis:
        breakdown[RewardType.ENV_ASSERTION] = float(all(met))
    return RewardInfo(reward=math.prod(breakdown.values()), reward_breakdown=breakdown)
