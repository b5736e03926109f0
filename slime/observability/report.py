"""A self-contained page about one run: result, curves, and the same problem solved before and after training.

Inputs: the summary, the rows of `run_summary.step_rows`, and two episodes (see `Episode`). Invariants: the page needs no
network and no other file; every text that came from a model is escaped. Leaves out: browsing many trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape

CURVES = (
    ("reward", "Reward (mean of a rollout)"),
    ("kl", "KL to the reference"),
    ("entropy", "Entropy (nats)"),
    ("grad_norm", "Gradient norm"),
    ("logprob_diff", "|trainer - engine| log-prob"),
    ("tokens", "Trained tokens"),
)
WIDTH, HEIGHT, LEFT, BOTTOM = 320, 150, 54, 22
COLOURS = ("#2f6fde", "#1f9d61", "#c2571a")


@dataclass(frozen=True)
class Piece:
    """A token of a policy call as shown: prompt tokens are read only, response tokens with mask 1 are trained."""

    text: str
    kind: str
    """`prompt`, `trained` or `masked`."""


@dataclass(frozen=True)
class Call:
    """One role call of an episode; `pieces` only for the policy's calls."""

    role: str
    text: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One question worked on, as the page shows it."""

    title: str
    question: str
    label: str
    reward: float
    calls: tuple[Call, ...] = field(default=())


def curve_points(values: Sequence[float | None]) -> tuple[list[tuple[float, float]], float, float]:
    """Pixel positions of the known values, and the lowest and highest of them; ([], 0, 0) when none is known."""
    known = [(i, v) for i, v in enumerate(values) if v is not None]
    if not known:
        return [], 0.0, 0.0
    low, high = min(v for _, v in known), max(v for _, v in known)
    span_x, span_y = max(len(values) - 1, 1), (high - low) or 1.0
    plot_w, plot_h = WIDTH - LEFT - 8, HEIGHT - BOTTOM - 10
    return [(LEFT + i / span_x * plot_w, 10 + (high - v) / span_y * plot_h) for i, v in known], low, high


def _curve(name: str, title: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    points, low, high = curve_points([row.get(name) for row in rows])
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return {"title": title, "path": path, "low": _short(low), "high": _short(high), "last": len(rows) - 1}


def _short(value: float) -> str:
    """At most nine characters, which fit beside an axis."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


@dataclass(frozen=True)
class Chart:
    """Rates between 0 and 1 over a few labelled positions, evenly spaced; at most three series."""

    title: str
    labels: Sequence[str]
    series: dict[str, Sequence[float]]


def _chart(chart: Chart) -> dict[str, Any]:
    width, height = WIDTH - LEFT - 24, HEIGHT - BOTTOM - 10
    xs = [LEFT + 8 + i / max(len(chart.labels) - 1, 1) * width for i in range(len(chart.labels))]
    lines = [
        {
            "name": name,
            "colour": colour,
            "points": [(x, 10 + (1 - value) * height) for x, value in zip(xs, values, strict=True)],
        }
        for (name, values), colour in zip(chart.series.items(), COLOURS, strict=False)
    ]
    return {"title": chart.title, "ticks": list(zip(xs, chart.labels, strict=True)), "lines": lines}


def write_report(
    path: Path,
    summary: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    episodes: Sequence[Episode],
    about: str,
    charts: Sequence[Chart] = (),
) -> None:
    """Write the page to `path`; `about` is a sentence on what was trained."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=select_autoescape(default=True))
    page = environment.get_template("report.html.j2").render(
        summary=summary,
        about=about,
        charts=[_chart(chart) for chart in charts],
        curves=[_curve(name, title, rows) for name, title in CURVES],
        episodes=episodes,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        bottom=HEIGHT - BOTTOM,
    )
    path.write_text(page, encoding="utf-8")
