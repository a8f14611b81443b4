"""Curves are drawn where they belong, on axes with round numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.reports.curves import curves_svg

_SVG = "{http://www.w3.org/2000/svg}"


def _drawn(text: str) -> tuple[list[str], list[list[tuple[float, float]]]]:
    """(words, curves as points) of a picture."""
    root = ElementTree.fromstring(text)
    words = [found.text or "" for found in root.iter(f"{_SVG}text")]
    paths = [found.attrib["points"].split() for found in root.iter(f"{_SVG}polyline")]
    return words, [[(float(x), float(y)) for x, y in (point.split(",") for point in path)] for path in paths]


def test_points_are_in_proportion() -> None:
    words, (curve,) = _drawn(curves_svg("t", {"a < b": [(0, 0), (50, 5), (100, 10)]}, x_label="step", y_label="loss"))
    (left, bottom), (middle, half), (right, top) = curve
    assert middle - left == pytest.approx(right - middle, abs=0.2) and bottom - half == pytest.approx(
        half - top, abs=0.2
    )
    assert left < right and top < bottom, "y grows upwards"
    assert {"a < b", "step", "loss", "0", "20", "100", "10"} <= set(words)


def test_what_is_above_the_limit_is_left_out() -> None:
    _, (curve,) = _drawn(curves_svg("t", {"a": [(0, 100), (1, 3), (2, 2)]}, x_label="", y_label="", y_max=4))
    assert len(curve) == 2


def test_a_level_curve_is_drawn() -> None:
    _, (curve,) = _drawn(curves_svg("t", {"a": [(1, 2), (2, 2)]}, x_label="", y_label=""))
    assert curve[0][1] == curve[1][1]


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="must have points"):
        curves_svg("t", {"a": []}, x_label="", y_label="")
