"""MemAgent's part of the quickstart (see `agentic.common.quickstart`): a small model that learns what to keep.

Trained on documents of four chunks; the checkpoint is chosen on documents of its own, and the chosen one also reads
held-out documents of 8, 32 and 128 chunks that ask the same kind of questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentic.common.quickstart import MethodPlan, Recipe, Run
from agentic.memagent import tiny_world

RECIPES = {
    "tiny": Recipe(48, 8, 8, 2, 2e-4, 200, 32, 512, 8192, sft_rows=1600, sft_rollouts=8),
    "smollm2": Recipe(2, 2, 4, 1, 1e-6, 4, 64, 2048, 2048, gradient_checkpointing=True),
}
FURTHER_MODELS: dict[str, int] = {}
ABOUT = "The memory turns are trained, the answer turn is masked. The checkpoint was chosen on other documents."
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {
        "memagent_prompt_set": "compact",
        "memagent_window_tokens": 512,
        "memagent_question_tokens": 16,
        "memagent_chunk_tokens": tiny_world.FACTS_PER_CHUNK * tiny_world.TOKENS_PER_FACT,
        "memagent_memory_tokens": 24,
        "memagent_answer_tokens": 8,
        "memagent_max_chunks": 0,
        "memagent_timeout_s": 300.0,
        "memagent_retries": 12,
    },
    "smollm2": {
        "memagent_window_tokens": 2048,
        "memagent_question_tokens": 128,
        "memagent_chunk_tokens": 1200,
        "memagent_memory_tokens": 64,
        "memagent_answer_tokens": 32,
    },
}
N_LONG = 100
"""Documents of each length beyond the trained one."""


def plan(run: Run, port: Callable[[], int]) -> MethodPlan:
    """No roles: the policy is alone. Evaluation greedy and at temperature 1, validation for the choice, then length."""
    settings = {**SETTINGS[run.model], "memagent_layout": "metadata"}
    data = f"{run.data or run.world / 'heldout.jsonl'}@[:{run.recipe.n_eval}]"
    sets = [{"name": name, "path": data, "temperature": t} for name, t in (("greedy", 0.0), ("sampled", 1.0))]
    if run.data or run.model != "tiny":
        return MethodPlan(settings, sets)
    sets.append({"name": "validation", "path": str(run.world / "validation.jsonl"), "temperature": 0.0})
    longer = [
        {"name": f"chunks_{chunks}", "path": f"{run.world / name}.jsonl@[:{N_LONG}]", "temperature": 0.0}
        for name, chunks in tiny_world.HELDOUT_CHUNKS.items()
        if chunks > tiny_world.TRAIN_CHUNKS
    ]
    return MethodPlan(settings, sets, selection="validation", final=longer)


def write_world(folder: Path, seed: int, recipe: Recipe) -> None:
    """Documents of the tiny world for a model that needs no warm start."""
    tiny_world.write_world(folder, seed)


def details(run: Run, chosen: int) -> dict[str, Any]:
    """`by_length`: for every number of chunks n, accuracy, share of memories that hold the answer, and accuracy of those.

    `reward_if_held_before` and `_after`: the latter at the trained length, before and after the training.
    """
    lines = _eval_lines(run.output / "run" / "grpo") if run.model == "tiny" else []
    rounds = {(line["rollout_id"], line["dataset"]): line for line in lines}
    if not rounds:
        return {}
    before, after = rounds[0, "greedy"], rounds[chosen, "greedy"]
    longer = {line["dataset"].removeprefix("chunks_"): line for line in _eval_lines(run.output / "run" / "final")}
    by_length = {str(tiny_world.TRAIN_CHUNKS): after, **longer}
    return {
        "reward_if_held_before": before["reward_if_held"],
        "reward_if_held_after": after["reward_if_held"],
        "by_length": {chunks: _at_length(line) for chunks, line in by_length.items()},
    }


def _at_length(line: dict[str, Any]) -> dict[str, Any]:
    return {"n": line["n"], "accuracy": line["mean"], "held": line["held"], "if_held": line["reward_if_held"]}


def _eval_lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "eval_log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def charts(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Accuracy against the length of the document, and what it is made of."""
    by_length = summary.get("by_length", {})
    names = {"accuracy": "accuracy", "held": "answer is in the last memory", "if_held": "accuracy if it is"}
    series = {title: [row[name] or 0.0 for row in by_length.values()] for name, title in names.items()}
    labels = [f"{chunks}" for chunks in by_length]
    return [{"title": "By chunks of the document", "labels": labels, "series": series}] if labels else []
