"""The counts of records and hours in ``stats.json``, by dataset, language and speaker."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from sharmill.engine.unit import Totals
from sharmill.errors import RejectRecord
from sharmill.manifest import DURATION_FROM_HEADER, Utterance, parse_speaker_tag
from sharmill.prepare.check import MAX_SECONDS
from sharmill.sources.speakers import is_missing
from sharmill.stages.speaker_key import is_doubtful

_DIMENSIONS: Final = ("dataset", "language", "speaker")


class HoursTable(msgspec.Struct, forbid_unknown_fields=True):
    """Counts of records and seconds, and of the origins of speaker tags and durations, for one or several parts.

    Attributes:
        sums: for each dimension and value, a list of records in, records out, seconds in, and seconds out; for origins
            and notes, a list with one count.
    """

    sums: dict[str, dict[str, list[float]]] = {}

    def count_kept(self, utterance: Utterance, tag_from: str) -> None:
        """Count a record that passed the checks; ``tag_from`` is the origin of its speaker tag."""
        self._add("tag", tag_from, 1)
        self._add("duration", "header" if utterance.custom.get(DURATION_FROM_HEADER) else "record", 1)
        for key in filter(lambda key: _is_lost(utterance.custom[key]), utterance.custom):
            self._add("nan_as_null", key, 1)
        self._count(utterance.speaker, 1, 1, utterance.segment.duration, utterance.segment.duration)

    def count_rejected(self, record: Any) -> None:
        """Count a rejected record, given as a mapping, or as text if it cannot be decoded."""
        found = record if isinstance(record, dict) else {}
        duration, speaker = found.get("duration"), found.get("speaker")
        if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not 0 < duration <= MAX_SECONDS:
            duration = 0.0
        self._count(speaker if isinstance(speaker, str) else "", 1, 0, float(duration), 0.0)

    def count_notes(self, notes: Mapping[str, int]) -> None:
        """Count the notes of a source about a record."""
        for note, count in notes.items():
            self._add("noted", note, count)

    def move_to_rejected(self, utterance: Utterance) -> None:
        """Count a kept record as rejected instead: it is a duplicate, or already in the dataset that is appended to."""
        self._count(utterance.speaker, 0, -1, 0.0, -utterance.segment.duration)

    def add(self, other: "HoursTable") -> None:
        for dimension, row in other.sums.items():
            for value, numbers in row.items():
                self._add(dimension, value, *numbers)

    def doubts(self, num_recordings: int) -> list[str]:
        """Return a list with a warning if one speaker has a suspiciously large share of the kept records."""
        kept = Counter({name: int(row[1]) for name, row in self.sums.get("speaker", {}).items()})
        total = kept.total()
        return [
            f"{count / total:.0%} of {total:,} utterances from {num_recordings:,} recordings have the speaker "
            f"{name[:80]!r}: check that this is one person and not a name shared by many (voices: {{labels: audit}})"
            for name, count in kept.most_common(1)
            if not is_missing(name) and is_doubtful(count / max(1, total), num_recordings)
        ]

    def report(self, totals: Totals) -> dict[str, Any]:
        """Return the content of ``stats.json``."""
        sums = {dimension: sorted(row.items()) for dimension, row in self.sums.items()}
        total = self.sums.get("total", {}).get("total", [0, 0, 0.0, 0.0])
        by = {f"by_{name}": {value: _report(*row) for value, row in sums.get(name, ())} for name in _DIMENSIONS}
        origins = {
            key: {value: int(row[0]) for value, row in sums.get(name, ())}
            for key, name in (
                ("tag_from", "tag"), ("duration_from", "duration"), ("nan_as_null", "nan_as_null"), ("noted", "noted")
            )
            if name in sums or name != "noted"
        }  # fmt: skip
        return {**_report(*total), "rejects": dict(sorted(totals.rejects.items())), **origins, **by}

    def _count(self, tag: str, *numbers: float) -> None:
        try:
            parsed = parse_speaker_tag(tag)
            values = (parsed.dataset, parsed.language, parsed.speaker)
        except RejectRecord:
            values = ("(unknown)",) * 3
        self._add("total", "total", *numbers)
        for dimension, value in zip(_DIMENSIONS, values, strict=True):
            self._add(dimension, value, *numbers)

    def _add(self, dimension: str, value: str, *numbers: float) -> None:
        row = self.sums.setdefault(dimension, {})
        before = row.get(value) or [0.0] * len(numbers)
        row[value] = [one + more for one, more in zip(before, numbers, strict=True)]


def _is_lost(value: Any) -> bool:
    """Return True if a value is or contains NaN or infinity, which is stored as null."""
    if isinstance(value, (dict, list)):
        return any(map(_is_lost, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)


def _report(records_in: float, records_out: float, seconds_in: float, seconds_out: float) -> dict[str, Any]:
    return {
        "records_in": int(records_in),
        "records_out": int(records_out),
        "hours_in": round(seconds_in / 3600, 6),
        "hours_out": round(seconds_out / 3600, 6),
    }
