"""ToolOrchestra's part of the quickstart (see `agentic.common.quickstart`): a policy that learns whom to ask.

Three experts of different skill and price, each a model of its own on its own port, and the retrieval service on the
passages of the world. All of them are frozen: what changes is the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from agentic.common.errors import ConfigError
from agentic.common.evaluation_records import read_records
from agentic.common.quickstart import MethodPlan, Recipe, Run
from agentic.toolorchestra import tiny_world

RECIPES = {
    "tiny": Recipe(36, 8, 8, 2, 4e-4, 200, 8, 512, 8192, sft_rows=1600, sft_rollouts=3),
    "smollm2": Recipe(2, 2, 4, 1, 1e-6, 4, 64, 4096, 2048, gradient_checkpointing=True),
}
FURTHER_MODELS = {"historian": 3, "restorer": 3, "reader": 4}
ABOUT = "The experts and the retrieval service are the same before and after: what changed is whom the policy asks."
ALIASES = Path(__file__).with_name("tiny_aliases.yaml")
LOOPBACK = "127.0.0.1"
POLICY_PRICE = 0.2
"""Dollars for a million tokens of the policy, in and out."""
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {
        "orchestra_prompt_set": "compact",
        "orchestra_max_turns": 3,
        "orchestra_max_format_errors": 1,
        "orchestra_retrieval_topk": 1,
        "orchestra_max_tool_tokens": 64,
    },
    "smollm2": {
        "orchestra_prompt_set": "standard",
        "orchestra_max_turns": 2,
        "orchestra_retrieval_topk": 3,
        "orchestra_max_tool_tokens": 256,
    },
}
FROZEN_MAX_NEW_TOKENS = {"tiny": 12, "smollm2": 64}


def plan(run: Run, port: Callable[[], int]) -> MethodPlan:
    """A server for each expert and the retrieval service; evaluation greedy and at temperature 1.

    The user's own questions come without passages, so nothing is searched for them. Raises ConfigError when a record of
    theirs is no question.
    """
    if run.data:
        _check_data(run.data)
    recipe, retrieval_port = run.recipe, port()
    settings = {
        **SETTINGS[run.model],
        "orchestra_roles": str(run.output / "run" / "roles.yaml"),
        "orchestra_aliases": _answering_aliases() if run.data else str(ALIASES),
        "orchestra_reward": "outcome",
        "orchestra_max_context_len": recipe.context,
        "orchestra_max_new_tokens": recipe.max_new_tokens,
        "orchestra_episode_timeout_s": 600.0,
    }
    corpus = run.world / "passages.jsonl"
    retrieval = ["-m", "agentic.toolorchestra.retrieval.serve", "--corpus", str(corpus), "--port", str(retrieval_port)]
    data = f"{run.data or run.world / 'heldout.jsonl'}@[:{recipe.n_eval}]"
    sets = [{"name": name, "path": data, "temperature": t} for name, t in (("greedy", 0.0), ("sampled", 1.0))]
    return MethodPlan(settings, sets, _roles(run, retrieval_port, port), [] if run.data else [retrieval])


def _answering_aliases() -> dict[str, Any]:
    """The aliases but those that search."""
    known: dict[str, Any] = yaml.safe_load(ALIASES.read_text(encoding="utf-8"))
    return {name: entry for name, entry in known.items() if name != tiny_world.SEARCH}


def _check_data(path: Path) -> None:
    for where, record in read_records(path):
        category = (record.get("metadata") or {}).get("category")
        if category != "qa":
            wanted = '"metadata": {"category": "qa"}'
            raise ConfigError(
                f"{where}: metadata.category is {category!r}; the quickstart asks questions, add {wanted}"
            )


def _roles(run: Run, retrieval_port: int, port: Callable[[], int]) -> dict[str, Any]:
    """The role file. A real model that was not taught the world is its own expert: one server, three roles."""
    options = {"max-total-tokens": 65536, "max-running-requests": 64, "context-length": run.recipe.context}
    folders = (
        {name: run.output / name for name in tiny_world.EXPERTS} if run.model == "tiny" else {"all": run.start_model}
    )
    servers = {name: {"model": str(folder), "port": port(), "options": options} for name, folder in folders.items()}
    limit = FROZEN_MAX_NEW_TOKENS[run.model]
    experts = {
        name: {"server": name if name in servers else "all", "max_new_tokens": limit} for name in tiny_world.EXPERTS
    }
    price = {"price_in": POLICY_PRICE, "price_out": POLICY_PRICE}
    roles = {"orchestrator": {"url": "policy", "max_new_tokens": run.recipe.max_new_tokens, **price}, **experts}
    if not run.data:
        roles["retrieval"] = {"url": f"http://{LOOPBACK}:{retrieval_port}", "api": "service"}
    return {"defaults": {"timeout_s": 300, "retries": 12}, "servers": servers, "roles": roles}


def write_world(folder: Path, seed: int, recipe: Recipe) -> None:
    """Questions and passages of the tiny world for a model that needs no warm start."""
    tiny_world.write_world(folder, seed)


def details(run: Run, chosen: int) -> dict[str, Any]:
    """`routing`: for greedy and sampled decoding, before and after, `figures` of the evaluation."""
    path = run.output / "run" / "grpo" / "eval_log.jsonl"
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = {(line["rollout_id"], line["dataset"]): figures(line) for line in lines}
    moments = {"before": 0, "after": chosen}
    names = ("greedy", "sampled")
    return {"routing": {name: {when: rounds[at, name] for when, at in moments.items()} for name in names}}


def figures(line: Mapping[str, Any]) -> dict[str, Any]:
    """Success, microdollars per question and per solved question, calls by alias in all and of what two experts know.

    `line`: one data set in eval_log.jsonl. What failed rollouts cost is in no figure.
    """
    domains = line["domains"]
    microdollars = None if line["dollars"] is None else 1e6 * line["dollars"]
    solved = microdollars / line["mean"] if microdollars is not None and line["mean"] else None
    shared: dict[str, int] = {}
    for kind in tiny_world.SHARED_KINDS:
        for alias, count in domains.get(kind, {}).get("calls", {}).items():
            shared[alias] = shared.get(alias, 0) + count
    return {
        "success": line["mean"],
        "n_failed": line["n_failed"],
        "microdollars": _rounded(microdollars),
        "microdollars_per_solved": _rounded(solved),
        "calls": line["calls"],
        "calls_shared_kinds": shared,
        "success_by_kind": {kind: domain["mean"] for kind, domain in domains.items()},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def charts(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Success by kind of question, and who was asked, before and after."""
    greedy = summary.get("routing", {}).get("greedy", {})
    if not greedy:
        return []
    kinds, aliases = list(greedy["before"]["success_by_kind"]), list(tiny_world.ROUTES)
    success = {when: [part["success_by_kind"].get(kind) or 0.0 for kind in kinds] for when, part in greedy.items()}
    calls = {
        when: [part["calls"].get(name, 0) / summary["n_eval"] for name in aliases] for when, part in greedy.items()
    }
    return [
        {"title": "Success by kind of question", "labels": kinds, "series": success},
        {"title": "Calls per question", "labels": aliases, "series": calls},
    ]
