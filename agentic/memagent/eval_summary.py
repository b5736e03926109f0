"""Numbers of an evaluation: per data set and arm means with standard errors, failures counted as 0, strata by position.

Inputs: result lines of all runs (`agentic.common.evaluation`). Invariants: pure functions; an item without an answer for
reasons of the infrastructure scores 0 and is listed; a standard error is between items, the spread of whole runs stands
beside it; nothing is a best of several. Leaves out: scoring, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentic.common.evaluation import Line
from agentic.common.evaluation_statistics import compare_arms, standard_error

STRATA = 5
MEANS = ("turns", "memory_tokens", "context_tokens")
COUNTS = ("context_truncated", "turn_truncated", "empty_memory", "no_answer_form")

Runs = Sequence[Mapping[str, Line]]


def summarise_dataset(runs: Mapping[str, Runs], ids: Sequence[str]) -> dict[str, Any]:
    """Arm -> statistics, and paired differences of the arms; all with failures as 0."""
    zeroed = {arm: [_failures_as_zero(lines) for lines in several] for arm, several in runs.items()}
    result = compare_arms(zeroed, ids)
    for arm, stats in result["arms"].items():
        lines = [lines[id_] for lines in runs[arm] for id_ in ids if id_ in lines]
        stats.pop("mean_failures_wrong"), stats.pop("majority")
        stats |= _failures(lines) | _measures(lines) | {"by_position": by_position(lines)}
    return result


def _failures_as_zero(lines: Mapping[str, Line]) -> dict[str, Line]:
    return {id_: line if line["score"] is not None else {**line, "score": 0.0} for id_, line in lines.items()}


def _failures(lines: Sequence[Line]) -> dict[str, Any]:
    failed = [line for line in lines if line["score"] is None]
    reasons: dict[str, list[str]] = {}
    for line in failed:
        reasons.setdefault(str(line["failure_reason"]), []).append(f"{line['run']}/{line['id']}")
    return {"n_failed": len(failed), "failures": reasons}


def _measures(lines: Sequence[Line]) -> dict[str, Any]:
    """Means of the measures over all lines (a failure counts 0), of the sizes over lines without one, and counts."""
    details = [line["details"] for line in lines]
    names = dict.fromkeys(name for detail in details for name in detail.get("measures", {}))
    measures = {name: _mean([detail.get("measures", {}).get(name, 0.0) for detail in details]) for name in names}
    whole = [line["details"] for line in lines if line["failure_reason"] is None]
    sizes = {name: _mean([detail[name] for detail in whole if name in detail]) for name in MEANS}
    counts = {name: sum(int(detail.get(name, 0)) for detail in details) for name in COUNTS}
    return {"measures": measures, **sizes, **counts}


def by_position(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Mean score by the fifth of the document in which the earliest evidence lies; unknown places are left out.

    The standard error is between items, over their mean scores.
    """
    strata: list[dict[str, list[float]]] = [{} for _ in range(STRATA)]
    for line in lines:
        depth = line["details"].get("depth")
        if depth is not None:
            stratum = strata[min(int(depth * STRATA), STRATA - 1)]
            stratum.setdefault(line["id"], []).append(line["score"] or 0.0)
    table = []
    for number, items in enumerate(strata):
        means = [sum(scores) / len(scores) for scores in items.values()]
        bounds = {"from": number / STRATA, "to": (number + 1) / STRATA}
        table.append({**bounds, "n": len(means), "mean": _mean(means), "stderr": standard_error(means)})
    return table


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def mean_over_tasks(results: Mapping[str, Mapping[str, Any]], keys: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Length -> arm -> mean of the task means, for lengths at which there is more than one task.

    `keys`: data set -> (task, length).
    """
    groups: dict[str, dict[str, list[float]]] = {}
    for name, result in results.items():
        for arm, stats in result["arms"].items():
            groups.setdefault(keys[name][1], {}).setdefault(arm, []).append(stats["mean"])
    return {
        length: {arm: _mean(means) for arm, means in arms.items()}
        for length, arms in groups.items()
        if any(len(means) > 1 for means in arms.values())
    }


# --------------------------------------------------------------------------------------------------------------------
# Text.


def render_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Aligned text for a terminal: one line a data set and arm, in per cent; then differences and strata."""
    head = (
        "data",
        "arm",
        "n",
        "runs",
        "score",
        "stderr",
        "stderr(runs)",
        "em_norm",
        "f1",
        "failed",
        "cut",
        "turn cut",
    )
    rows: list[tuple[str, ...]] = [(*head, "turns", "memory", "tokens")]
    for name, result in results.items():
        rows += [_row(name, arm, stats) for arm, stats in result["arms"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, result in results.items():
        for pair, value in result["differences"].items():
            text.append(f"{name}: {pair} = {_percent(value['mean'])} +- {_percent(value['stderr'])} (n={value['n']})")
        for arm, stats in result["arms"].items():
            strata = [f"{_percent(s['mean'])} (n={s['n']})" for s in stats["by_position"]]
            if any(stratum["n"] for stratum in stats["by_position"]):
                text.append(f"{name}, {arm}, by fifth of the document with the first evidence: {', '.join(strata)}")
            for reason, places in stats["failures"].items():
                shown = ", ".join(places[:10]) + (", ..." if len(places) > 10 else "")
                text.append(f"{name}, {arm}, failed and counted as 0: {reason} x{len(places)} (run/item {shown})")
    return "\n".join(text)


def _row(name: str, arm: str, stats: Mapping[str, Any]) -> tuple[str, ...]:
    shares = [_percent(stats[key]) for key in ("mean", "stderr", "stderr_runs")]
    shares += [_percent(stats["measures"].get(key)) for key in ("em_norm", "f1")]
    sizes = [_number(stats[key]) for key in ("turns", "memory_tokens", "context_tokens")]
    counts = [str(stats[key]) for key in ("n_failed", "context_truncated", "turn_truncated")]
    return (name, arm, str(stats["n_questions"]), str(stats["n_runs"]), *shares, *counts, *sizes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"
