"""Numbers of an evaluation: success, pass^k and floor, money, time and calls, per data set and arm; and their table.

Inputs: result lines of all runs (`agentic.common.evaluation`), one run a trial, and the floor of each set. Invariants: pure
functions; a failure of the infrastructure is a missing trial, never a zero, and is counted; no figure of success stands
without the floor of its set, which doing nothing reaches; nothing is a best of several.
Leaves out: how an episode is scored, files, what the floor is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentic.common.evaluation import Line
from agentic.common.evaluation_statistics import compare_arms, question_scores
from agentic.toolorchestra.preferences import Features, check_vector, preference_score
from agentic.toolorchestra.tau2.pass_hat import is_success, pass_hat

Runs = Sequence[Mapping[str, Line]]
UNTRAINED = "untrained"
MEANS = ("dollars", "seconds", "turns", "format_errors")


@dataclass(frozen=True)
class FloorFacts:
    """What doing nothing reaches on a set."""

    passed: frozenset[str]
    """Ids of the tasks that it passes."""
    read_only: int
    """Tasks whose reference solution writes nothing."""
    total: int

    @property
    def rate(self) -> float:
        return len(self.passed) / self.total


def floor_facts(metadata: Mapping[str, Mapping[str, Any]]) -> FloorFacts:
    """The floor of the tasks (id -> metadata); a question is never passed by doing nothing. Takes some seconds."""
    domains: dict[str, dict[str, str]] = {}
    found: dict[str, list[Any]] = {}
    for id_, values in metadata.items():
        if values.get("category") == "func_call":
            # Imported here: questions do without the package.
            from agentic.toolorchestra.tau2.tasks import task_of

            domain, task = task_of(values)
            found.setdefault(domain, []).append(task)
            domains.setdefault(domain, {})[task.id] = id_
    passed: set[str] = set()
    read_only = 0
    for domain, tasks in found.items():
        from agentic.toolorchestra.tau2.floors import floor_of

        floor = floor_of(domain, tasks)
        passed |= {domains[domain][task_id] for task_id in floor.passed}
        read_only += floor.read_only
    return FloorFacts(frozenset(passed), read_only, len(metadata))


def summarise_dataset(
    runs: Mapping[str, Runs], ids: Sequence[str], floor: FloorFacts, weights: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Arm -> statistics, paired differences of the arms, and the floor of the set.

    `mean_beyond_floor`: success on the tasks that doing nothing does not pass.

    `weights`: id -> preference vector, for tasks that have one; with an untrained arm each arm then has a
    `preference_score` (mean over scored trials, baseline: the untrained arm's trial of the same number).
    """
    result = compare_arms(runs, ids)
    for arm, stats in result["arms"].items():
        stats.pop("majority")
        scores = question_scores(runs[arm], [id_ for id_ in ids if id_ not in floor.passed])
        stats |= {"floor": floor.rate, "mean_beyond_floor": _mean(list(scores.values()))}
        stats |= {"pass_hat": _pass_hat(runs[arm], ids)} | _measures(runs[arm])
        if UNTRAINED in runs and weights:
            stats["preference_score"] = _preference(runs[arm], runs[UNTRAINED], weights)
    facts = {"rate": floor.rate, "passed": sorted(floor.passed), "read_only": floor.read_only, "total": floor.total}
    return {**result, "floor": facts}


def _pass_hat(runs: Runs, ids: Sequence[str]) -> dict[str, Any]:
    rewards = {id_: [lines[id_]["score"] for lines in runs if id_ in lines] for id_ in ids}
    result = pass_hat(rewards)
    return {"k": {str(k): value for k, value in result.values.items()}, "missing": result.missing}


def _measures(runs: Runs) -> dict[str, Any]:
    """Means over scored trials, calls per alias, dollars per solved task, and how episodes ended."""
    lines = [line for trial in runs for line in trial.values() if line["score"] is not None]
    episodes = [line["details"]["orch"] for line in lines if "orch" in line["details"]]
    means = {name: _mean([float(episode.get(name) or 0) for episode in episodes]) for name in MEANS}
    calls: Counter[str] = Counter()
    for episode in episodes:
        calls.update(episode["counts"])
    solved = sum(is_success(line["score"]) for line in lines)
    dollars = sum(float(episode["dollars"]) for episode in episodes)
    return {
        **means,
        "dollars_per_solved": dollars / solved if solved else None,
        "calls": {alias: count / len(episodes) for alias, count in sorted(calls.items())},
        "wall_seconds": _mean([line["seconds"] for line in lines]),
        "truncated": sum(bool(line["details"].get("truncated")) for line in lines),
        "terminations": dict(Counter(str(episode.get("termination")) for episode in episodes)),
    }


def _preference(runs: Runs, baseline: Runs, weights: Mapping[str, Mapping[str, float]]) -> float | None:
    scores = [
        preference_score(_features(own[id_], vector), _features(other[id_], vector))
        for own, other in zip(runs, baseline, strict=True)
        for id_, vector in weights.items()
        if all(id_ in lines and "orch" in lines[id_]["details"] for lines in (own, other))
    ]
    return _mean(scores)


def _features(line: Line, weights: Mapping[str, float]) -> Features:
    episode = line["details"]["orch"]
    return Features(episode["counts"], line["score"] or 0.0, episode["dollars"], episode["seconds"], weights)


def preference_weights(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Checked preference vectors of the tasks (id -> metadata) that have one. Raises ConfigError."""
    return {
        id_: check_vector(values["pref_vec"], f"task {id_}")
        for id_, values in metadata.items()
        if values.get("pref_vec")
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --------------------------------------------------------------------------------------------------------------------
# Text.


def render_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Aligned text for a terminal: one line a data set and arm, in per cent, cents and seconds; then calls, differences."""
    trials = max((stats["n_runs"] for result in results.values() for stats in result["arms"].values()), default=1)
    powers = [str(k) for k in range(1, trials + 1)]
    head = ("data", "arm", "n", "trials", "floor", *(f"pass^{k}" for k in powers), "stderr", "beyond floor")
    rows: list[tuple[str, ...]] = [(*head, "cents", "cents/solved", "seconds", "turns", "failed")]
    for name, result in results.items():
        rows += [_row(name, arm, stats, powers) for arm, stats in result["arms"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, result in results.items():
        text += [_extra(name, arm, stats) for arm, stats in result["arms"].items()]
        for pair, value in result["differences"].items():
            text.append(f"{name}: {pair} = {_percent(value['mean'])} +- {_percent(value['stderr'])} (n={value['n']})")
    return "\n".join(text)


def _row(name: str, arm: str, stats: Mapping[str, Any], powers: Sequence[str]) -> tuple[str, ...]:
    shares = [_percent(stats["floor"]), *(_percent(stats["pass_hat"]["k"].get(k)) for k in powers)]
    shares += [_percent(stats["stderr"]), _percent(stats["mean_beyond_floor"])]
    cents = [_number(stats[key], 100.0) for key in ("dollars", "dollars_per_solved")]
    times = [_number(stats[key]) for key in ("seconds", "turns")]
    return (
        name,
        arm,
        str(stats["n_questions"]),
        str(stats["n_runs"]),
        *shares,
        *cents,
        *times,
        str(stats["n_failed"]),
    )


def _extra(name: str, arm: str, stats: Mapping[str, Any]) -> str:
    calls = ", ".join(f"{alias} {number:.2f}" for alias, number in stats["calls"].items()) or "none"
    ends = ", ".join(f"{reason} {count}" for reason, count in sorted(stats["terminations"].items()))
    score = stats.get("preference_score")
    wish = "" if score is None else f"; preference score {score:.3f}"
    return f"{name}, {arm}: calls per task: {calls}; ended by: {ends}{wish}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _number(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:.2f}"
