"""Hook `reward_func` (`--custom-rm-path`) and the reward of a group of rollouts, equation 2.

Inputs: `sample.metadata["orch"]` as `rollout.generate` leaves it. Invariants: the hook reports the raw outcome, because
equation 2 needs the whole group and is computed in `convert`; money and time enter as negative numbers on both sides of
the normalisation, so that cheaper and faster is never worse; a wrong rollout is exactly 0, a right one never below 0; a
failed rollout is removed, not scored 0. Leaves out: grading (the environments), filters and advantages.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from agentic.common.errors import ConfigError
from agentic.common.failures import failure_reason
from agentic.toolorchestra.preferences import COST, LATENCY, OUTCOME, RESERVED, Features, check_vector
from slime.utils.types import Sample

GENERATE = "agentic.toolorchestra.rollout.generate"


def normalise(column: Sequence[float]) -> list[float]:
    """Min-max over the group: (x - min) / (max - min), and 0 for everybody when max = min."""
    lowest, highest = min(column), max(column)
    if highest == lowest:
        return [0.0] * len(column)
    return [(value - lowest) / (highest - lowest) for value in column]


def columns_of(group: Sequence[Features]) -> dict[str, list[float]]:
    """M(tau) of all rollouts of a group by name: counts of every alias any of them used, outcome, -dollars, -seconds."""
    aliases = sorted({alias for rollout in group for alias in rollout.counts})
    columns = {alias: [float(rollout.counts.get(alias, 0)) for rollout in group] for alias in aliases}
    columns[OUTCOME] = [rollout.outcome for rollout in group]
    columns[COST] = [-rollout.dollars for rollout in group]
    columns[LATENCY] = [-rollout.seconds for rollout in group]
    return columns


def preference_rewards(group: Sequence[Features]) -> list[float]:
    """R(tau) = M_hat(tau) . P when r_out(tau) = 1, else 0 (ToolOrchestra, arXiv 2511.21689, eq. 2).

    One value per rollout, in input order; only rollouts that count, without the failed ones. Each has its own P.
    """
    if not group:
        return []
    normalised = {name: normalise(column) for name, column in columns_of(group).items()}
    return [_dot(normalised, position, rollout) for position, rollout in enumerate(group)]


def _dot(normalised: Mapping[str, list[float]], position: int, rollout: Features) -> float:
    if not rollout.correct:
        return 0.0
    weights = rollout.weights.items()
    return math.fsum(weight * normalised[name][position] for name, weight in weights if name in normalised)


def outcome_rewards(group: Sequence[Features]) -> list[float]:
    """The binary outcome alone (eq. 1)."""
    return [float(rollout.correct) for rollout in group]


REWARDS = {"outcome": outcome_rewards, "preference": preference_rewards}


def is_failed(sample: Sample) -> bool:
    """Whether the world failed: such a rollout has no reward and leaves all statistics."""
    unusable = sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED)
    return bool(unusable or sample.remove_sample or failure_reason(sample))


def features_of(sample: Sample, preference: bool = True) -> Features:
    """The columns of one rollout; without `preference` the vector is not needed.

    Raises ConfigError for a sample that did not come from `generate`, a value out of range or a missing vector.
    """
    record = record_of(sample)
    where = f"sample {sample.index}"
    counts = {alias: _number(record["counts"], alias, where) for alias in record["counts"]}
    reserved = sorted(set(counts) & set(RESERVED))
    if reserved:
        raise ConfigError(f"{where}: a tool has the alias '{reserved[0]}', a name of the preference vector; rename it")
    outcome, dollars, seconds = (_number(record, name, where) for name in ("outcome", "dollars", "seconds"))
    if outcome > 1:
        raise ConfigError(f"{where}: the outcome is {outcome}; an environment gives 0 to 1")
    if preference and record.get("pref_vec") is None:
        raise ConfigError(
            f"{where} has no pref_vec in its metadata; add one to the record, or set orchestra_reward: outcome"
        )
    weights = check_vector(record["pref_vec"], where) if preference else {}
    return Features(counts, outcome, dollars, seconds, weights)


def record_of(sample: Sample) -> dict[str, Any]:
    """`metadata["orch"]`. Raises ConfigError when there is none."""
    record = (sample.metadata or {}).get("orch")
    if not isinstance(record, dict):
        raise ConfigError(
            f"sample {sample.index} has no recorded episode; set --custom-generate-function-path {GENERATE}"
        )
    return record


def _number(record: Mapping[str, Any], name: str, where: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: recorded '{name}' is {value!r}; expected a finite number, not negative")
    return float(value)


async def reward_func(
    args: Namespace, sample: Sample | list[Sample], **kwargs: Any
) -> float | dict[str, float] | list[float | dict[str, float]]:
    """The raw outcome of one sample, or of a list of them in order (`--group-rm`).

    A float; under `--reward-key` a dict with `score` (the outcome), `dollars`, `seconds` and `turns`. A removed sample
    gets the placeholder 0, which conversion keeps out of all statistics.

    Raises:
        ConfigError: `--reward-key` names none of these, or the sample did not come from `generate`.
    """
    key = getattr(args, "reward_key", None)
    if isinstance(sample, list):
        return [_raw(member, key) for member in sample]
    return _raw(sample, key)


def _raw(sample: Sample, key: str | None) -> float | dict[str, float]:
    if is_failed(sample):
        sample.remove_sample = True
        values = {"score": 0.0, "dollars": 0.0, "seconds": 0.0, "turns": 0.0}
    else:
        features = features_of(sample, preference=False)
        turns = float(record_of(sample).get("turns", 0))
        values = {
            "score": features.outcome,
            "dollars": features.dollars,
            "seconds": features.seconds,
            "turns": turns,
        }
    if not key:
        return values["score"]
    if key not in values:
        raise ConfigError(f"--reward-key is {key!r}; this reward has the keys {', '.join(values)}")
    return values
