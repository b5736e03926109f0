"""Figures of an evaluation during training: one line per data set in `eval_log.jsonl`.

Inputs: the result of slime's evaluation, samples as `rollout.generate` leaves them. Invariants: failures of the world are
missing trials, counted and never scored; success stands per domain with pass^k over its tasks; a rate of which the whole is
empty is None. Leaves out: the do-nothing floor and comparisons of arms (the evaluation program).
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentic.common.eval_log import UNUSABLE, append_evaluation, eval_log_path, reward_figures
from agentic.toolorchestra.config import OrchestraConfig
from slime.utils.types import Sample


def write_eval_log(
    rollout_id: int, args: Namespace, data: Mapping[str, Mapping[str, Any]], extra_metrics: Mapping[str, Any]
) -> None:
    """One line for each data set, with the settings; nothing without `--save`."""
    path = eval_log_path(args, rollout_id)
    if path is None:
        return
    settings = {"config": asdict(OrchestraConfig.from_args(args)), "extra_metrics": dict(extra_metrics)}
    for name, result in data.items():
        samples = result.get("samples") or []
        figures = {**reward_figures(result), **episode_figures(samples), "domains": domain_figures(samples)}
        append_evaluation(path, rollout_id, name, {**figures, **settings})


def episode_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Calls per alias, means of money, time and turns, rates and how rollouts ended; failed ones only in their rate."""
    records = [sample.metadata["orch"] for sample in samples if sample.status not in UNUSABLE]
    calls: Counter[str] = sum((Counter(record["counts"]) for record in records), Counter())
    turns = sum(record["turns"] for record in records)
    cut = sum(sample.status is Sample.Status.TRUNCATED for sample in samples)
    return {
        "calls": dict(calls),
        **{
            name: _share(sum(record[name] for record in records), len(records))
            for name in ("dollars", "seconds", "turns")
        },
        "format_error_rate": _share(sum(record["format_errors"] for record in records), turns),
        "truncation_rate": _share(cut, len(records)),
        "infrastructure_failure_rate": _share(len(samples) - len(records), len(samples)),
        "terminations": dict(Counter(record["termination"] for record in records)),
        "breakdown": _breakdown(records),
    }


def domain_figures(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """By domain: mean outcome, calls per alias, pass^k over its tasks, tasks, scored and missing trials."""
    from agentic.toolorchestra.tau2.pass_hat import pass_hat  # imports tau2, which takes a second

    trials: dict[str, dict[str, list[float | None]]] = {}
    calls: dict[str, Counter[str]] = {}
    for sample in samples:
        outcome = None if sample.status in UNUSABLE else float(sample.metadata["orch"]["outcome"])
        domain = str(sample.metadata.get("domain") or sample.metadata.get("category"))
        trials.setdefault(domain, {}).setdefault(_task(sample), []).append(outcome)
        calls.setdefault(domain, Counter()).update({} if outcome is None else sample.metadata["orch"]["counts"])
    figures: dict[str, dict[str, Any]] = {}
    for domain, tasks in trials.items():
        result = pass_hat(tasks)
        scored = [outcome for outcomes in tasks.values() for outcome in outcomes if outcome is not None]
        figures[domain] = {"mean": _share(sum(scored), len(scored)), "pass_hat": result.values, "tasks": result.tasks}
        figures[domain] |= {"trials": result.trials, "missing": result.missing, "calls": dict(calls[domain])}
    return figures


def _task(sample: Sample) -> str:
    """What trials have in common: the task's id, else the prompt."""
    return str(sample.metadata.get("task_id") or sample.prompt)


def _breakdown(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each part over the rollouts that have it."""
    parts: dict[str, list[float]] = {}
    for record in records:
        for name, value in record["breakdown"].items():
            parts.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in parts.items()}


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
