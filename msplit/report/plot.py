"""Lines over a logarithmic plane as an SVG file, without a library: nothing in it is scripted or fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msplit.escape import html

_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 50, 60
_LEGEND = 18
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
"""Okabe and Ito's: told apart by those who see fewer colours; beyond eight, dashes tell lines apart."""

_DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        name: For the legend.
        points: x -> (y, lower end, upper end), all above 0, in the order in which the line goes; the ends are drawn as a whisker.
    """

    name: str
    points: Mapping[float, tuple[float, float, float]]


def svg(
    title: str, x_name: str, y_name: str, series: Sequence[Series], *, key: str = "", measured: bool = False
) -> str:
    """The text of an SVG file: both axes logarithmic, their names with units, a legend below.

    Args:
        key: Tells it from others on the same page.
        measured: Whether values of x were measured, too; otherwise each of them is named below the axis.

    Raises:
        ValueError: There is no point.
    """
    xs = sorted({x for one in series for x in one.points})
    ys = [y for one in series for point in one.points.values() for y in point if y > 0]
    if not xs or not ys:
        raise ValueError("nothing to plot")
    across = _Axis(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT)
    up = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    height = _HEIGHT + _LEGEND * len(series) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="title{key} about{key}" font-family="sans-serif" font-size="12">',
        f'<title id="title{key}">{html(title)}</title>',
        f'<desc id="about{key}">{html(f"{y_name} over {x_name}: {_described(series)}")}</desc>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{html(title)}</text>',
        *_grid(across, up, _ticks(xs[0], xs[-1]) if measured else xs),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{html(x_name)}</text>',
        f'<text transform="translate(18 {(_TOP + _HEIGHT - _BOTTOM) / 2:.1f}) rotate(-90)" text-anchor="middle">{html(y_name)}</text>',
    ]
    for number, one in enumerate(series):
        parts += _line(number, one, across, up)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    """From a value to a place, logarithmic, with a little room at both ends."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        low, high = math.log(self.low) - 0.05, math.log(self.high) + 0.05
        return self.begin + (self.end - self.begin) * (math.log(value) - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, as many as lie between; the ends where there are fewer than two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    shown = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return shown if len(shown) > 1 else sorted({low, high})


def _grid(across: _Axis, up: _Axis, xs: Sequence[float]) -> list[str]:
    parts = []
    for x in xs:
        place = across(x)
        parts.append(f'<line x1="{place:.1f}" y1="{_TOP}" x2="{place:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#dddddd"/>')
        parts.append(f'<text x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x:,.10g}</text>')
    for y in _ticks(up.low, up.high):
        place = up(y)
        parts.append(f'<line x1="{_LEFT}" y1="{place:.1f}" x2="{_WIDTH - _RIGHT}" y2="{place:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{y:,.10g}</text>')
    return parts


def _line(number: int, one: Series, across: _Axis, up: _Axis) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    style = f'stroke="{colour}" fill="none"' + (f' stroke-dasharray="{dash}"' if dash else "")
    points = [(across(x), up(y), up(low), up(high)) for x, (y, low, high) in one.points.items()]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    parts = [f"<g><title>{html(one.name)}</title>", f'<polyline points="{path}" stroke-width="2" {style}/>']
    for x, y, low, high in points:
        parts.append(f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    place = _HEIGHT + _LEGEND * number
    parts.append(f'<line x1="{_LEFT}" y1="{place}" x2="{_LEFT + 30}" y2="{place}" stroke-width="2" {style}/>')
    parts.append(f'<text x="{_LEFT + 38}" y="{place + 4}">{html(one.name)}</text></g>')
    return parts


def _described(series: Sequence[Series]) -> str:
    return "; ".join(
        f"{one.name}: {', '.join(f'{x:g}: {y:.4g}' for x, (y, _, _) in one.points.items())}" for one in series
    )
