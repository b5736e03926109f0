"""What an agent reaches that does nothing: it greets, and the user stops. Printed beside every result.

Many tasks expect no change of the database, so refusing everything passes them; a policy that learned to refuse looks
like progress. Inputs: domain and split. Invariants: computed with the evaluators that judge episodes, never copied
from a table; computed once per process. Leaves out: what to do about it (filtering or weighting domains).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tau2.data_model.message import AssistantMessage, Message, UserMessage
from tau2.data_model.tasks import RewardType, Task
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator

from agentic.toolorchestra.tau2.environments import (
    domain_facts,
    gold_hashes,
    initial_hashes,
    initial_history,
    task_environment,
)
from agentic.toolorchestra.tau2.scoring import live_score
from agentic.toolorchestra.tau2.tasks import has_write, official_tasks
from agentic.toolorchestra.tau2.texts import GREETING
from agentic.toolorchestra.tau2.users import STOP


@dataclass(frozen=True)
class Floor:
    """The do-nothing result on a set of tasks."""

    passed: tuple[str, ...]
    """Ids of the tasks that are passed by doing nothing."""
    read_only: int
    """Tasks whose reference solution changes no database."""
    total: int

    @property
    def rate(self) -> float:
        """Share of tasks passed."""
        return len(self.passed) / self.total if self.total else 0.0

    def describe(self) -> str:
        """For a report."""
        return f"do-nothing floor {len(self.passed)}/{self.total} = {self.rate:.3f} ({self.read_only} without a write)"


@cache
def floor(domain: str, split: str = "base") -> Floor:
    """The floor of an official split; takes some seconds the first time. Raises ConfigError as `official_tasks`."""
    return floor_of(domain, official_tasks(domain, split))


def floor_of(domain: str, tasks: Sequence[Task]) -> Floor:
    """The floor of any tasks of one domain."""
    writers = domain_facts(domain).write_tools
    passed = tuple(task.id for task in tasks if passes_idle(domain, task))
    return Floor(passed, sum(not has_write(task, writers) for task in tasks), len(tasks))


def idle_conversation(task: Task) -> list[Message]:
    """History, greeting, request, and the user's stop."""
    return [
        *initial_history(task),
        AssistantMessage(role="assistant", content=GREETING, cost=0.0),
        UserMessage(role="user", content="Hello.", cost=0.0),
        AssistantMessage(role="assistant", content=GREETING, cost=0.0),
        UserMessage(role="user", content=STOP, cost=0.0),
    ]


def passes_idle(domain: str, task: Task) -> bool:
    """Whether doing nothing has reward 1. The cheap factors of the reward come first."""
    criteria, messages = task.evaluation_criteria, idle_conversation(task)
    if criteria is None:
        return True
    bases = set(criteria.reward_basis)
    if RewardType.COMMUNICATE in bases and CommunicateEvaluator.calculate_reward(task, messages).reward != 1.0:
        return False
    if RewardType.ACTION in bases and ActionEvaluator.calculate_reward(task, messages).reward != 1.0:
        return False
    if RewardType.DB in bases and initial_hashes(domain, task) != gold_hashes(domain, task):
        return False
    if not criteria.env_assertions:
        return True
    return live_score(domain, task, task_environment(domain, task), messages, "user_stop").reward == 1.0
