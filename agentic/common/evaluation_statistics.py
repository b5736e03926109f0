"""Statistics of repeated evaluation: completeness, mean, standard errors, majority vote, paired differences.

Inputs: for one arm on one data set its runs, each a mapping from question id to result line (`evaluation`).
Invariants: pure functions; a failure (`score` None) is never a score: it is counted, left out of the means, and shown
once more as zero in `mean_failures_wrong`; every mean comes with n and a standard error where there is one.
Leaves out: significance tests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentic.common.answers import answers_equal

Line = dict[str, Any]


def missing(runs: Sequence[Mapping[str, Line]], ids: Sequence[str], max_failure_rate: float) -> list[str]:
    """What stands between these runs (question id -> line) and a summary, one phrase a run; empty when complete."""
    phrases = []
    for number, lines in enumerate(runs):
        absent = [id_ for id_ in ids if id_ not in lines]
        failed = Counter(str(lines[id_]["failure_reason"]) for id_ in ids if id_ in lines and _failed(lines[id_]))
        if absent:
            shown = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            phrases.append(f"run {number}: {len(absent)} of {len(ids)} questions have no answer ({shown})")
        if sum(failed.values()) > max_failure_rate * len(ids):
            reasons = ", ".join(f"{reason} x{count}" for reason, count in failed.most_common())
            phrases.append(f"run {number}: {sum(failed.values())} of {len(ids)} questions failed ({reasons})")
    return phrases


def summarise(runs: Sequence[Mapping[str, Line]], ids: Sequence[str]) -> dict[str, Any]:
    """Statistics of one arm on one data set (K runs of Q questions), over scored lines.

    `mean`: of the per-question means. `stderr`: its standard error, between questions (it includes the noise of
    sampling). `stderr_runs`: the spread of whole runs, std(run means) / sqrt(K): the noise of sampling alone.
    `majority`: share of questions whose most frequent vote is right. `mean_failures_wrong`: failures counted as 0.
    """
    scores = question_scores(runs, ids)
    run_means = [_mean([line["score"] for line in lines.values() if not _failed(line)]) for lines in runs]
    known_means = [mean for mean in run_means if mean is not None]
    lines = [lines[id_] for lines in runs for id_ in ids if id_ in lines]
    failures = Counter(str(line["failure_reason"]) for line in lines if _failed(line))
    all_scores = [line["score"] or 0.0 for line in lines]
    return {
        "n_questions": len(ids),
        "n_runs": len(runs),
        "n_failed": sum(failures.values()),
        "failure_reasons": dict(failures),
        "mean": _mean(list(scores.values())),
        "stderr": standard_error(list(scores.values())),
        "stderr_runs": standard_error(known_means),
        "run_means": run_means,
        "majority": _mean([majority_score([lines[id_] for lines in runs if id_ in lines]) for id_ in scores]),
        "mean_failures_wrong": _mean(all_scores),
        "judged_by": dict(Counter(line["judged_by"] for line in lines if not _failed(line))),
        "tokens": _mean_tokens(lines),
        "seconds": _mean([line["seconds"] for line in lines]),
    }


def compare_arms(runs: Mapping[str, Sequence[Mapping[str, Line]]], ids: Sequence[str]) -> dict[str, Any]:
    """`arms`: the summary of each; `differences`: later minus earlier arm, for all pairs in the order given."""
    arms = list(runs)
    scores = {arm: question_scores(runs[arm], ids) for arm in arms}
    pairs = [(after, before) for number, before in enumerate(arms) for after in arms[number + 1 :]]
    differences = {f"{after} - {before}": paired_difference(scores[after], scores[before]) for after, before in pairs}
    return {"arms": {arm: summarise(runs[arm], ids) for arm in arms}, "differences": differences}


def question_scores(runs: Sequence[Mapping[str, Line]], ids: Sequence[str]) -> dict[str, float]:
    """Mean score of each question over its scored lines; a question without any is left out."""
    scores = {}
    for id_ in ids:
        values = [lines[id_]["score"] for lines in runs if id_ in lines and not _failed(lines[id_])]
        if values:
            scores[id_] = sum(values) / len(values)
    return scores


def paired_difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, Any]:
    """Mean difference of two arms over the questions both answered, with the standard error of that difference."""
    differences = [after[id_] - before[id_] for id_ in before if id_ in after]
    return {"n": len(differences), "mean": _mean(differences), "stderr": standard_error(differences)}


def majority_score(lines: Sequence[Line]) -> float:
    """Score of the most frequent vote; equal values in other forms are one vote, ties count their mean, no vote is 0."""
    groups: list[tuple[str, list[float]]] = []
    for line in lines:
        vote = line["vote"]
        if vote is None or _failed(line):
            continue
        group = next((scores for other, scores in groups if vote == other or answers_equal(vote, other) is True), None)
        if group is None:
            groups.append((vote, [line["score"]]))
        else:
            group.append(line["score"])
    most = max((len(scores) for _, scores in groups), default=0)
    return _mean([sum(scores) / len(scores) for _, scores in groups if len(scores) == most]) or 0.0


def standard_error(values: Sequence[float]) -> float | None:
    """Unbiased standard deviation over sqrt(n); None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _failed(line: Line) -> bool:
    return line["score"] is None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_tokens(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Role -> mean prompt tokens, completion tokens and calls per answer."""
    totals: dict[str, Counter[str]] = {}
    for line in lines:
        for role, counts in line["tokens"].items():
            totals.setdefault(role, Counter()).update(counts)
    return {role: {name: value / len(lines) for name, value in total.items()} for role, total in totals.items()}


def render_results(results: Mapping[str, Mapping[str, Any]], runs: int) -> str:
    """Data set -> `compare_arms` as aligned text in per cent, for a terminal."""
    head = ("data", "arm", "n", "runs", "mean", "stderr", "stderr(runs)", f"majority@{runs}", "failed", "tokens")
    rows: list[tuple[str, ...]] = [head]
    for name, result in results.items():
        rows += [_row(name, arm, runs, stats) for arm, stats in result["arms"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, result in results.items():
        for pair, value in result["differences"].items():
            lines.append(f"{name}: {pair} = {_percent(value['mean'])} +- {_percent(value['stderr'])} (n={value['n']})")
    return "\n".join(lines)


def _row(name: str, arm: str, runs: int, stats: Mapping[str, Any]) -> tuple[str, ...]:
    tokens = sum(role["prompt"] + role["completion"] for role in stats["tokens"].values())
    numbers = (_percent(stats[key]) for key in ("mean", "stderr", "stderr_runs", "majority"))
    return (name, arm, str(stats["n_questions"]), str(runs), *numbers, str(stats["n_failed"]), f"{tokens:.0f}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
