"""The section of speakers and contexts: how even the speakers are, how often a clip is a context, a map of voices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from markupsafe import Markup

from sharmill.report.charts import columns, curves, figure, scatter
from sharmill.report.facts import Facts
from sharmill.report.section import Section
from sharmill.shar.histograms import SCALES, Histogram

# Upper ends of how often a clip serves as context.
_USES: Final = (1, 2, 3, 4, 5, 10, 20, 50, 100)
_CURVE_POINTS: Final = 60
_POINTS_PER_CURVE_BIN: Final = 4


def make_voices(facts: Facts) -> Markup | None:
    """Return the charts of speakers and contexts, or None where nothing is known of them."""
    charts = [*_speakers(facts), *_context_uses(facts)]
    if facts.run is not None and len(facts.run.voices) > 2:
        charts += [_similarities(facts, facts.run.voices), _map(facts.run.voices)]
    return Markup('<div class="grid2 two">{}</div>').format(Markup("").join(charts)) if charts else None


def _speakers(facts: Facts) -> Iterator[Markup]:
    """Yield the Lorenz curve of the speakers' hours."""
    if facts.run is not None and facts.run.stats:
        hours = [row["hours_out"] for row in facts.run.stats["by_speaker"].values()]
        origin = "all records that prepare kept"
    else:
        hours, origin = list(facts.sample.speakers.values()) if facts.sample else [], facts.origin
    shares = np.sort([value for value in hours if value > 0])
    if len(shares) < 2:
        return
    sums = np.concatenate([[0.0], np.cumsum(shares)]) / shares.sum()
    x = np.linspace(0, 1, len(sums))
    gini = 1 - 2 * float(np.trapezoid(sums, x))
    shown = np.unique(np.linspace(0, len(sums) - 1, _CURVE_POINTS).astype(int))
    points = list(zip(x[shown].tolist(), sums[shown].tolist(), strict=True))
    top = 1 - float(np.interp(0.9, x, sums))
    note = f"{len(shares):,} speakers; the largest tenth has {top:.0%} of the hours; Gini {gini:.2f}; of {origin}"
    yield figure(
        "How even the speakers are",
        curves(
            [("speakers, from small to large", points), ("all alike", [(0, 0), (1, 1)])], x=(0, 1), y=(0, 1),
            label="share of the speakers", description=f"Lorenz curve: {note}.",
        ),
        note,
    )  # fmt: skip


def _context_uses(facts: Facts) -> Iterator[Markup]:
    """Yield how often a clip serves as context."""
    if facts.run is not None and facts.run.context_uses is not None:
        uses, origin = facts.run.context_uses, facts.origin_of_run
    else:
        uses = np.array(list(facts.sample.context_uses.values()) if facts.sample else [], np.int64)
        origin = facts.sample.describe() if facts.sample else ""
    if not len(uses):
        return
    ends = np.searchsorted(_USES, uses)
    names = [str(end) if end == before + 1 else f"{before + 1}–{end}" for before, end in zip((0, *_USES), _USES)]  # noqa: B905
    names.append(f"over {_USES[-1]}")
    counts = np.bincount(ends, minlength=len(names))[: int(ends.max()) + 1].tolist()
    note = (
        f"{len(uses):,} clips are contexts, {uses.mean():.1f} times on average, one {uses.max():,} times; of {origin}"
    )
    yield figure(
        "How often one clip is a context",
        columns(names[: len(counts)], counts, label="times", description=f"{note}.", show="{:,} clips".format),
        note,
    )  # fmt: skip


def _similarities(facts: Facts, voices: Sequence[tuple[str, np.ndarray]]) -> Markup:
    """Return curves of the similarities within groups, across groups, and of the contexts that were chosen."""
    vectors = np.stack([vector for _, vector in voices])
    groups = np.unique([group for group, _ in voices], return_inverse=True)[1]
    first, second = np.triu_indices(len(vectors), 1)
    similarity = (vectors @ vectors.T)[first, second]
    same = groups[first] == groups[second]
    found = {"same group": Histogram.of(similarity[same], SCALES["similarity"]),
             "other groups": Histogram.of(similarity[~same], SCALES["similarity"])}  # fmt: skip
    if facts.measures is not None and "similarity" in facts.measures.histograms:
        found["chosen contexts"] = facts.measures.histograms["similarity"]
    series = [(name, _density(one)) for name, one in found.items() if one.counts]
    points = [point for _, curve in series for point in curve]
    scale = SCALES["similarity"]
    medians = ", ".join(f"{name} {one.quantile(0.5, scale):.2f}" for name, one in found.items() if one.counts)
    note = f"Medians: {medians}; pairs of {len(vectors):,} sampled utterances"
    return figure(
        "Similarity within and across groups",
        curves(
            series, x=(min(x for x, _ in points), 1.0), y=(0.0, max(y for _, y in points)), label="cosine",
            description=f"{note}.",
        ),
        note,
    )  # fmt: skip


def _density(found: Histogram) -> list[tuple[float, float]]:
    """Return the shares of wide bins as points of a curve."""
    scale = SCALES["similarity"]
    begin = found.first % _POINTS_PER_CURVE_BIN
    counts = np.pad(found.counts, (begin, 0))
    counts = np.pad(counts, (0, -len(counts) % _POINTS_PER_CURVE_BIN)).reshape(-1, _POINTS_PER_CURVE_BIN).sum(axis=1)
    width = scale.width * _POINTS_PER_CURVE_BIN
    start = scale.low + (found.first - begin) * scale.width
    shares = counts / counts.sum()
    ends = [(start - width / 2, 0.0), *((start + (n + 0.5) * width, float(share)) for n, share in enumerate(shares))]
    return [*ends, (start + (len(shares) + 0.5) * width, 0.0)]


def _map(voices: Sequence[tuple[str, np.ndarray]]) -> Markup:
    """Return the voices projected on the two directions in which they differ most."""
    vectors = np.stack([vector for _, vector in voices])
    centered = vectors - vectors.mean(axis=0)
    _, strengths, directions = np.linalg.svd(centered, full_matrices=False)
    # A direction has no sign of its own: the largest part is positive on every machine.
    signs = np.sign(directions[np.arange(2), np.abs(directions[:2]).argmax(axis=1)])
    places = centered @ (directions[:2] * signs[:, None]).T
    shown = float((strengths[:2] ** 2).sum() / max(float((strengths**2).sum()), 1e-9))
    largest = Counter(group for group, _ in voices)
    color = {group: number for number, group in enumerate(sorted(largest))}
    points = [(float(x), float(y), color[group], group) for (x, y), (group, _) in zip(places, voices, strict=True)]
    note = (
        f"{len(points):,} utterances of {len(largest):,} groups on their two main components, which have {shown:.0%} "
        "of the variance; a colour serves several groups where there are more than eight"
    )
    return figure("Map of the voices", scatter(points, description=f"{note}."), note)


SECTION = Section("voices", "Speakers and contexts", 40, make_voices)
