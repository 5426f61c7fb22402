"""Section of the report about fields of values, such as scores: distributions, thresholds, and players of the cuts with
the lowest and highest values.
"""

from typing import Final

import numpy as np
from markupsafe import Markup

from sharmill.report.charts import figure, histogram
from sharmill.report.facts import Facts
from sharmill.report.listening import make_players
from sharmill.report.section import Section, render
from sharmill.report.text import show_number
from sharmill.shar.histograms import supervision_of

_BARS: Final = 40
KEPT_PERCENT: Final = (99, 95, 90)


def make_scores(facts: Facts) -> Markup | None:
    """Return the section; None if the dataset has no field of values."""
    sample = facts.sample
    columns = {} if sample is None else {name: found for name, found in sorted(sample.values.items()) if found}
    if sample is None or not columns:
        return None
    charts, rows, reasons = [], list[tuple[str, list[float]]](), dict[tuple[int, int], list[str]]()
    for name, found in columns.items():
        values = np.array([value for value, _ in found])
        note = f"median {show_number(float(np.median(values)))}, {len(values):,} values"
        counts, edges = np.histogram(values, _BARS)
        chart = histogram(edges.tolist(), counts.tolist(), label=name, unit="", description=f"{name}: {note}.", color=4)
        charts.append(figure(name, chart, note))
        rows.append((name, thresholds(values)))
        for word, (value, place) in (("lowest", min(found)), ("highest", max(found))):
            reasons.setdefault(place, []).append(f"{word} {name}: {show_number(value)}")
    clips = [(stored.cut, reasons[stored.shard, stored.number], clip) for stored, clip in make_players(facts, reasons)]
    return render(
        "scores.html", sample=sample, charts=charts, percent=KEPT_PERCENT, rows=rows, clips=clips,
        left_out=len(reasons) - len(clips), supervision_of=supervision_of,
    )  # fmt: skip


def thresholds(values: np.ndarray) -> list[float]:
    """Return the largest minimums that keep 99, 95 and 90 % of the values, then the smallest maximums that do.

    >>> thresholds(np.arange(1.0, 201.0))
    [3.0, 11.0, 21.0, 198.0, 190.0, 180.0]
    """
    lowest = np.quantile(values, [1 - share / 100 for share in KEPT_PERCENT], method="higher")
    highest = np.quantile(values, [share / 100 for share in KEPT_PERCENT], method="lower")
    return [*lowest.tolist(), *highest.tolist()]


SCORES = Section("scores", "Scores", 35, make_scores)
