"""The model card of a trained checkpoint, filled from the result files of its evaluation.

Inputs: a checkpoint folder and one or more `result.json` of a method's evaluation program. Invariants: every figure comes
from a result file and stands with n, runs, standard error, seed and commit; a result of other weights than those of the
folder is refused; nothing is a best of several. Leaves out: running evaluations, uploads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agentic.common.errors import ConfigError
from agentic.common.evaluation_provenance import model_fingerprint

TEMPLATE = "model_card.md.j2"
MARKER = "Written by tools/checkpoints.py from result files; edit the results, not this page."


@dataclass(frozen=True)
class CardFacts:
    """What the result files do not say.

    Attributes:
        repo: `ORG/NAME` it will have.
        method_key, method: its folder under `agentic/`, and its name in prose.
        base: repository of the model before training.
        license: as the hub spells it.
        note: a paragraph about data and training, or empty.
    """

    repo: str
    method_key: str
    method: str
    base: str
    license: str
    note: str = ""


def write_card(folder: Path, facts: CardFacts, results: Sequence[Path]) -> Path:
    """Write `README.md` into the checkpoint folder. Raises ConfigError, FileNotFoundError before anything is written."""
    path = folder / "README.md"
    if path.exists() and MARKER not in path.read_text(encoding="utf-8"):
        raise ConfigError(f"{path}: was not written here and would be lost; move it away")
    path.write_text(render_card(facts, results, model_fingerprint(str(folder))), encoding="utf-8")
    return path


def render_card(facts: CardFacts, results: Sequence[Path], weights: Mapping[str, Any]) -> str:
    """The card's text. `weights` is the fingerprint of the checkpoint. Raises ConfigError, FileNotFoundError."""
    reports = [load_result(path, weights) for path in results]
    header = {
        "base_model": facts.base,
        "library_name": "transformers",
        "license": facts.license,
        "pipeline_tag": "text-generation",
        "tags": ["slime-agentic", facts.method_key, "reinforcement-learning"],
    }
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, keep_trailing_newline=True
    ).get_template(TEMPLATE)
    return template.render(
        header=yaml.safe_dump(header, sort_keys=False).strip(),
        marker=MARKER,
        title=facts.repo.partition("/")[2],
        rows=[row for report in reports for row in _rows(report)],
        differences=[line for report in reports for line in _differences(report)],
        facts=[pair for report in reports for pair in _provenance(report, weights)],
        evaluated_with=_settings(reports[0]),
        **vars(facts),
    )


def load_result(path: Path, weights: Mapping[str, Any]) -> dict[str, Any]:
    """A result file in which one arm has these weights. Raises ConfigError, FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"--result {path}: no such file")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        arms = {name: model.get("weights_sha256") for name, model in report["protocol"]["arms"].items()}
        complete = bool(report["results"]) and "commit" in report
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--result {path}: not the result.json of an evaluation ({error!r})") from error
    if not complete:
        raise ConfigError(f"--result {path}: holds no results; let the evaluation finish")
    if "weights_sha256" not in weights or weights["weights_sha256"] not in arms.values():
        raise ConfigError(
            f"--result {path}: measured other weights than those of {weights['name']}; evaluate it first"
        )
    return report


def _rows(report: Mapping[str, Any]) -> Iterator[list[str]]:
    for data, result in report["results"].items():
        for arm, stats in result["arms"].items():
            figures = [_percent(stats.get(key)) for key in ("mean", "stderr", "stderr_runs")]
            counts = [str(stats[key]) for key in ("n_questions", "n_runs")]
            origin = [str(report["commit"] or "unknown")[:12], str(report["protocol"]["seed"])]
            yield [data, arm, *counts, *figures, str(stats["n_failed"]), *origin]


def _differences(report: Mapping[str, Any]) -> Iterator[str]:
    for data, result in report["results"].items():
        for pair, value in result.get("differences", {}).items():
            figures = f"{_percent(value['mean'])} ± {_percent(value['stderr'])} points"
            yield f"{data}: {pair} = {figures} (paired, n = {value['n']})"


def _provenance(report: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "weights (fingerprint)", f"`{weights['weights_sha256']}`"
    yield "code", f"`{report['commit'] or 'unknown'}`"
    for name, facts in report["protocol"]["data"].items():
        yield f"data {name}", f"`{facts if isinstance(facts, str) else json.dumps(facts)}`"
    yield "sampling", f"`{json.dumps(report['protocol']['sampling'])}`"
    yield "first items only", str(report["protocol"]["limit"] or "no, all")


def _settings(report: Mapping[str, Any]) -> str:
    runs = next((f"--{key} {report[key]}" for key in ("runs", "trials") if key in report), "")
    return f"{runs} --eval-seed {report['protocol']['seed']}".strip()


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
