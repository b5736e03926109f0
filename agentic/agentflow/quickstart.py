"""AgentFlow's part of the quickstart (see `agentic.common.quickstart`): a planner over frozen roles of one small model.

The frozen roles are one server with the weights of the warm start, never updated: what changes is the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic.agentflow.tiny_world import write_world as write_tiny_world
from agentic.common.quickstart import MethodPlan, Recipe, Run

FROZEN_ROLES = ("executor", "verifier", "base_generator", "python_coder", "generator")
RECIPES = {
    "tiny": Recipe(60, 8, 8, 2, 2e-4, 200, 24, 512, 4096, sft_rows=1600, sft_rollouts=15),
    "smollm2": Recipe(2, 2, 4, 1, 1e-6, 4, 48, 4096, 1536, gradient_checkpointing=True),
}

FURTHER_MODELS: dict[str, int] = {}
ABOUT = "The frozen roles are the same before and after: what changed is the planner."


@dataclass(frozen=True)
class Limits:
    """What the model can do: which prompts it reads, tool steps, and tokens of a frozen role."""

    prompt_set: str
    max_steps: int
    frozen_max_new_tokens: int


LIMITS = {"tiny": Limits("compact", 3, 32), "smollm2": Limits("standard", 1, 64)}


def plan(run: Run, port: Callable[[], int]) -> MethodPlan:
    """One server for all frozen roles; evaluation greedy and at temperature 1."""
    recipe, limits = run.recipe, LIMITS[run.model]
    options = {"max-total-tokens": 65536, "max-running-requests": 64, "context-length": recipe.context}
    server = {"model": str(run.start_model), "port": port(), "options": options}
    frozen = {name: {"server": "frozen", "max_new_tokens": limits.frozen_max_new_tokens} for name in FROZEN_ROLES}
    roles = {"planner": {"url": "policy", "max_new_tokens": recipe.max_new_tokens}, **frozen}
    settings = {
        "agentflow_roles": str(run.output / "run" / "roles.yaml"),
        "agentflow_prompt_set": limits.prompt_set,
        "agentflow_max_steps": limits.max_steps,
        "agentflow_eval_max_steps": limits.max_steps,
        "agentflow_max_context_len": recipe.context,
        "agentflow_judge": "rule_only",
    }
    data = f"{run.data or run.world / 'heldout.jsonl'}@[:{recipe.n_eval}]"
    sets = [{"name": name, "path": data, "temperature": t} for name, t in (("greedy", 0.0), ("sampled", 1.0))]
    defaults = {"timeout_s": 300, "retries": 12}
    return MethodPlan(settings, sets, {"defaults": defaults, "servers": {"frozen": server}, "roles": roles})


def write_world(folder: Path, seed: int, recipe: Recipe) -> None:
    """Problems of the tiny world for a model that needs no warm start."""
    write_tiny_world(folder, seed, n_sft=8, n_train=1000, n_heldout=200)


def details(run: Run, chosen: int) -> dict[str, Any]:
    """Nothing beyond the success rates."""
    return {}


def charts(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """None."""
    return []
