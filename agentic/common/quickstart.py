"""What a method tells `tools/quickstart.py`: the numbers of its run, its hooks, settings, roles and evaluation sets.

Every method has a module `quickstart` with `RECIPES` (model name: Recipe), `ABOUT`, and the
functions of `Method`. Leaves out: running anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Recipe:
    """Numbers of one model's run. `tiny` learns on two cores within minutes; `smollm2` is a short run on real text."""

    num_rollout: int
    prompts: int
    samples: int
    steps_per_rollout: int
    lr: float
    n_eval: int
    max_new_tokens: int
    context: int
    tokens_per_batch: int
    sft_rows: int = 0
    """Rows of one round of the warm start; 0 for a model that needs none."""
    sft_rollouts: int = 0
    sft_lr: float = 2e-3
    sft_tokens_per_batch: int = 2048
    gradient_checkpointing: bool = False
    """Attention of a packed batch on the CPU keeps its whole score matrix for the backward pass otherwise."""


@dataclass(frozen=True)
class Run:
    """One quickstart: the user's choices and where things lie."""

    method: str
    model: str
    data: Path | None
    num_rollout: int
    seed: int
    output: Path
    recipe: Recipe
    settings: dict[str, Any]
    """The user's settings of the method, with its prefix."""
    train_backend: str = "fsdp"
    schedule: str = "sync"

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    @property
    def world(self) -> Path:
        return self.output / "world"

    @property
    def metrics(self) -> Path:
        return self.output / "run" / "metrics_raw.jsonl"

    @property
    def final_metrics(self) -> Path:
        return self.output / "run" / "metrics_final.jsonl"

    @property
    def start_model(self) -> Path:
        return self.output / ("warm" if self.model == "tiny" else "smollm2")

    @property
    def save_interval(self) -> int:
        """Rollouts between two checkpoints; at least 2, so that no evaluation but the first is of step 0."""
        return max(self.num_rollout // 6, 2)


@dataclass(frozen=True)
class MethodPlan:
    """What one run of a method needs besides its recipe."""

    settings: dict[str, Any]
    """For `--custom-config-path`."""
    evaluation: list[dict[str, Any]]
    """Data sets evaluated before and after the training; the first two are `greedy` and `sampled`."""
    roles: dict[str, Any] | None = None
    """Role file whose `servers` are started beside the training; None for a method with the policy alone."""
    services: list[list[str]] = field(default_factory=list)
    """Further programs that run beside the training: command lines without the interpreter."""
    selection: str = ""
    """Data set that chooses the checkpoint among those saved; empty: the last one."""
    final: list[dict[str, Any]] = field(default_factory=list)
    """Data sets evaluated once, on the chosen checkpoint."""


class Method(Protocol):
    """The module `agentic.<method>.quickstart`."""

    RECIPES: dict[str, Recipe]
    FURTHER_MODELS: dict[str, int]
    """Models made like the warm start on rows of their own, `world/<name>.jsonl`: rounds of `sft_rows`."""
    ABOUT: str
    """A sentence for the report: what was trained, and what was not."""

    def plan(self, run: Run, port: Callable[[], int]) -> MethodPlan:
        """The plan of a run; `port()` gives a free port."""

    def write_world(self, folder: Path, seed: int, recipe: Recipe) -> None:
        """The data of a run without `--data`, for a model that was not built with its world."""

    def details(self, run: Run, chosen: int) -> dict[str, Any]:
        """What the summary says beyond success rates; `chosen` is the rollout whose checkpoint was taken."""

    def charts(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Charts of the report: `title`, `labels` and `series` (name: rates), from what `details` gave."""


def hook_flags(method: str) -> list[str]:
    """A method's hooks as flags of `train.py`; all methods have them at the same places."""
    places = {
        "custom-generate-function-path": "rollout.generate",
        "custom-rm-path": "reward.reward_func",
        "custom-convert-samples-to-train-data-path": "convert.custom_convert",
        "custom-eval-rollout-log-function-path": "rollout.eval_log",
    }
    return [word for flag, place in places.items() for word in (f"--{flag}", f"agentic.{method}.{place}")]


def evaluation_document(sets: Sequence[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """For `--eval-config`."""
    defaults = {"input_key": "prompt", "label_key": "label", "max_response_len": recipe.max_new_tokens}
    return {"eval": {"defaults": defaults, "datasets": list(sets)}}
