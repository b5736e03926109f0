"""What all rollouts of a process share, built once: clients, experts, prompts, the policy's chat format.

Inputs: the argument namespace (settings, router address, tokenizer of slime's rollout state) and the role file.
Invariants: one crew per (settings, policy address, template options); no state of a rollout and none of an event loop;
the policy's chat template was checked before the first call; the role table is logged once. Leaves out: starting servers.
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentic.common.clients import FrozenClient, PolicyClient
from agentic.common.engines import engine_urls
from agentic.common.errors import ConfigError
from agentic.common.judge import JudgeClient
from agentic.common.roles import Role, RoleTable
from agentic.toolorchestra.chat_format import ChatFormat
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.experts import ORCHESTRATOR, Experts
from agentic.toolorchestra.prompts import PromptSet
from slime.rollout.sglang_rollout import GenerateState, get_model_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Crew:
    """Everything that rollouts share."""

    config: OrchestraConfig
    table: RoleTable
    prompts: PromptSet
    chat: ChatFormat
    policy: PolicyClient
    experts: Experts
    judge: JudgeClient | None
    """None when the role file has no `judge`: only the rule scores."""
    tokenizer: Any
    """The policy's."""

    @classmethod
    def build(cls, config: OrchestraConfig, table: RoleTable, tokenizer: Any, options: Mapping[str, Any]) -> Crew:
        """Clients for all roles of the table; `options` go to the chat template.

        Raises:
            FileNotFoundError, ConfigError: prompts or aliases are wrong, or the chat template does not suit the layout.
        """
        prompts = PromptSet.load(config.prompt_set)
        chat = ChatFormat(tokenizer, options, prompts.describe_tools, continued=config.layout == "stream")
        policy = PolicyClient(table[ORCHESTRATOR], tokenizer, config.max_context_len)
        judge = FrozenClient(table["judge"]) if "judge" in table else None
        return cls(config, table, prompts, chat, policy, Experts.build(config.aliases, table), judge, tokenizer)

    def role(self, name: str) -> Role | None:
        """A role of the table that not every task needs."""
        return self.table[name] if name in self.table else None


def load_roles(config: OrchestraConfig, policy_url: str, engines: Mapping[str, str] | None = None) -> RoleTable:
    """The role table: `orchestrator` (trained), `user`, `judge`, `retrieval`, and any further names for expert models.

    Raises:
        FileNotFoundError, ConfigError: no such file, `orchestrator` missing or not the policy, wrong value.
    """
    table = RoleTable.load(config.roles, policy_url, known_roles=None, required=(ORCHESTRATOR,), engines=engines)
    if not table[ORCHESTRATOR].trained:
        raise ConfigError(
            f"{config.roles}: roles.{ORCHESTRATOR}: must have `url: policy`, it is the model that is trained"
        )
    return table


_CREWS: dict[tuple[OrchestraConfig, str, str], Crew] = {}


def get_crew(args: Namespace) -> Crew:
    """The process's crew for these arguments. Built without awaiting, so two tasks cannot build it twice."""
    config = OrchestraConfig.from_args(args)
    options = dict(getattr(args, "apply_chat_template_kwargs", None) or {})
    key = (config, get_model_url(args, "default", endpoint=""), json.dumps(options, sort_keys=True))
    if key not in _CREWS:
        table = load_roles(config, key[1], engine_urls(args))
        logger.info("ToolOrchestra settings: %s\n%s", config, table.describe())
        _CREWS[key] = Crew.build(config, table, GenerateState(args).tokenizer, options)
    return _CREWS[key]
