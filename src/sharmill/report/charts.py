"""Charts as SVG, drawn by Python: they need no script, print well, and take their colours from the page's theme.

A chart is as wide as its place. Its values are shown where the pointer rests, and its description says in words what
it shows, for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from markupsafe import Markup, escape

_WIDTH: Final = 400
_HEIGHT: Final = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 36
_NUM_COLORS: Final = 8

Number = Callable[[float], str]


def show_number(value: float) -> str:
    """Return a number as short as it can be read.

    >>> [show_number(value) for value in (0.0, 0.25, 12.5, 1234.0, 2_500_000.0)]
    ['0', '0.25', '12.5', '1,234', '2.5M']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g}{unit}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers between two values, about as many as ``wanted``.

    >>> ticks(0, 37)
    [0, 10, 20, 30]
    """
    span = high - low
    if not span > 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= wanted)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


class Plot:
    """The frame of a chart: two axes, and places in it."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], *, height: int = _HEIGHT) -> None:
        self._x, self._y, self._height = _widen(x), _widen(y), height
        self._parts: list[Markup] = []

    def at_x(self, value: float) -> float:
        low, high = self._x
        return round(_LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT), 1)

    def at_y(self, value: float) -> float:
        low, high = self._y
        return round(self._height - _BOTTOM - (value - low) / (high - low) * (self._height - _TOP - _BOTTOM), 1)

    def add(self, template: str, *values: object) -> None:
        """Add an element; what is put into its ``{}`` is escaped."""
        self._parts.append(Markup(template).format(*values))

    def y_axis(self, show: Number = show_number) -> None:
        for value in ticks(*self._y, wanted=4):
            y = self.at_y(value)
            self.add('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', _LEFT, _WIDTH - _RIGHT, y, y)
            self.add('<text x="{}" y="{}" text-anchor="end">{}</text>', _LEFT - 6, y + 4, show(value))

    def x_axis(self, label: str, show: Number = show_number) -> None:
        for value in ticks(*self._x):
            x = self.at_x(value)
            self.add('<text x="{}" y="{}" text-anchor="middle">{}</text>', x, self._height - _BOTTOM + 15, show(value))
        self.x_label(label)

    def x_label(self, label: str) -> None:
        y = self._height - _BOTTOM
        self.add('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>', _LEFT, _WIDTH - _RIGHT, y, y)
        self.add('<text class="label" x="{}" y="{}" text-anchor="end">{}</text>', _WIDTH - _RIGHT, self._height - 4,
                 label)  # fmt: skip

    def bar(self, left: float, right: float, value: float, tip: str, color: int = 0) -> None:
        """Add a bar between two values of x, and what is shown where the pointer rests on it."""
        x, y = self.at_x(left), self.at_y(value)
        width = max(0.6, self.at_x(right) - x - (1 if self.at_x(right) - x > 3 else 0))
        height = max(0.0, self.at_y(max(self._y[0], 0.0)) - y)
        self.add('<rect class="fill{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
                 color % _NUM_COLORS, x, y, round(width, 1), round(height, 1), tip)  # fmt: skip

    def line(self, points: Iterable[tuple[float, float]], name: str, color: int = 0) -> None:
        path = " ".join(f"{self.at_x(x)},{self.at_y(y)}" for x, y in points)
        self.add('<polyline class="line{}" points="{}"><title>{}</title></polyline>', color % _NUM_COLORS, path, name)

    def svg(self, description: str) -> Markup:
        """Return the chart; ``description`` says in words what it shows."""
        return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
            _WIDTH, self._height, description, Markup("").join(self._parts)
        )


def _widen(limits: tuple[float, float]) -> tuple[float, float]:
    low, high = limits
    return (low, high) if high > low else (low, low + 1.0)


def histogram(
    edges: Sequence[float], counts: Sequence[int], *, label: str, unit: str, description: str, color: int = 0
) -> Markup:
    """Return a chart of counts between ``edges``, of which there is one more; ``unit`` follows values of x."""
    plot = Plot((edges[0], edges[-1]), (0, max(counts, default=0)))
    plot.y_axis()
    total = max(1, sum(counts))
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            tip = f"{show_number(left)} to {show_number(right)} {unit}: {count:,} ({count / total:.1%})"
            plot.bar(left, right, count, tip, color)
    plot.x_axis(label)
    return plot.svg(description)


def columns(names: Sequence[str], values: Sequence[float], *, label: str, description: str, show: Number) -> Markup:
    """Return a chart with a column for each name; ``show`` makes text of a value."""
    plot = Plot((0, len(names)), (0, max(values, default=0)))
    plot.y_axis()
    every = max(1, math.ceil(len(names) / 10))
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        plot.bar(number + 0.1, number + 0.9, value, f"{name}: {show(value)}")
        if number % every == 0:
            plot.add('<text x="{}" y="{}" text-anchor="middle">{}</text>', plot.at_x(number + 0.5),
                     _HEIGHT - _BOTTOM + 15, name if len(name) <= 9 else f"{name[:8]}…")  # fmt: skip
    plot.x_label(label)
    return plot.svg(description)


def curves(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, x: tuple[float, float], y: tuple[float, float],
    label: str, description: str, show_y: Number = show_number,
) -> Markup:  # fmt: skip
    """Return a chart of curves, each with a name and its points, and their names above it where there are several."""
    plot = Plot(x, y)
    plot.y_axis(show_y)
    plot.x_axis(label)
    for color, (name, points) in enumerate(series):
        plot.line(points, name, color)
    return Markup("{}{}").format(legend([name for name, _ in series]), plot.svg(description))


def scatter(points: Sequence[tuple[float, float, int, str]], *, description: str) -> Markup:
    """Return a map of points: x, y, the number of a colour, and what is shown where the pointer rests."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    plot = Plot((min(xs), max(xs)), (min(ys), max(ys)), height=320)
    for x, y, color, tip in points:
        plot.add('<circle class="fill{} dot" cx="{}" cy="{}" r="4"><title>{}</title></circle>', color % _NUM_COLORS,
                 plot.at_x(x), plot.at_y(y), tip)  # fmt: skip
    return plot.svg(description)


def legend(names: Sequence[str]) -> Markup:
    """Return the names of several series with their colours, or nothing for a single one."""
    if len(names) < 2:
        return Markup("")
    entries = (
        Markup('<span><i class="swatch fill{}"></i>{}</span>').format(color % _NUM_COLORS, name)
        for color, name in enumerate(names)
    )
    return Markup('<p class="legend">{}</p>').format(Markup("").join(entries))


def figure(title: str, chart: Markup, note: str = "") -> Markup:
    """Return a chart with its title and, below, what it says in numbers."""
    return Markup("<figure><figcaption>{}</figcaption>{}<p>{}</p></figure>").format(title, chart, escape(note))
