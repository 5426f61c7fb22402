"""Sections of charts: what the cuts are like, codebooks in use, sizes of shards and times of stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from markupsafe import Markup

from sharmill.audio.sound import Sound
from sharmill.report.charts import columns, figure, histogram, show_number
from sharmill.report.facts import Facts, StageFacts
from sharmill.report.section import Section, render
from sharmill.shar.histograms import SCALES, Histogram

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
    "loudness_difference": ("Level of speech in contexts above that in their targets", "dB"),
    "peak": ("Loudest sample of targets", "dB of full scale"),
    "clipped": ("Clipping of targets", "share of the samples that are at full scale"),
    "silence": ("Silence in targets", "share of the time, 40 dB below the loud parts"),
    "bandwidth": ("Bandwidth of targets", "kHz, up to which speech is heard"),
}
_OF_AUDIO: Final = frozenset(Sound._fields) | {"context_speech_level", "loudness_difference"}
# Of more ranks the distribution is shown.
_MOST_RANKS: Final = 40

GRID: Final = Markup('<div class="grid2">{}</div>')


def make_contents(facts: Facts) -> Markup | None:
    """Return histograms of the cuts, or None where there is no dataset."""
    if facts.measures is None:
        return None
    charts = []
    for name, (title, label) in _TITLES.items():
        of_audio = name in _OF_AUDIO
        source = facts.sound if of_audio and facts.sound else facts.measures
        if (found := source.histograms.get(name)) is not None and found.counts and not _says_nothing(name, found):
            charts.append(figure(title, *_draw(name, found, label, color=2 if of_audio else 0)))
    of_sound = _origin_of_sound(facts)
    note = f"All charts are of {facts.origin}; those in green are of their audio."
    if of_sound is None:
        note = f"All charts are of {facts.origin}; nothing is known of their audio."
    elif of_sound != facts.origin:
        note = f"Charts in blue are of {facts.origin}; those in green, of audio, of {of_sound}."
    clipped = facts.sound.histograms.get("clipped") if facts.sound else None
    if clipped is not None and _says_nothing("clipped", clipped):
        note += f" No target has more than {SCALES['clipped'].width:.2%} of its samples at full scale."
    return Markup("<p>{}</p>").format(note) + GRID.format(Markup("").join(charts))


def _says_nothing(name: str, found: Histogram) -> bool:
    """Return True for the clipping of audio that has none: a sentence is enough."""
    return name == "clipped" and found.first + len(found.counts) == 1


def _origin_of_sound(facts: Facts) -> str | None:
    """Return a phrase about what the measures of audio are of, or None where there are none."""
    if facts.sound is None:
        return None
    measured = facts.sound.histograms["loudness"].total
    if facts.record is not None and measured == facts.record.num_cuts:
        return "all cuts"
    if facts.sound is facts.measures and measured == facts.sound.num_cuts:
        return facts.origin
    of_sample = facts.sample is not None and facts.sound is facts.sample.measures
    return f"{measured:,} cuts" + (" drawn at random" if of_sample else ", where it is known")


def _draw(name: str, found: Histogram, label: str, color: int) -> tuple[Markup, str]:
    """Return the chart of a histogram, and its median and range in words."""
    scale = SCALES[name]
    together = math.ceil(len(found.counts) / _MOST_BARS)
    padded = np.pad(found.counts, (0, -len(found.counts) % together))
    counts = padded.reshape(-1, together).sum(axis=1).tolist()
    # A few bins alone would look as if they were wide.
    wanted = max(0, (_FEWEST_BARS - len(counts)) // 2)
    before, after = min(wanted, found.first), min(wanted, scale.num_bins - found.first - len(found.counts))
    counts = [0] * before + counts + [0] * after
    # The last bar has fewer bins than the others where the scale ends within it.
    edges = [
        scale.low + min(found.first + (number - before) * together, scale.num_bins) * scale.width
        for number in range(len(counts) + 1)
    ]
    low, median, high = (show_number(found.quantile(share, scale)) for share in (0.05, 0.5, 0.95))
    note = f"Median {median}; nine in ten between {low} and {high} {scale.unit}".rstrip()
    if name == "clipped":
        share = 1 - found.counts[0] / found.total if not found.first else 1.0
        note = f"{share:.1%} of the targets have more than {scale.width:.2%} of their samples at full scale"
    return histogram(edges, counts, label=label, unit=scale.unit, description=f"{note}.", color=color), note


def make_codes(facts: Facts) -> Markup | None:
    """Return the use of the codebooks of each codec, or None where there are no codes."""
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
        charts.append(figure(
            f"{name}: codes in use",
            columns(books, used, label="codebook", description="Share of the codes that occur", show="{:.1%}".format),
            f"Share of {counts.shape[1]:,} codes that occur in {frames}",
        ))  # fmt: skip
        charts.append(figure(
            f"{name}: entropy",
            columns(books, entropy.tolist(), label="codebook", description="Bits per code", show="{:.2f} bit".format),
            f"{entropy.mean():.2f} bit per code on average, of {math.log2(counts.shape[1]):.2f} possible",
        ))  # fmt: skip
    return GRID.format(Markup("").join(charts)) if charts else None


def make_work(facts: Facts) -> Markup | None:
    """Return sizes of shards, and times and rates of stages, by rank."""
    charts = []
    if facts.shards:
        sizes = [sum(file.size for file in shard.fields.values()) / 1e6 for shard in facts.shards]
        charts.append(figure("Size of shards", *_spread(sizes, "MB", "shards")))
        charts.append(figure("Cuts in a shard", *_spread([shard.count for shard in facts.shards], "cuts", "shards")))
    stages = [stage for stage in facts.run.stages if any(stage.seconds_by_rank.values())] if facts.run else []
    ranks = [figure(f"Rate of {stage.name}, by rank", *_rates(stage)) for stage in stages]
    rows = [
        (stage, sum(stage.cost_by_rank.values()), sum(stage.seconds_by_rank.values())) for stage in stages
    ]  # fmt: skip
    return render("work.html", rows=rows, charts=charts, ranks=ranks) if charts or rows else None


def _rates(stage: StageFacts) -> tuple[Markup, str]:
    unit = "records per second" if stage.cost_unit == "records" else "× real time"
    rates = {rank: stage.cost_by_rank[rank] / max(spent, 1e-3) for rank, spent in stage.seconds_by_rank.items()}
    if len(rates) > _MOST_RANKS:
        return _spread(list(rates.values()), unit, "ranks")
    names = [f"rank {rank}" if len(rates) < 6 else str(rank) for rank in rates]
    chart = columns(
        names, list(rates.values()), label="", show=lambda rate: f"{show_number(rate)} {unit}",
        description=f"{stage.name}: {unit} of each rank",
    )  # fmt: skip
    return chart, f"{show_number(min(rates.values()))} to {show_number(max(rates.values()))} {unit}"


def _spread(values: Sequence[float], unit: str, things: str) -> tuple[Markup, str]:
    """Return a histogram of values of which there may be any number, and their range in words."""
    counts, edges = np.histogram(values, bins=min(_MOST_BARS, max(4, math.isqrt(len(values)))))
    low, median, high = np.quantile(values, (0, 0.5, 1)).tolist()
    note = f"{len(values):,} {things}: median {show_number(median)}, {show_number(low)} to {show_number(high)} {unit}"
    return histogram(edges.tolist(), counts.tolist(), label=unit, unit=unit, description=f"{note}."), note


CONTENTS = Section("contents", "What the cuts are like", 30, make_contents)
CODES = Section("codes", "Codebooks", 50, make_codes)
WORK = Section("work", "Shards and stages", 60, make_work)
