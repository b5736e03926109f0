"""tau2 environments, quick to build, and the database hashes of the reference solutions.

Inputs: a domain and a task. Invariants: an environment belongs to one episode and shares nothing that a tool can
change (the cached file content is validated anew each time); a hash is the package's own, so equal hashes mean what
they mean to its evaluator; facts of a domain and hashes of a task are computed once in a process.
Leaves out: driving an environment (`episode`) and judging it (`scoring`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tau2.data_model.message import Message
from tau2.data_model.tasks import Task
from tau2.environment.environment import Environment
from tau2.environment.toolkit import ToolKitBase, ToolType
from tau2.utils.utils import DATA_DIR

from agentic.toolorchestra.tau2.tasks import DOMAINS, check_domain, has_write

# Databases of several megabytes, for which reading and parsing the file takes longer than validating the content.
LARGE_DATABASES = {"airline": "FlightDB", "retail": "RetailDB"}


@dataclass(frozen=True)
class DomainFacts:
    """What does not depend on the task. The schemas are shared: do not change them."""

    policy: str
    """The official policy text of the agent."""
    tools: tuple[dict[str, Any], ...]
    """OpenAI function schemas of the agent, the transfer tool included."""
    user_tools: tuple[dict[str, Any], ...]
    """Those of the user; empty where the user has no tools."""
    write_tools: frozenset[str]
    """Names of agent and user tools that change a database."""


@dataclass(frozen=True)
class StateHashes:
    """The package's hashes of the agent's and the user's database; None where there is none."""

    agent: str | None
    user: str | None


@cache
def _database_content(domain: str) -> Any:
    path = Path(DATA_DIR) / "tau2" / "domains" / domain / "db.json"
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while many long-lived objects are made: it finds nothing and takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def make_environment(domain: str, solo_mode: bool = False) -> Environment:
    """A fresh environment in the domain's initial state.

    Raises ConfigError for a domain that the package lacks. `solo_mode` is there because the package's evaluator asks
    for it; no domain of a conversation supports it.
    """
    check_domain(domain)
    module = import_module(f"tau2.domains.{domain}.environment")
    if domain not in LARGE_DATABASES:
        return module.get_environment(solo_mode=solo_mode)
    model = getattr(module, LARGE_DATABASES[domain])
    with _no_collection():
        database = model.model_validate(_database_content(domain))
    return module.get_environment(db=database, solo_mode=solo_mode)


def environment_constructor(domain: str) -> Callable[..., Environment]:
    """What the package's evaluator takes as `environment_constructor`."""
    return partial(make_environment, domain)


def task_environment(domain: str, task: Task) -> Environment:
    """A fresh environment in the task's initial state, message history included."""
    environment = make_environment(domain)
    initial = task.initial_state
    environment.set_state(
        initialization_data=initial.initialization_data if initial else None,
        initialization_actions=initial.initialization_actions if initial else None,
        message_history=initial_history(task),
    )
    return environment


def initial_history(task: Task) -> list[Message]:
    """The messages exchanged before the episode begins, as copies; mostly none."""
    initial = task.initial_state
    return deepcopy(initial.message_history or []) if initial else []


@cache
def domain_facts(domain: str) -> DomainFacts:
    """Policy and tools of a domain. Raises ConfigError for a domain that the package lacks."""
    environment = make_environment(domain)
    users: ToolKitBase | None = environment.user_tools
    kits = [kit for kit in (environment.tools, users) if kit is not None]
    writers = {name for kit in kits for name in kit.get_tools() if kit.tool_type(name) == ToolType.WRITE}
    return DomainFacts(
        policy=environment.get_policy(),
        tools=tuple(tool.openai_schema for tool in environment.get_tools()),
        user_tools=tuple(tool.openai_schema for tool in users.get_tools().values()) if users is not None else (),
        write_tools=frozenset(writers),
    )


def state_hashes(environment: Environment) -> StateHashes:
    """Hashes of the environment as it is."""
    return StateHashes(environment.get_db_hash(), environment.get_user_db_hash())


@cache
def _fresh_hashes(domain: str) -> StateHashes:
    return state_hashes(make_environment(domain))


def initial_hashes(domain: str, task: Task) -> StateHashes:
    """Hashes before the episode begins."""
    if task.initial_state is None:
        return _fresh_hashes(domain)
    return state_hashes(task_environment(domain, task))


_GOLD: dict[tuple[str, str], StateHashes] = {}
_GOLD_LOCK = threading.Lock()


def gold_hashes(domain: str, task: Task) -> StateHashes:
    """Hashes after the task's reference actions, computed once per task and process. Thread-safe.

    A reference action that fails is skipped, as the package's evaluator does.
    """
    key = (domain, hashlib.sha256(task.model_dump_json().encode()).hexdigest())
    # One at a time: the rollouts of a group ask together, and the work holds the interpreter anyway.
    with _GOLD_LOCK:
        if key not in _GOLD:
            _GOLD[key] = _gold_hashes(domain, task)
        return _GOLD[key]


def _gold_hashes(domain: str, task: Task) -> StateHashes:
    # Only of the package's own domains it is known (and tested) that nothing but the tools marked as such writes.
    if domain in DOMAINS and not has_write(task, domain_facts(domain).write_tools):
        return initial_hashes(domain, task)
    return replay_gold(domain, task)


def replay_gold(domain: str, task: Task) -> StateHashes:
    """Hashes after the reference actions, without cache or short cut."""
    environment = task_environment(domain, task)
    criteria = task.evaluation_criteria
    for action in (criteria.actions if criteria else None) or []:
        try:
            environment.make_tool_call(action.name, requestor=action.requestor, **deepcopy(action.arguments))
        # As the package's evaluator, whose hashes these must equal: its tools raise whatever they like (23 of retail's reference
        # actions do), and what an action did before it failed counts.
        except Exception:  # noqa: BLE001
            continue
    return state_hashes(environment)
