"""Clients, tools and prompts that all trajectories of a process share, built once.

Inputs: the argument namespace (settings, router address, tokenizer of slime's rollout state) and the role file.
Invariants: one crew per (settings, policy address); it holds no state of a question and none of an event loop (the
clients keep their connections per loop); the role table is logged once, when the crew is built. Leaves out: starting
servers.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from agentic.agentflow.config import AgentFlowConfig
from agentic.agentflow.memory import Tokenizer
from agentic.agentflow.prompts import PromptSet
from agentic.agentflow.tools import Kit, Toolbox
from agentic.agentflow.tools.mcp_tools import load_mcp_tools
from agentic.common.clients import FrozenClient, PolicyClient
from agentic.common.engines import engine_urls
from agentic.common.judge import JudgeClient
from agentic.common.judge_cache import CachedJudge
from agentic.common.roles import RoleTable
from agentic.common.sandbox import SandboxLimits
from slime.rollout.sglang_rollout import GenerateState, get_model_url

logger = logging.getLogger(__name__)

ROLES = ("planner", "executor", "verifier", "base_generator", "python_coder", "generator", "judge")


@dataclass(frozen=True)
class Crew:
    """Everything that trajectories share."""

    config: AgentFlowConfig
    prompts: PromptSet
    toolbox: Toolbox
    policy: PolicyClient
    frozen: Mapping[str, FrozenClient]
    tokenizer: Tokenizer
    """The policy's; it measures the memory budgets."""
    judge: JudgeClient | None
    """The judging role, behind the cache if there is one; None when only the rule scores."""

    @classmethod
    def build(cls, config: AgentFlowConfig, table: RoleTable, tokenizer: Tokenizer) -> Crew:
        """Clients for all roles of the table.

        Raises:
            ConfigError: the prompt set is incomplete, or a tool or the judge's cache cannot be set up.
        """
        prompts = PromptSet.load(config.prompt_set)
        # The policy's tokenizer and context are its own; frozen roles load theirs from the role file.
        policy = PolicyClient(table["planner"], tokenizer, config.max_context_len)
        frozen = {role.name: FrozenClient(role) for role in table if role.name != "planner"}
        kit = Kit(frozen, prompts, _sandbox_limits(config), config.web)
        toolbox = Toolbox.build(config.tools, kit, load_mcp_tools(config.mcp_config) if config.mcp_config else ())
        return cls(config, prompts, toolbox, policy, frozen, tokenizer, _judge(config, frozen))


def _sandbox_limits(config: AgentFlowConfig) -> SandboxLimits:
    seconds = config.sandbox_timeout_s
    return SandboxLimits(
        timeout_s=seconds,
        cpu_s=math.ceil(seconds) + 1,  # behind the wall clock, so that a loop is told its time limit
        memory_mb=config.sandbox_memory_mb,
        preload=config.sandbox_preload,
    )


def _judge(config: AgentFlowConfig, frozen: Mapping[str, FrozenClient]) -> JudgeClient | None:
    if config.judge != "rule_first":
        return None
    client = frozen["judge"]
    if not config.judge_cache:
        return client
    role = client.role
    sampling = f"temperature={role.temperature};top_p={role.top_p};max_new_tokens={role.max_new_tokens}"
    return CachedJudge(client, config.judge_cache, str(role.model or role.tokenizer or role.url), sampling)


def load_roles(args: Namespace, config: AgentFlowConfig) -> RoleTable:
    """The role table of these settings.

    Raises:
        FileNotFoundError, ConfigError: no such file, unknown or missing role, wrong value.
    """
    policy, engines = _policy_url(args), engine_urls(args)
    return RoleTable.load(config.roles, policy, known_roles=ROLES, required=config.required_roles, engines=engines)


_CREWS: dict[tuple[AgentFlowConfig, str], Crew] = {}


def get_crew(args: Namespace) -> Crew:
    """The process's crew for these arguments. Built without awaiting, so two tasks cannot build it twice."""
    config = AgentFlowConfig.from_args(args)
    key = (config, _policy_url(args))
    if key not in _CREWS:
        table = load_roles(args, config)
        logger.info("AgentFlow settings: %s\n%s", config, table.describe())
        _CREWS[key] = Crew.build(config, table, GenerateState(args).tokenizer)
    return _CREWS[key]


def _policy_url(args: Namespace) -> str:
    return get_model_url(args, "default", endpoint="")
