"""MemAgent's own settings, read from attributes `memagent_<field>` of the argument namespace.

Inputs: the namespace after slime applied the YAML of `--custom-config-path`. Invariants: every field is checked once,
before any model is called; an unknown `memagent_*` attribute is an error that names the nearest field; with
`objective: paper` the fields it decides hold the paper's values; the object is frozen and hashable. All budgets are
tokens. Leaves out: the lengths of the prompt texts, which need the tokenizer (`agent`).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.settings import Settings
from agentic.common.weighting import LOSS_NORMS, TURN_CREDITS
from agentic.memagent.scoring import REWARDS

PREFIX = "memagent_"
SETTINGS = Settings(PREFIX)
# What `objective: paper` decides; it also switches the division by the group's standard deviation off.
PAPER: dict[str, Any] = {"turn_credit": "broadcast", "loss_norm": "token", "train_answer": True}
CHOICES = {
    "truncation": ("center", "error"),
    "on_empty": ("placeholder", "keep"),
    "on_long_question": ("error", "cut"),
    "layout": ("siblings", "metadata"),
    "objective": ("default", "paper"),
    "turn_credit": TURN_CREDITS,
    "loss_norm": LOSS_NORMS,
    "reward": REWARDS,
}
MAY_BE_ZERO = ("max_chunks", "eval_max_chunks", "reward_window_chars", "retries", "max_failure_rate")


@dataclass(frozen=True)
class MemAgentConfig:
    """Settings of one run."""

    prompt_set: str = "standard"
    """Name of a set under `prompts/`, or the path of a directory with the same files."""
    system_prompt: str = ""
    """System message of every conversation; empty: whatever the chat template does without one."""
    window_tokens: int = 8192
    """Prompt plus response of any call; the budgets below and the prompt texts must fit, which is checked at start."""
    question_tokens: int = 1024
    """Longest question."""
    chunk_tokens: int = 5000
    """Tokens of the document read in one turn."""
    memory_tokens: int = 1024
    """Longest memory: generation limit of a memory turn."""
    answer_tokens: int = 1024
    """Generation limit of the answer turn."""
    max_chunks: int = 8
    """Most chunks read in training; 0: no limit."""
    eval_max_chunks: int = 0
    """Most chunks read in evaluation; 0: no limit."""
    truncation: str = "center"
    """A document with more chunks: `center` keeps its first and last half (counted), `error` stops the run."""
    on_empty: str = "placeholder"
    """After an empty memory turn the memory is the placeholder again, or (`keep`) what it was; counted."""
    on_long_question: str = "error"
    """A question over its budget stops the run, or (`cut`) loses its end; counted."""
    layout: str = "siblings"
    """`siblings`: one sample for each conversation. `metadata`: one sample, all conversations in `train_metadata`.
    Both give the same train data; in evaluation `metadata` keeps the tokens of all conversations for the report."""
    objective: str = "default"
    """`paper`: Multi-Conv DAPO as published, decides the next three fields and drops the standard deviation."""
    turn_credit: str = "amortized"
    """`amortized`: the advantage is shared evenly among the trained turns. `broadcast`: each turn has all of it."""
    loss_norm: str = "token"
    """`token`: mean over the tokens of a step. `conv`: over conversations. `traj`: over trajectories."""
    train_answer: bool = False
    """Whether the answer turn is trained, or masked."""
    reward: str = "em"
    """`em`: boxed answer equals a reference (the paper's). `em_norm`, `f1`, `sub_em`, `sub_em_one_way` and
    `multi_value` are the evaluation metrics of `scoring`. An item of kind `ruler` is scored with `multi_value`."""
    reward_window_chars: int = 300
    """`em` looks for the box in so many last characters of the answer; 0: in all of it."""
    max_failure_rate: float = 0.5
    """A rollout with a larger share of failed trajectories stops the run."""
    timeout_s: float = 120.0
    """Deadline of one attempt of a call in seconds."""
    retries: int = 2
    """Further attempts of a call; an attempt is sampled anew, never continued."""
    max_concurrency: int = 256
    """Calls in flight at once."""

    @classmethod
    def from_args(cls, args: Namespace) -> MemAgentConfig:
        """Read and check all `memagent_*` attributes.

        Raises:
            ConfigError: unknown name, or a value of the wrong type or range, or one that contradicts the objective.
        """
        given = SETTINGS.read(args, {field.name: field.default for field in fields(cls)})
        return cls(**(PAPER | given if given.get("objective") == "paper" else given))

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            SETTINGS.check_choice(name, getattr(self, name), choices)
        for field in fields(self):
            if type(field.default) in (int, float):
                value, lowest = getattr(self, field.name), 0 if field.name in MAY_BE_ZERO else 1e-9
                remedy = "must not be negative" if lowest == 0 else "must be positive"
                SETTINGS.check(field.name, value, remedy, value >= lowest)
        SETTINGS.check("max_failure_rate", self.max_failure_rate, "must be at most 1", self.max_failure_rate <= 1)
        if self.objective == "paper":
            for name, value in PAPER.items():
                remedy = f"objective: paper sets it to {value!r}; leave it out, or leave the objective out"
                SETTINGS.check(name, getattr(self, name), remedy, getattr(self, name) == value)

    def divides_by_std(self, flag: bool) -> bool:
        """Whether advantages are divided by the group's standard deviation; `flag` is slime's."""
        return flag and self.objective != "paper"

    def check_flags(self, args: Namespace) -> None:
        """Compare with slime's flags; attributes that the namespace lacks are not checked.

        Raises:
            ConfigError: flags that would silently change the budgets or the objective.
        """
        if not getattr(args, "rewards_normalization", True):
            raise ConfigError("MemAgent needs group advantages; remove --disable-rewards-normalization")
        if getattr(args, "calculate_per_token_loss", False):
            for name, value in (("loss_norm", "token"), ("turn_credit", "broadcast")):
                remedy = f"--calculate-per-token-loss ignores it; remove the flag, or set {value}"
                SETTINGS.check(name, getattr(self, name), remedy, getattr(self, name) == value)
        context = getattr(args, "sglang_context_length", None)
        remedy = f"--sglang-context-length {context} is smaller; raise it, or lower the window and its parts"
        SETTINGS.check("window_tokens", self.window_tokens, remedy, not context or context >= self.window_tokens)
        limit = getattr(args, "rollout_max_response_len", None)
        for name in ("memory_tokens", "answer_tokens"):
            budget = getattr(self, name)
            remedy = f"--rollout-max-response-len {limit} is smaller; raise it, or lower the budget"
            SETTINGS.check(name, budget, remedy, not limit or limit >= budget)
