"""The pilot section of a run's report page."""

from typing import Final

import numpy as np
from markupsafe import Markup

from sharmill.files.stored import read_record
from sharmill.pilot.calibration import Calibration
from sharmill.report.charts import curves, figure, histogram
from sharmill.report.facts import Facts
from sharmill.report.section import Section

_GRID: Final = Markup('<div class="grid2">{}</div>')


def _make_pilot(facts: Facts) -> Markup | None:
    """Return the results of ``sharmill calibrate``, or None if it was not run or the dataset has no contexts."""
    found = read_record(facts.run.run_dir.calibration, Calibration) if facts.run is not None else None
    if found is None or (advice := found.advice) is None or found.similarities is None:
        return None
    contexts = [(one.min_similarity, one.context_share) for one in advice.thresholds]
    wrong = [(one.min_similarity, one.wrong_share) for one in advice.thresholds if one.wrong_share is not None]
    most = [(one.min_similarity, one.wrong_bound) for one in advice.thresholds if one.wrong_bound is not None]
    series = [("records with a context", contexts), ("contexts of another speaker", wrong)]
    chart = curves(
        [*series, ("upper bound (95 %)", most)] if most else series, x=(0, 1), y=(0, 1),
        label="match.min_similarity", description="Shares of records by threshold",
    )  # fmt: skip
    sentence = advice.reason
    if advice.recommended is not None:
        sentence = f"Advice: match.min_similarity={advice.recommended.min_similarity:g}: {sentence}"
    figures = [figure("Contexts by threshold", chart, f"{sentence}.")]
    edges = np.linspace(-1, 1, len(found.similarities.within_groups) + 1).tolist()
    for color, (title, counts) in enumerate((
        ("Similarity within groups", found.similarities.within_groups),
        ("Similarity across groups", found.similarities.across_groups),
    )):  # fmt: skip
        chart = histogram(edges, counts, label="cosine", unit="", description=title, color=color)
        figures.append(figure(title, chart, f"{sum(counts):,} pairs of the pilot's utterances"))
    drawn = f"{found.num_drawn:,} of {found.num_records:,} records in {found.num_groups:,} speaker groups"
    return Markup("<p>Pilot before the run: {}.</p>").format(drawn) + _GRID.format(Markup("").join(figures))


PILOT = Section("pilot", "Pilot", 35, _make_pilot)
