"""Accuracy against length as one self-contained SVG file; no plotting library.

Inputs: for each series points (length in tokens, mean, standard error). Invariants: the same input gives the same text;
all text is escaped; the length axis is logarithmic, the accuracy axis runs from 0 to 100%.
Leaves out: which series there are (`eval`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 60
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b7791f", "#444444")


class Point(NamedTuple):
    """One length of one series; `mean` and `stderr` are shares of 1."""

    label: str
    tokens: float
    mean: float
    stderr: float | None


def render_svg(title: str, series: Mapping[str, Sequence[Point]]) -> str:
    """The figure. Series without points are not drawn; with no points at all it is an empty pair of axes."""
    points = [point for several in series.values() for point in several]
    low, high = min((p.tokens for p in points), default=1.0), max((p.tokens for p in points), default=10.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, "start", ' font-size="15"'),
        *_axes({point.label: _x(point.tokens, low, high) for point in points}),
    ]
    drawn = [(name, several) for name, several in series.items() if several]
    for number, (name, several) in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        parts += _curve([(_x(p.tokens, low, high), p) for p in several], colour)
        parts.append(_text(WIDTH - RIGHT, TOP + 16 * number, name, "end", f' fill="{colour}" font-weight="bold"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(tokens: float, low: float, high: float) -> float:
    share = math.log(tokens / low) / math.log(high / low) if high > low else 0.5
    return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)


def _axes(labels: Mapping[str, float]) -> list[str]:
    parts = []
    for step in range(0, 101, 20):
        height = _y(step / 100)
        parts.append(f'<line x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, height + 4, f"{step}%", "end"))
    parts += [_text(x, HEIGHT - BOTTOM + 18, label, "middle") for label, x in labels.items()]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "length of the document (log scale)", "middle"))
    return parts


def _curve(points: Sequence[tuple[float, Point]], colour: str) -> list[str]:
    points = sorted(points, key=lambda pair: pair[0])
    path = " ".join(f"{x:.1f},{_y(point.mean):.1f}" for x, point in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, point in points:
        error = f" +- {100 * point.stderr:.1f}" if point.stderr is not None else ""
        note = f"<title>{escape(point.label)}: {100 * point.mean:.1f}{error}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{_y(point.mean):.1f}" r="4" fill="{colour}">{note}</circle>')
        if point.stderr is not None:
            top, bottom = _y(point.mean + point.stderr), _y(point.mean - point.stderr)
            parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{colour}"/>')
    return parts


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
