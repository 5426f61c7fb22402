"""Sections with record counts and charts: input to output, cuts, speakers, codebooks, stages, and the dataset card."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from sharmill.audio.sound import Sound
from sharmill.engine.stage import is_main
from sharmill.engine.view import StageView
from sharmill.errors import REASONS, REMEDIES
from sharmill.report.charts import columns, curves, figure, histogram, scatter
from sharmill.report.facts import Facts
from sharmill.report.section import Section, render
from sharmill.report.text import show_number
from sharmill.shar.histograms import SCALES, Histogram

_MOST_ROWS: Final = 12
# Upper bounds of the bins for the number of times a clip is used as context.
_USES: Final = (1, 2, 3, 4, 5, 10, 20, 50, 100)
_CURVE_POINTS: Final = 60
_BINS_PER_POINT: Final = 4
_MOST_BARS: Final = 48
_FEWEST_BARS: Final = 12
_TITLES: Final = {
    "duration": ("Length of targets", "seconds"),
    "context_duration": ("Length of contexts", "seconds"),
    "similarity": ("Similarity of the chosen contexts", "cosine"),
    "text_length": ("Length of texts", "characters"),
    "character_rate": ("Rate of speech", "characters per second"),
    "loudness": ("Level of targets", "dB of full scale, RMS"),
    "speech_level": ("Level of speech in targets", "dB of full scale, RMS of all but silence"),
    "context_speech_level": ("Level of speech in contexts", "dB of full scale, RMS of all but silence"),
    "loudness_difference": ("Speech level of contexts relative to their targets", "dB"),
    "peak": ("Loudest sample of targets", "dB of full scale"),
    "clipped": ("Clipping of targets", "share of samples at full scale"),
    "clipped_in_writing": ("Targets clipped in writing", "share of samples that exceeded full scale"),
    "context_clipped_in_writing": ("Contexts clipped in writing", "share of samples that exceeded full scale"),
    "silence": ("Silence in targets", "share of the time, 40 dB below the loud parts"),
    "bandwidth": ("Bandwidth of targets", "kHz, highest frequency of speech"),
}
_OF_AUDIO: Final = frozenset(Sound._fields) | {"context_speech_level", "loudness_difference"}
# Maximum number of ranks to show individually; if there are more, their distribution is shown.
_MOST_RANKS: Final = 40
_GRID: Final = Markup('<div class="grid2">{}</div>')


def _make_funnel(facts: Facts) -> Markup | None:
    """Return the record counts of the stages, with examples of rejects; None without a run directory."""
    if facts.run is None:
        return None
    stages = [stage for stage in facts.run.stages if stage.counts == "records"]
    rejects = [
        (stage.view.name, reason, count, stage.examples.get(reason, []))
        for stage in stages if stage.totals
        for reason, count in sorted(stage.totals.rejects.items(), key=lambda one: (-one[1], one[0]))
    ]  # fmt: skip
    sums = [
        (title, *_largest(facts.run.stats[key]))
        for key, title in (("by_dataset", "Sources"), ("by_language", "Languages"), ("by_speaker", "Speakers"))
        if facts.run.stats
    ]
    return render(
        "funnel.html", steps=[(name, list(parts)) for name, parts in groupby(stages, key=attrgetter("view.name"))],
        num_in=next((stage.totals.num_in for stage in stages if stage.totals), 0), rejects=rejects, reasons=REASONS,
        remedies=REMEDIES, sums=sums,
    )  # fmt: skip


def _largest(rows: dict[str, dict[str, Any]]) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Return the rows with the most hours, and the number of remaining rows."""
    kept = [(name, row) for name, row in rows.items() if row["records_in"]]
    kept.sort(key=lambda one: (-one[1]["hours_out"], one[0]))
    return kept[:_MOST_ROWS], max(0, len(kept) - _MOST_ROWS)


def _make_card(facts: Facts) -> Markup:
    """Return the dataset card: its properties, models, versions and devices."""
    stages = facts.run.stages if facts.run else []
    versions: dict[str, Any] = {}
    for found in [stage.identity.get("versions") for stage in stages]:
        versions |= found if isinstance(found, dict) else {}
    files = [file for shard in facts.shards for file in shard.fields.values()]
    return render(
        "card.html", facts=facts, record=facts.record, versions=sorted(versions.items()),
        models=[
            (stage.view.name, stage.identity[key])
            for stage in stages for key in ("encoder", "codec") if key in stage.identity
        ],
        devices=sorted({device for stage in stages if stage.view.pace for device in stage.view.pace.devices}),
        num_files=len(files),
        num_bytes=sum(file.size for file in files),
    )  # fmt: skip


def _make_contents(facts: Facts) -> Markup | None:
    """Return histograms of the cuts; None without a dataset."""
    if facts.measures is None:
        return None
    charts = []
    for name, (title, label) in _TITLES.items():
        of_audio = name in _OF_AUDIO
        found = (facts.sound if of_audio and facts.sound else facts.measures).histograms.get(name)
        if found is not None and found.counts:
            charts.append(figure(title, *_draw(name, found, label, color=2 if of_audio else 0)))
    num_heard = facts.sound.histograms["loudness"].total if facts.sound else 0
    is_drawn = facts.sample is not None and facts.sound is facts.sample.measures and num_heard < facts.measures.num_cuts
    drawn = " randomly drawn" if is_drawn else ""
    note = f"Blue charts show {facts.origin}; green charts show the audio of {num_heard:,}{drawn} cuts."
    return Markup("<p>{}</p>").format(note) + _GRID.format(Markup("").join(charts))


def _draw(name: str, found: Histogram, label: str, color: int) -> tuple[Markup, str]:
    """Return the chart of a histogram, and a note with its median and range."""
    scale = SCALES[name]
    together = math.ceil(len(found.counts) / _MOST_BARS)
    first, counts = _take_together(found, together)
    # If there are only a few bins, add empty bins around them; otherwise, the bars would be too wide.
    wanted = max(0, (_FEWEST_BARS - len(counts)) // 2)
    before, after = min(wanted, first), min(wanted, math.ceil(scale.num_bins / together) - first - len(counts))
    counts = [0] * before + counts + [0] * after
    # The last bar covers fewer bins if the scale ends within it.
    edges = [
        scale.low + min((first - before + number) * together, scale.num_bins) * scale.width
        for number in range(len(counts) + 1)
    ]
    low, median, high = (show_number(found.quantile(share, scale)) for share in (0.05, 0.5, 0.95))
    note = f"Median {median}; nine in ten between {low} and {high} {scale.unit}".rstrip()
    if name.endswith("clipped_in_writing"):
        note = f"Samples were clipped in {found.total:,} cuts. {note}"
    if name == "clipped":
        share = 1 - found.counts[0] / found.total if not found.first else 1.0
        note = f"{share:.1%} of the targets have more than {scale.width:.2%} of their samples at full scale"
    return histogram(edges, counts, label=label, unit=scale.unit, description=f"{note}.", color=color), note


def _make_codes(facts: Facts) -> Markup | None:
    """Return charts of how much each codec uses its codebooks; None without codes."""
    charts = []
    of_all = facts.run.code_counts if facts.run else {}
    for name, counts in ((facts.sample.code_counts if facts.sample else {}) | of_all).items():
        total = counts.sum(axis=1)
        if not total.any():
            continue
        books = [str(number + 1) for number in range(len(counts))]
        used = (np.count_nonzero(counts, axis=1) / counts.shape[1]).tolist()
        shares = counts / np.maximum(total, 1)[:, None]
        entropy = -(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=1)
        frames = f"{int(total[0]):,} frames, {'each segment once' if name in of_all else 'a sample of the targets'}"
        charts += [
            figure(
                f"{name}: codes in use",
                columns(books, used, label="codebook", description="Share of codes that occur",
                        show="{:.1%}".format),
                f"Share of the {counts.shape[1]:,} codes that occur in {frames}",
            ),
            figure(
                f"{name}: entropy",
                columns(books, entropy.tolist(), label="codebook", description="Bits per code",
                        show="{:.2f} bit".format),
                f"{entropy.mean():.2f} bits per code on average; the maximum is {math.log2(counts.shape[1]):.2f}",
            ),
        ]  # fmt: skip
    return _GRID.format(Markup("").join(charts)) if charts else None


def _make_work(facts: Facts) -> Markup | None:
    """Return charts of shard sizes and of the rates of ranks, and the times of stages; None without any of these."""
    charts = []
    if facts.shards:
        sizes = [sum(file.size for file in shard.fields.values()) / 1e6 for shard in facts.shards]
        charts = [
            figure("Size of shards", *_spread(sizes, "MB", "shards")),
            figure("Cuts in a shard", *_spread([shard.count for shard in facts.shards], "cuts", "shards")),
        ]
    stages = [stage for stage in facts.run.stages if is_main(stage.kind)] if facts.run else []
    views = [(stage.view, stage.view.pace) for stage in stages if stage.view.pace]
    ranks = [figure(f"Rate of {view.name}, by rank", *_rates(view, pace.rates)) for view, pace in views]
    for view, pace in views:
        if pace.on_gpu and pace.worked:
            shares = {rank: 100 * share for rank, share in pace.worked.items()}
            chart, note = _by_rank(shares, "%", f"{view.name}: share of the time in which the GPU of each rank is busy")
            ranks.append(figure(f"GPU utilization of {view.name}, by rank", chart, pace.bottleneck or note))
    return render("work.html", rows=views, charts=charts, ranks=ranks) if charts or views else None


def _rates(view: StageView, rates: dict[int, float]) -> tuple[Markup, str]:
    unit = "records per second" if view.cost_unit == "records" else "× real time"
    return _by_rank(rates, unit, f"{view.name}: {unit} of each rank")


def _by_rank(values: dict[int, float], unit: str, description: str) -> tuple[Markup, str]:
    """Return a chart with a column for each rank (a histogram if there are many ranks), and a note with the range."""
    if len(values) > _MOST_RANKS:
        return _spread(list(values.values()), unit, "ranks")
    names = [f"rank {rank}" if len(values) < 6 else str(rank) for rank in values]
    chart = columns(
        names, list(values.values()), label="", show=lambda value: f"{show_number(value)} {unit}",
        description=description,
    )  # fmt: skip
    return chart, f"{show_number(min(values.values()))} to {show_number(max(values.values()))} {unit}"


def _spread(values: Sequence[float], unit: str, things: str) -> tuple[Markup, str]:
    """Return a histogram of values, and a note with their median and range."""
    counts, edges = np.histogram(values, bins=min(_MOST_BARS, max(4, math.isqrt(len(values)))))
    low, median, high = np.quantile(values, (0, 0.5, 1)).tolist()
    note = f"{len(values):,} {things}: median {show_number(median)}, {show_number(low)} to {show_number(high)} {unit}"
    return histogram(edges.tolist(), counts.tolist(), label=unit, unit=unit, description=f"{note}."), note


def _make_voices(facts: Facts) -> Markup | None:
    """Return the charts of speakers and contexts; None if no data is available."""
    charts = [*_speakers(facts), *_context_uses(facts)]
    if facts.run is not None and len(facts.run.voices) > 2:
        charts += [_similarities(facts, facts.run.voices), _map(facts.run.voices)]
    return Markup('<div class="grid2 two">{}</div>').format(Markup("").join(charts)) if charts else None


def _speakers(facts: Facts) -> Iterator[Markup]:
    """Yield the Lorenz curve of the speakers' hours, if there are at least two speakers."""
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
    note = (
        f"{len(shares):,} speakers; the largest tenth has {top:.0%} of the hours; Gini coefficient {gini:.2f}; based "
        f"on {origin}"
    )
    yield figure(
        "Distribution of hours over speakers",
        curves(
            [("speakers, smallest first", points), ("equal speakers", [(0, 0), (1, 1)])], x=(0, 1), y=(0, 1),
            label="share of the speakers", description=f"Lorenz curve: {note}.",
        ),
        note,
    )  # fmt: skip


def _context_uses(facts: Facts) -> Iterator[Markup]:
    """Yield the chart of how often each clip is used as context, if there are contexts."""
    if facts.run is not None and facts.run.context_uses is not None:
        uses, origin = facts.run.context_uses, facts.origin_of_run
    else:
        uses = np.array(
            [len(places) for places in facts.sample.context_uses.values()] if facts.sample else [], np.int64
        )
        origin = facts.sample.describe() if facts.sample else ""
    if not len(uses):
        return
    ends = np.searchsorted(_USES, uses)
    names = [str(end) if end == before + 1 else f"{before + 1}–{end}" for before, end in zip((0, *_USES), _USES)]  # noqa: B905
    names.append(f"over {_USES[-1]}")
    counts = np.bincount(ends, minlength=len(names))[: int(ends.max()) + 1].tolist()
    note = (
        f"{len(uses):,} clips are used as context, {uses.mean():.1f} times on average and up to {uses.max():,} times; "
        f"based on {origin}"
    )
    yield figure(
        "Uses of a clip as context",
        columns(names[: len(counts)], counts, label="times", description=f"{note}.", show="{:,} clips".format),
        note,
    )  # fmt: skip


def _similarities(facts: Facts, voices: Sequence[tuple[str, np.ndarray]]) -> Markup:
    """Return the distributions of similarity within groups, across groups, and for the chosen contexts, as curves."""
    vectors = np.stack([vector for _, vector in voices])
    groups = np.unique([group for group, _ in voices], return_inverse=True)[1]
    first, second = np.triu_indices(len(vectors), 1)
    similarity = (vectors @ vectors.T)[first, second]
    same = groups[first] == groups[second]
    found = {"same group": Histogram.from_values(similarity[same], SCALES["similarity"]),
             "other groups": Histogram.from_values(similarity[~same], SCALES["similarity"])}  # fmt: skip
    if facts.measures is not None and "similarity" in facts.measures.histograms:
        found["chosen contexts"] = facts.measures.histograms["similarity"]
    series = [(name, _density(one)) for name, one in found.items() if one.counts]
    points, scale = [point for _, curve in series for point in curve], SCALES["similarity"]
    medians = ", ".join(f"{name} {one.quantile(0.5, scale):.2f}" for name, one in found.items() if one.counts)
    note = f"Medians: {medians}; based on pairs of {len(vectors):,} sampled utterances"
    return figure(
        "Similarity within and across groups",
        curves(
            series, x=(min(x for x, _ in points), 1.0), y=(0.0, max(y for _, y in points)), label="cosine",
            description=f"{note}.",
        ),
        note,
    )  # fmt: skip


def _density(found: Histogram) -> list[tuple[float, float]]:
    """Return a histogram as the points of a curve: the centers and shares of wide bins."""
    scale = SCALES["similarity"]
    first, counts = _take_together(found, _BINS_PER_POINT)
    width = scale.width * _BINS_PER_POINT
    centers = scale.low + width * (first - 0.5 + np.arange(len(counts) + 2))
    return list(zip(centers.tolist(), (np.pad(counts, 1) / sum(counts)).tolist(), strict=True))


def _take_together(found: Histogram, together: int) -> tuple[int, list[int]]:
    """Merge bins in groups of ``together``; return the number of the first merged bin, and the counts from there on."""
    before, after = found.first % together, -(found.first + len(found.counts)) % together
    counts = np.pad(found.counts, (before, after)).reshape(-1, together).sum(axis=1)
    return found.first // together, counts.tolist()


def _map(voices: Sequence[tuple[str, np.ndarray]]) -> Markup:
    """Return a map of the voices, projected onto their two principal components."""
    vectors = np.stack([vector for _, vector in voices])
    centered = vectors - vectors.mean(axis=0)
    _, strengths, directions = np.linalg.svd(centered, full_matrices=False)
    # The sign of a component is arbitrary: make its largest element positive, so that all machines draw the same map.
    signs = np.sign(directions[np.arange(2), np.abs(directions[:2]).argmax(axis=1)])
    places = centered @ (directions[:2] * signs[:, None]).T
    shown = float((strengths[:2] ** 2).sum() / max(float((strengths**2).sum()), 1e-9))
    largest = Counter(group for group, _ in voices)
    color = {group: number for number, group in enumerate(sorted(largest))}
    points = [(float(x), float(y), color[group], group) for (x, y), (group, _) in zip(places, voices, strict=True)]
    note = (
        f"{len(points):,} utterances of {len(largest):,} groups, projected onto two principal components with "
        f"{shown:.0%} of the variance; with more than eight groups, several groups share a colour"
    )
    return figure("Map of the voices", scatter(points, description=f"{note}."), note)


FUNNEL = Section("funnel", "From input to output", 10, _make_funnel)
CONTENTS = Section("contents", "Properties of the cuts", 30, _make_contents)
VOICES = Section("voices", "Speakers and contexts", 40, _make_voices)
CODES = Section("codes", "Codebooks", 50, _make_codes)
WORK = Section("work", "Shards and stages", 60, _make_work)
CARD = Section("card", "Dataset card", 90, _make_card)
