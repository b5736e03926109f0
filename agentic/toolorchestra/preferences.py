"""Preference vectors: what they may hold, pairs of instruction and vector, and the preference-aware evaluation score.

A vector maps tool aliases and the names `outcome` (also written `accuracy`), `cost` and `latency` to weights in [0, 1]
(ToolOrchestra, arXiv 2511.21689, eq. 2). Money and time enter the reward as negative numbers, so a positive weight on
`cost` already means that cheap is good; a negative weight would pay for expense and is refused.
Invariants: an absent name weighs 0; sampling is a pure function of its generator. Leaves out: the reward (`reward`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.evaluation_records import need_field, read_records

OUTCOME, COST, LATENCY = "outcome", "cost", "latency"
RESERVED = (OUTCOME, COST, LATENCY)
ACCURACY = "accuracy"
# The evaluation score compares with 1, so it depends on the unit of money: cents, in which the paper reports cost.
CENTS_PER_DOLLAR = 100.0


@dataclass(frozen=True)
class Features:
    """What one rollout did, M(tau) before signs and normalisation, and the weights of its sample."""

    counts: Mapping[str, float]
    """Calls by tool alias; an absent alias was called 0 times."""
    outcome: float
    """0 or 1 (eq. 1)."""
    dollars: float
    seconds: float
    weights: Mapping[str, float] = field(default_factory=dict)
    """The preference vector P, checked by `check_vector`."""

    @property
    def correct(self) -> bool:
        return abs(self.outcome - 1.0) <= 1e-6


def check_vector(vector: Any, where: str, aliases: Collection[str] | None = None) -> dict[str, float]:
    """The vector with `accuracy` written as `outcome`; `aliases`, when given, are all names that it may use besides.

    Raises:
        ConfigError: not a mapping, empty, a weight that is no number in [0, 1], an unknown alias, or both spellings.
    """
    if not isinstance(vector, Mapping) or not vector:
        raise ConfigError(f"{where}: pref_vec is {vector!r}; give a mapping such as {{'outcome': 1, 'cost': 0.5}}")
    if OUTCOME in vector and ACCURACY in vector:
        raise ConfigError(f"{where}: pref_vec holds both '{OUTCOME}' and '{ACCURACY}', which mean the same; keep one")
    for name, weight in vector.items():
        _check_weight(name, weight, where)
    weights = {OUTCOME if name == ACCURACY else name: float(weight) for name, weight in vector.items()}
    unknown = [] if aliases is None else sorted(set(weights) - set(aliases) - set(RESERVED))
    if unknown:
        known = ", ".join([*RESERVED, *sorted(aliases or ())])
        raise ConfigError(f"{where}: pref_vec weighs '{unknown[0]}', which is no tool of this sample; known: {known}")
    return weights


def _check_weight(name: Any, weight: Any, where: str) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: pref_vec has the key {name!r}; keys are names of tools, {', '.join(RESERVED)}")
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not 0 <= weight <= 1:
        hint = "; cost and latency are negated already, so a positive weight prefers cheap and fast"
        raise ConfigError(
            f"{where}: pref_vec['{name}'] is {weight!r}; weights are numbers from 0 to 1"
            f"{hint if name in (COST, LATENCY) else ''}"
        )


# --------------------------------------------------------------------------------------------------------------------
# The score of an evaluation under preferences.


def evaluation_score(rollouts: Sequence[Features], baselines: Sequence[Features]) -> float:
    """Sum of `preference_score` over examples; `baselines` are the untrained policy's rollouts of the same examples.

    Raises ValueError when the lengths differ.
    """
    return math.fsum(preference_score(own, base) for own, base in zip(rollouts, baselines, strict=True))


def preference_score(rollout: Features, baseline: Features) -> float:
    """P . M' when correct, else 0 (arXiv 2511.21689, appendix L).

    M'_k is M_k / max(1, M0_k) for counts and the outcome, M0_k / max(1, M_k) for money (cents) and time (seconds), with
    M0 of the baseline. The paper's text lost the operator; `max` is the only reading that avoids a division by zero.
    """
    if not rollout.correct:
        return 0.0
    relative = {name: count / max(1.0, baseline.counts.get(name, 0)) for name, count in rollout.counts.items()}
    relative[OUTCOME] = rollout.outcome / max(1.0, baseline.outcome)
    relative[COST] = CENTS_PER_DOLLAR * baseline.dollars / max(1.0, CENTS_PER_DOLLAR * rollout.dollars)
    relative[LATENCY] = baseline.seconds / max(1.0, rollout.seconds)
    return math.fsum(weight * relative.get(name, 0.0) for name, weight in rollout.weights.items())


# --------------------------------------------------------------------------------------------------------------------
# Pairs for training data.


@dataclass(frozen=True)
class Preference:
    """What a user asks for, in words and as weights."""

    instruction: str
    """Appended to the task, so that the policy can know the vector; may be empty."""
    vector: Mapping[str, float]


def load_preferences(path: Path) -> list[Preference]:
    """Pairs of a data file with the fields `pref_vec` (required) and `instruction`.

    Raises FileNotFoundError, or ConfigError with file, line and remedy.
    """
    pairs = []
    for where, record in read_records(path):
        instruction = record.get("instruction") or ""
        if not isinstance(instruction, str):
            raise ConfigError(f"{where}: instruction is {instruction!r}; expected a text")
        vector = {name: weight for name, weight in dict(need_field(record, where, "pref_vec")).items()}
        pairs.append(Preference(instruction.strip(), check_vector(vector, where)))
    return pairs


def choose_preference(pairs: Sequence[Preference], aliases: Collection[str], rng: random.Random) -> Preference:
    """One of the pairs whose weights fit the tools of the sample: an alias that is not offered loses its weight.

    Raises ConfigError when no pair keeps a weight.
    """
    usable = [kept for kept in (_restrict(pair, aliases) for pair in pairs) if any(kept.vector.values())]
    if not usable:
        raise ConfigError(f"no preference weighs outcome, cost, latency or one of {', '.join(sorted(aliases))}")
    return rng.choice(usable)


def _restrict(pair: Preference, aliases: Collection[str]) -> Preference:
    vector = {name: weight for name, weight in pair.vector.items() if name in RESERVED or name in aliases}
    return Preference(pair.instruction, vector)


def sample_preference(aliases: Sequence[str], rng: random.Random) -> Preference:
    """A pair of our own making: a right answer always counts, with it one of five wishes of random strength."""
    weight = round(rng.uniform(0.3, 1.0), 2)
    wishes: list[tuple[str, dict[str, float]]] = [
        ("Only the right answer matters.", {}),
        ("Please keep the cost of the tools low.", {COST: weight}),
        ("I am in a hurry, please be fast.", {LATENCY: weight}),
        ("Please be fast and keep the cost low.", {COST: weight, LATENCY: weight}),
    ]
    if aliases:
        alias = rng.choice(list(aliases))
        wishes.append((f"Where it helps, I prefer that you use {alias}.", {alias: weight}))
    instruction, wish = rng.choice(wishes)
    return Preference(instruction, {OUTCOME: 1.0, **wish})
