"""Curves of several runs as an SVG, drawn without a plotting package: machines with GPUs need none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 860, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")

Curve = Sequence[tuple[float, float]]


def curves_svg(
    title: str, curves: Mapping[str, Curve], *, x_label: str, y_label: str, y_max: float | None = None
) -> str:
    """Draw (x, y) curves by name, with a linear grid and a legend.

    Args:
        y_max: larger values leave the picture, so that a first loss does not flatten the last ones.

    Raises:
        ValueError: there are no points.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("curves must have points, got none")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    top = max(ys) if y_max is None else min(max(ys), y_max)
    x_axis, y_axis = _ticks(min(xs), max(xs)), _ticks(min(ys), top)
    low_x, high_x, low_y, high_y = x_axis[0], x_axis[-1], y_axis[0], y_axis[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return across, down

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
    ]
    for x in x_axis:
        across, _ = place(x, low_y)
        parts.append(_line((across, _TOP), (across, _HEIGHT - _BOTTOM)))
        parts.append(f'<text x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    for y in y_axis:
        _, down = place(low_x, y)
        parts.append(_line((_LEFT, down), (_WIDTH - _RIGHT, down)))
        parts.append(f'<text x="{_LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{y:g}</text>')
    middle = (_WIDTH - _RIGHT + _LEFT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(18 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    for index, (name, curve) in enumerate(curves.items()):
        style = f'stroke="{_COLORS[index % len(_COLORS)]}" stroke-width="1.6" stroke-dasharray="{_DASHES[index % len(_DASHES)]}"'
        shown = [place(x, y) for x, y in curve if y <= high_y]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in shown)
        parts.append(f'<polyline fill="none" {style} points="{path}"/>')
        across, down = _WIDTH - _RIGHT + 14, _TOP + 20 * index + 8
        parts.append(f'<line x1="{across}" y1="{down}" x2="{across + 28}" y2="{down}" {style}/>')
        parts.append(f'<text x="{across + 34}" y="{down + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers around [low, high], at least two."""
    rough = max(high - low, 1e-9) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="#ddd"/>'
