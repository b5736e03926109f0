"""Experts: from the alias a policy calls to the model that answers, its price, and the account of what it cost.

    alias `expert-2` -> model (mapping of the sample, else of `orchestra_aliases`) -> role of the role file (name or `model`)

`orchestra_aliases` (YAML or JSON) holds `alias: model` or `alias: {model, description, latency_s, price_in, price_out}`;
prices are dollars for a million tokens. A sample overrides them with `metadata["model_mapping"]` (alias -> model) and
`metadata["tool_pricing"]` (model or alias -> `{input, output}` in dollars a token, fee name -> dollars).
Invariants: every answered call is in the ledger with the tokens the server reported, every failed one with its time;
what the experts do wrong as servers is an `InfrastructureError`, what they do wrong as models stays a reply.
Leaves out: what an expert is asked (the environments).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from agentic.common.clients import Completion, FrozenClient
from agentic.common.errors import BadRecord, ConfigError, InfrastructureError, RoleBadResponse
from agentic.common.ledger import CostLedger
from agentic.common.roles import Role, RoleTable, nearest
from agentic.toolorchestra.config import PREFIX
from agentic.toolorchestra.environment import ToolCall
from agentic.toolorchestra.parsing import parse_turn, read_call, without_thought

MILLION = 1e6
ORCHESTRATOR = "orchestrator"
NOT_EXPERTS = (ORCHESTRATOR, "user", "judge", "retrieval")
SAMPLING = ("temperature", "top_p", "max_new_tokens", "stop")


@dataclass(frozen=True)
class ExpertReply:
    """Answer of an expert; `seconds` is the wall clock of the call with its retries."""

    text: str
    """Without thought and tool calls; may be empty."""
    tool_calls: tuple[ToolCall, ...]
    """Those that fit the tools the expert was given."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float


@dataclass(frozen=True)
class Alias:
    """What `orchestra_aliases` says of one alias."""

    model: str
    """Name of a role of the role file, or the `model` of one."""
    description: str = ""
    """Strengths and weaknesses, for the tool's description."""
    latency_s: float | None = None
    """Advertised seconds of a call."""
    price_in: float | None = None
    """Dollars for a million prompt tokens; default: the role's."""
    price_out: float | None = None
    """Likewise for completion tokens."""


@dataclass(frozen=True)
class Experts:
    """What all rollouts of a process share."""

    known: Mapping[str, Alias]
    table: RoleTable
    clients: Mapping[str, FrozenClient]
    """By role name."""

    @classmethod
    def build(cls, aliases: str, table: RoleTable) -> Experts:
        """`aliases`: the setting `orchestra_aliases`, a path or JSON.

        Raises:
            FileNotFoundError, ConfigError: no such file, an unknown key, or a model that no role serves.
        """
        clients = {role.name: FrozenClient(role) for role in table if role.name not in NOT_EXPERTS}
        experts = cls(load_aliases(aliases), table, clients)
        for name, alias in experts.known.items():
            if experts.find_role(alias.model) is None:
                raise ConfigError(f"{PREFIX}aliases: {name}: {experts.no_role(alias.model)}")
        return experts

    def find_role(self, model: str) -> Role | None:
        """The role of this name, else the first one with this `model`."""
        roles = [role for role in self.table if role.name not in NOT_EXPERTS]
        by_name = (role for role in roles if role.name == model)
        return next(by_name, next((role for role in roles if role.model == model), None))

    def no_role(self, model: str) -> str:
        """What to say when `find_role` finds nothing."""
        names = [role.name for role in self.table if role.name not in NOT_EXPERTS]
        return f"no role of {self.table.source} serves the model '{model}'{nearest(model, names)}"

    def desk(self, metadata: Mapping[str, Any], ledger: CostLedger, deadline: float) -> ExpertDesk:
        """The experts of one rollout; `deadline` on the clock of `time.monotonic`. Raises BadRecord."""
        return ExpertDesk(self, metadata, ledger, deadline)


class ExpertDesk:
    """The experts of one rollout: alias -> model (mapping of the sample) -> role of the role table."""

    def __init__(self, experts: Experts, metadata: Mapping[str, Any], ledger: CostLedger, deadline: float) -> None:
        """Raises BadRecord when mapping or prices of the sample cannot be used."""
        self.ledger = ledger
        self._experts = experts
        self._deadline = deadline
        self._mapping = _mapping(metadata, experts)
        self._pricing = _pricing(metadata)
        self._listed = {name for name in metadata.get("tools") or () if isinstance(name, str)}

    def aliases(self, prefix: str = "") -> tuple[str, ...]:
        """Aliases offered in this sample whose name starts with `prefix` (`expert-`, `search-`, `answer-`).

        Where `metadata["tools"]` lists some aliases of a kind, only those of that kind are offered.
        """
        listed_kinds = {_kind(name) for name in self._listed & set(self._mapping)}
        return tuple(
            name
            for name in self._mapping
            if name.startswith(prefix) and (name in self._listed or _kind(name) not in listed_kinds)
        )

    def describe(self, prefix: str) -> str:
        """One line per alias for a tool description: strengths, $ per million tokens in and out, latency."""
        return "\n".join(self._describe(alias) for alias in self.aliases(prefix))

    def model(self, alias: str) -> str:
        """Name of the model behind an alias in this sample (state budgets depend on the family)."""
        return self._mapping[alias]

    def price(self, name: str) -> tuple[float, float]:
        """Dollars per token in and out of an alias or of `orchestrator`: the sample's, the setting's, the role's."""
        role = self._role(name)
        for key in (name, self._mapping.get(name), role.name, role.model):
            if isinstance(given := self._pricing.get(str(key)), dict):
                return given["input"], given["output"]
        known = self._about(name)
        price_in = role.price_in if known.price_in is None else known.price_in
        price_out = role.price_out if known.price_out is None else known.price_out
        return price_in / MILLION, price_out / MILLION

    def fee(self, name: str, default: float) -> float:
        """Dollars of a priced action that is no model (`search`, `sandbox_second`): the sample's, else `default`."""
        given = self._pricing.get(name, default)
        return default if isinstance(given, dict) else given

    async def ask(
        self,
        alias: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> ExpertReply:
        """One call, recorded in the ledger. `sampling`: temperature, top_p, max_new_tokens, stop.

        Raises:
            InfrastructureError: the expert failed after its retries, or the episode's time is over.
        """
        if unknown := set(sampling) - set(SAMPLING):
            raise TypeError(f"sampling takes {', '.join(SAMPLING)}, got {', '.join(sorted(unknown))}")
        start = time.monotonic()
        try:
            completion = await self._complete(alias, messages, tools, sampling)
            calls, text = _read_reply(completion, tools or ())
        except InfrastructureError:
            self.ledger.fail(alias, time.monotonic() - start)
            raise
        seconds = time.monotonic() - start
        tokens = completion.prompt_tokens, completion.completion_tokens
        price_in, price_out = self.price(alias)
        self.ledger.record(alias, *tokens, seconds, tokens[0] * price_in + tokens[1] * price_out)
        return ExpertReply(text, calls, *tokens, seconds)

    async def _complete(
        self,
        alias: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
    ) -> Completion:
        role, left = self._role(alias), self._deadline - time.monotonic()
        request = [dict(message) for message in messages]
        try:
            completion = await asyncio.wait_for(
                self._experts.clients[role.name].complete(request, tools, sampling), max(left, 0.0)
            )
        except asyncio.TimeoutError as error:
            raise InfrastructureError("episode_timeout", f"while {alias} ({role.url}) was asked") from error
        counts = completion.prompt_tokens, completion.completion_tokens
        if min(counts) < 0 or (any(self.price(alias)) and not counts[0]):
            raise RoleBadResponse(role.name, f"{role.url}: token counts {counts} in `usage` cannot be charged")
        return completion

    def _role(self, name: str) -> Role:
        if name == ORCHESTRATOR:
            return self._experts.table[ORCHESTRATOR]
        role = self._experts.find_role(self._mapping[name])
        assert role is not None, f"{name} was checked when the desk was built"
        return role

    def _describe(self, alias: str) -> str:
        price_in, price_out = self.price(alias)
        known = self._about(alias)
        text = f"{alias}: {known.description} " if known.description else f"{alias}: "
        text += (
            f"${price_in * MILLION:.4g} per million input tokens, ${price_out * MILLION:.4g} per million output tokens"
        )
        return text + (f", about {known.latency_s:g} s a call" if known.latency_s is not None else "")

    def _about(self, alias: str) -> Alias:
        """What is known of the model behind an alias, which the sample may have given another alias's model."""
        model, known = self._mapping.get(alias), self._experts.known
        own = [known[alias]] if alias in known else []
        others = [entry for name, entry in known.items() if _kind(name) == _kind(alias)]
        return next((entry for entry in [*own, *others] if entry.model == model), Alias(model or ""))


def load_aliases(setting: str) -> dict[str, Alias]:
    """The aliases of a YAML or JSON file, or of JSON text; empty for an empty setting.

    Raises:
        FileNotFoundError, ConfigError: no such file, no mapping, an unknown key or a value of the wrong type.
    """
    if not setting:
        return {}
    text, where = setting, f"{PREFIX}aliases"
    if not setting.lstrip().startswith("{"):
        where = f"{PREFIX}aliases: {setting}"
        if not Path(setting).is_file():
            raise FileNotFoundError(f"{where} does not exist; give a YAML file or the mapping itself")
        text = Path(setting).read_text(encoding="utf-8")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must map aliases to models")
    return {str(name): _alias(entry, f"{where}: {name}") for name, entry in data.items()}


def _alias(entry: Any, where: str) -> Alias:
    if isinstance(entry, str):
        return Alias(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        raise ConfigError(f"{where}: must be the name of a model, or a mapping with the key `model`")
    known = [field.name for field in fields(Alias)]
    for key, value in entry.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(key, known)}")
        if not (isinstance(value, str) if key in ("model", "description") else _is_amount(value)):
            raise ConfigError(f"{where}: {key} is {value!r}; expected {'a text' if key == 'description' else '>= 0'}")
    return Alias(**entry)


def _mapping(metadata: Mapping[str, Any], experts: Experts) -> dict[str, str]:
    """alias -> model of a sample; the known aliases when it has none of its own."""
    given = metadata.get("model_mapping")
    if not given:
        return {name: alias.model for name, alias in experts.known.items()}
    if not isinstance(given, dict):
        raise BadRecord("bad_model_mapping", f"model_mapping must be an object, got {type(given).__name__}")
    for alias, model in given.items():
        if not isinstance(model, str) or experts.find_role(model) is None:
            raise BadRecord("unknown_model", f"model_mapping: {alias}: {experts.no_role(str(model))}")
    return dict(given)


def _pricing(metadata: Mapping[str, Any]) -> dict[str, Any]:
    given = metadata.get("tool_pricing") or {}
    for name, price in given.items() if isinstance(given, dict) else [("", given)]:
        amounts = [price.get("input"), price.get("output")] if isinstance(price, dict) else [price]
        if not name or not all(map(_is_amount, amounts)):
            raise BadRecord(
                "bad_tool_pricing", f"tool_pricing: {name}: {price!r} is neither dollars nor {{input, output}}"
            )
    return dict(given)


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _kind(alias: str) -> str:
    return alias.split("-")[0]


def _read_reply(completion: Completion, tools: Sequence[Mapping[str, Any]]) -> tuple[tuple[ToolCall, ...], str]:
    """(usable calls, text). Servers without a tool parser leave the calls in the text."""
    calls = []
    for sent in completion.tool_calls:
        function = sent.get("function") if isinstance(sent, dict) else None
        if isinstance(function, dict):
            block = json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, default=str)
            call = read_call(block, tools)
            calls += [call] if call else []
    parsed = parse_turn(completion.text, tools, "func_call")
    if not calls and not parsed.calls:
        body = without_thought(completion.text)
        text = parsed.message_text if tools else (body or "").strip()
        return (), text
    return tuple(calls) or parsed.calls, ""
