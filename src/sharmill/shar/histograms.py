"""Mergeable histograms of measures of cuts, such as duration; the stage ``write`` stores them in its commit records.

The report of a run reads them from the commit records. Without a run directory, it computes them from a sample of
shards.
"""

import base64
import heapq
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np

from sharmill.audio.sound import Sound
from sharmill.errors import DamagedShard
from sharmill.files.stored import NOT_JSON
from sharmill.manifest import CLIPPED_KEYS

_KEPT_EXTREMES: Final = 4
# The maximum size of unpacked measures in bytes. They usually take a few kilobytes, but a damaged text could unpack to
# gigabytes.
_MAX_BYTES: Final = 1 << 20
# Larger numbers are not measures; JSON allows numbers of 400 digits.
MAX_VALUE: Final = 1e12


class Scale(msgspec.Struct, frozen=True):
    """Bins of equal width; the first and the last bin also count values beyond them."""

    low: float
    high: float
    num_bins: int
    unit: str

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.num_bins


SCALES: Final = {
    "duration": Scale(0.0, 60.0, 120, "s"),
    "context_duration": Scale(0.0, 60.0, 120, "s"),
    "similarity": Scale(-1.0, 1.0, 200, ""),
    "text_length": Scale(0.0, 600.0, 120, "characters"),
    "character_rate": Scale(0.0, 40.0, 80, "characters per second"),
    "loudness": Scale(-80.0, 0.0, 80, "dB"),
    "speech_level": Scale(-80.0, 0.0, 80, "dB"),
    "context_speech_level": Scale(-80.0, 0.0, 80, "dB"),
    "loudness_difference": Scale(-30.0, 30.0, 60, "dB"),
    "peak": Scale(-40.0, 0.0, 80, "dB"),
    "clipped": Scale(0.0, 0.02, 100, ""),
    **dict.fromkeys(CLIPPED_KEYS.values(), Scale(0.0, 0.02, 100, "")),
    "bandwidth": Scale(0.0, 24.0, 96, "kHz"),
    "silence": Scale(0.0, 1.0, 50, ""),
}
# Measures by which cuts are ranked; the cuts with the highest values are worth listening to.
EXTREMES: Final[dict[str, Callable[[dict[str, float]], float | None]]] = {
    "lowest similarity": lambda values: None if "similarity" not in values else -values["similarity"],
    "longest": lambda values: values.get("duration"),
    "highest character rate": lambda values: values.get("character_rate"),
    "loudest difference": lambda values: (
        abs(values["loudness_difference"]) if "loudness_difference" in values else None
    ),
}


class Histogram(msgspec.Struct):
    """The number of values in each bin of a scale. ``counts`` starts at bin ``first``; all other bins are empty."""

    first: int = 0
    counts: list[int] = []

    @classmethod
    def from_values(cls, values: Iterable[float], scale: Scale) -> Self:
        """Return the histogram of values, ignoring NaN."""
        array = np.fromiter(values, np.float64)
        array = array[~np.isnan(array)]
        if not len(array):
            return cls()
        bins = np.clip((array - scale.low) / scale.width, 0, scale.num_bins - 1).astype(np.int64)
        first = int(bins.min())
        return cls(first, np.bincount(bins - first).tolist())

    def add(self, other: Self) -> None:
        """Add the counts of another histogram with the same scale."""
        if not other.counts:
            return
        if not self.counts:
            self.first = other.first
        # Add in place and without arrays: reports add up 100,000 histograms of about ten bins each.
        if other.first < self.first:
            self.counts[:0] = [0] * (self.first - other.first)
            self.first = other.first
        begin = other.first - self.first
        self.counts += [0] * (begin + len(other.counts) - len(self.counts))
        for number, count in enumerate(other.counts, begin):
            self.counts[number] += count

    @property
    def total(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float, scale: Scale) -> float:
        """Return the value below which the given share of all values lies, interpolated within its bin.

        >>> Histogram.from_values([1.0, 2.0, 3.0], SCALES["duration"]).quantile(0.5, SCALES["duration"])
        2.25
        """
        below = np.cumsum(self.counts)
        index = int(np.searchsorted(below, share * below[-1]))
        inside = (share * below[-1] - (below[index] - self.counts[index])) / self.counts[index]
        return float(scale.low + (self.first + index + inside) * scale.width)


class CutMeasures(msgspec.Struct):
    """Histograms of the measures of cuts, and the cuts with the most extreme measures.

    For each ranking in ``EXTREMES``, ``extremes`` lists the highest values, each with the index of the shard and the
    index of the cut in the shard.
    """

    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)
    extremes: dict[str, list[tuple[float, int, int]]] = msgspec.field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, float]], shard: int) -> Self:
        """Return the measures of the cuts of a shard; each row maps names of ``SCALES`` to a cut's values."""
        measures = cls({
            name: Histogram.from_values((row[name] for row in rows if name in row), SCALES[name])
            for name in sorted({name for row in rows for name in row})
        })  # fmt: skip
        for name, of_values in EXTREMES.items():
            found = [(value, shard, n) for n, row in enumerate(rows) if (value := of_values(row)) is not None]
            measures.extremes[name] = heapq.nlargest(_KEPT_EXTREMES, found)
        return measures

    @property
    def has_sound(self) -> bool:
        """True if there are measures of audio."""
        return "loudness" in self.histograms

    @property
    def num_cuts(self) -> int:
        """The number of cuts, which equals the number of durations, since every cut has one."""
        return self.histograms["duration"].total if "duration" in self.histograms else 0

    def add(self, other: Self) -> None:
        """Add the measures of other shards."""
        for name, histogram in other.histograms.items():
            self.histograms.setdefault(name, Histogram()).add(histogram)
        for name, found in other.extremes.items():
            self.extremes[name] = heapq.nlargest(_KEPT_EXTREMES, [*self.extremes.get(name, []), *found])

    def pack(self) -> str:
        """Return the measures as a short text, since a run may have 100,000 commit records, each with such a text."""
        return base64.b64encode(zlib.compress(msgspec.msgpack.encode(self), 6)).decode()

    @classmethod
    def unpack(cls, text: str) -> Self:
        """Return the measures from a text made by ``pack``.

        Raises:
            DamagedShard: the text was not made by ``pack``, or is damaged.
        """
        try:
            measures = msgspec.msgpack.decode(
                zlib.decompressobj().decompress(base64.b64decode(text), _MAX_BYTES), type=cls
            )
        except (TypeError, ValueError, zlib.error, *NOT_JSON) as error:
            raise DamagedShard(f"corrupt shard statistics: {error}") from error
        for name, found in measures.histograms.items():
            if name not in SCALES or not 0 <= found.first <= SCALES[name].num_bins - len(found.counts):
                raise DamagedShard("corrupt shard statistics: a histogram is outside its scale")
        for name, places in measures.extremes.items():
            if name not in EXTREMES or any(not math.isfinite(value) or min(place) < 0 for value, *place in places):
                raise DamagedShard("corrupt shard statistics: min/max does not occur in any cut")
        return measures


def supervision_of(cut: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first supervision of a cut and its custom mapping, each empty if missing or malformed."""
    supervisions = cut.get("supervisions")
    supervision = supervisions[0] if isinstance(supervisions, list) and supervisions else None
    supervision = supervision if isinstance(supervision, dict) else {}
    custom = supervision.get("custom")
    return supervision, custom if isinstance(custom, dict) else {}


def cut_values(cut: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures that a cut alone determines, keyed by their names in ``SCALES``; missing ones are omitted."""
    supervision, custom = supervision_of(cut)
    found = {
        "duration": cut.get("duration"),
        "context_duration": custom.get("context_audio_duration"),
        "similarity": custom.get("context_speaker_similarity"),
        **{name: custom.get(name) for name in CLIPPED_KEYS.values()},
    }
    values = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and abs(value) < MAX_VALUE
    }
    if isinstance(text := supervision.get("text"), str) and text:
        values["text_length"] = float(len(text))
        if values.get("duration", 0.0) > 0:
            values["character_rate"] = len(text) / values["duration"]
    return values


def sound_values(target: Sound | None, context: Sound | None) -> dict[str, float]:
    """Return measures of the audio of a cut, by their names in ``SCALES``; unknown ones are left out."""
    values = {} if target is None else target._asdict()
    if context is not None:
        values["context_speech_level"] = context.speech_level
        if target is not None:
            values["loudness_difference"] = context.speech_level - target.speech_level
    return values
