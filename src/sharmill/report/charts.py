"""Charts of the report, drawn by plotly.js in the browser.

A chart is stored as JSON for plotly in an attribute of its HTML element. Except for a map, it is followed by a table of
its values, for screen readers, printing and browsers without scripts. Colours are given by their names in ``page.css``;
``page.js`` replaces the names with the colours of the theme and calls plotly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from markupsafe import Markup, escape

from sharmill.report.section import render
from sharmill.report.text import plain_text, shorten, show_number

_HEIGHT: Final = 230
_MAP_HEIGHT: Final = 340
_NUM_COLORS: Final = 8
_MOST_TICKS: Final = 5
_MOST_LABELS: Final = 10
_LONGEST_LABEL: Final = 9
_LONGEST_TIP: Final = 80


def histogram(
    edges: Sequence[float], counts: Sequence[int], *, label: str, unit: str, description: str, color: int = 0
) -> Markup:
    """Return a bar chart of ``counts`` in bins with these ``edges``; there is one more edge than there are counts.

    Args:
        unit: unit of the x values, for the tooltips.
    """
    total = max(1, sum(counts))
    bars = [
        (left, right, count, f"{show_number(left)} to {show_number(right)} {unit}".rstrip())
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
    ]
    trace = {
        "type": "bar",
        "x": [(left + right) / 2 for left, right, _, _ in bars],
        "width": [right - left for left, right, _, _ in bars],
        "y": [count for _, _, count, _ in bars],
        "hovertext": _tips(f"{where}: {count:,} ({count / total:.1%})" for _, _, count, where in bars),
        "marker": {"color": f"c{color % _NUM_COLORS}", "line": {"color": "card", "width": 1}},
    }
    rows = [(where, f"{count:,}", f"{count / total:.1%}") for _, _, count, where in bars if count]
    axes = {
        "xaxis": {"range": [edges[0], edges[-1]]},
        # Use fewer ticks for small counts, so that the axis shows no fractions.
        "yaxis": {"nticks": min(_MOST_TICKS, max(counts, default=0) + 1)},
        "bargap": 0,
    }
    return _chart([trace], label, description, render("values.html", heads=(label, "count", "share"), rows=rows), axes)


def columns(
    names: Sequence[str], values: Sequence[float], *, label: str, description: str, show: Callable[[float], str]
) -> Markup:
    """Return a chart with a column for each name; ``show`` formats a value as text."""
    shown = [plain_text(show(value)) for value in values]
    trace = {
        "type": "bar",
        "x": list(range(len(names))),
        "y": list(values),
        "hovertext": _tips(f"{name}: {text}" for name, text in zip(names, shown, strict=True)),
        "marker": {"color": "c0"},
    }
    places = list(range(0, len(names), max(1, math.ceil(len(names) / _MOST_LABELS))))
    axes = {
        "xaxis": {
            "tickvals": places,
            "ticktext": [_escape_for_plotly(shorten(names[place], _LONGEST_LABEL)) for place in places],
        },
        "bargap": 0.2,
    }  # fmt: skip
    values_of_names = render("values.html", heads=(label or "name", "value"), rows=zip(names, shown, strict=True))
    return _chart([trace], label, description, values_of_names, axes)


def curves(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, x: tuple[float, float], y: tuple[float, float],
    label: str, description: str,
) -> Markup:  # fmt: skip
    """Return a chart of curves whose y values are shares; ``series`` are pairs of a name and points (x, y)."""
    traces, rows = [], []
    for color, (name, points) in enumerate(series):
        traces.append({
            "type": "scatter", "mode": "lines", "name": _escape_for_plotly(name),
            "x": [place for place, _ in points], "y": [value for _, value in points],
            "hovertext": _tips(f"{name}: {value:.1%} at {show_number(place)}" for place, value in points),
            "line": {"color": f"c{color % _NUM_COLORS}", "width": 2},
        })  # fmt: skip
        rows += [(name, show_number(place), f"{value:.1%}") for place, value in points]
    axes = {
        "xaxis": {"range": list(x)}, "yaxis": {"range": [y[0], y[1] * 1.02], "tickformat": ".0%"},
        "showlegend": len(series) > 1,
    }  # fmt: skip
    return _chart(traces, label, description, render("values.html", heads=("curve", label, "share"), rows=rows), axes)


def scatter(points: Sequence[tuple[float, float, int, str]], *, description: str) -> Markup:
    """Return a map of points; each point has x, y, the number of its colour, and the text of its tooltip.

    A map has no table, since its coordinates have no meaning.
    """
    traces = []
    for color in range(_NUM_COLORS):
        if own := [point for point in points if point[2] % _NUM_COLORS == color]:
            traces.append({
                "type": "scatter", "mode": "markers", "x": [one[0] for one in own], "y": [one[1] for one in own],
                "hovertext": _tips(tip for *_, tip in own),
                "marker": {"color": f"c{color}", "size": 8, "opacity": 0.75, "line": {"color": "card", "width": 0.6}},
            })  # fmt: skip
    hidden = {"visible": False}
    return _chart(traces, "", description, Markup(""), {"xaxis": hidden, "yaxis": hidden}, height=_MAP_HEIGHT)


def figure(title: str, chart: Markup, note: str = "") -> Markup:
    """Return a chart with a title above it and a note below it."""
    return Markup("<figure><figcaption>{}</figcaption>{}<p>{}</p></figure>").format(title, chart, escape(note))


def _chart(
    traces: list[dict[str, Any]], label: str, description: str, table: Markup, own: dict[str, Any],
    *, height: int = _HEIGHT,
) -> Markup:  # fmt: skip
    """Return the element in which ``page.js`` draws a chart, followed by its table."""
    line = {"fixedrange": True, "zeroline": False, "automargin": True}
    layout = {
        "height": height, "dragmode": False, "hovermode": "closest", "showlegend": False,
        "margin": {"l": 46, "r": 10, "t": 10, "b": 40}, "paper_bgcolor": "card", "plot_bgcolor": "card",
        "font": {"color": "soft", "size": 12}, "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hoverlabel": {"bgcolor": "card", "bordercolor": "soft", "font": {"color": "ink"}},
    } | own  # fmt: skip
    x_axis = line | {
        "showgrid": False, "linecolor": "soft", "showline": True,
        "title": {"text": _escape_for_plotly(label), "standoff": 6, "font": {"size": 11}},
    }  # fmt: skip
    y_axis = line | {"gridcolor": "rule", "nticks": _MOST_TICKS, "rangemode": "tozero"}
    layout |= {"xaxis": x_axis | own.get("xaxis", {}), "yaxis": y_axis | own.get("yaxis", {})}
    for trace in traces:
        trace["hoverinfo"] = "text"
    plot = msgspec.json.encode({"data": traces, "layout": layout}).decode()
    return Markup('<div class="plot" style="height: {}px" role="img" aria-label="{}" data-plot="{}"></div>{}').format(
        height, description, plot, table
    )


def _tips(texts: Iterable[str]) -> list[str]:
    return [_escape_for_plotly(shorten(text, _LONGEST_TIP)) for text in texts]


def _escape_for_plotly(text: str) -> str:
    """Return text escaped for plotly, which interprets some HTML elements and entities."""
    return str(escape(plain_text(text)))
