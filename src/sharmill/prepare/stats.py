"""Hours before and after ``prepare``, in all and by dataset, language and speaker."""

from __future__ import annotations

from typing import Any

import msgspec

from sharmill.engine.unit import Totals
from sharmill.errors import RejectRecord
from sharmill.manifest import DURATION_FROM_HEADER, Utterance
from sharmill.speaker_tag import parse_speaker_tag

_DIMENSIONS = ("dataset", "language", "speaker")
# What records that passed their own checks have from elsewhere, duplicates included.
_ORIGINS = ("tag", "duration")
_UNKNOWN = "(unknown)"
# 31 years: what claims to be longer is no duration, and must not swamp the sums.
MAX_SECONDS = 1e9


class _Cell(msgspec.Struct):
    """Records and seconds that came in, and that went on."""

    records_in: int = 0
    records_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0

    def add(self, other: _Cell) -> None:
        self.records_in += other.records_in
        self.records_out += other.records_out
        self.seconds_in += other.seconds_in
        self.seconds_out += other.seconds_out

    def report(self) -> dict[str, Any]:
        return {
            "records_in": self.records_in,
            "records_out": self.records_out,
            "hours_in": round(self.seconds_in / 3600, 6),
            "hours_out": round(self.seconds_out / 3600, 6),
        }


class HoursTable:
    """Counts of records and seconds, and of what speaker tags and durations were made of; tables of parts add up."""

    def __init__(self, cells: dict[str, dict[str, _Cell]] | None = None) -> None:
        self._cells = cells or {dimension: {} for dimension in ("total", *_DIMENSIONS, *_ORIGINS)}

    def count_kept(self, utterance: Utterance, tag_from: str) -> None:
        """Count a record that passed the checks; ``tag_from`` is what its speaker tag was made of."""
        seconds = utterance.duration
        duration_from = "header" if utterance.custom.get(DURATION_FROM_HEADER) else "record"
        for dimension, value in zip(_ORIGINS, (tag_from, duration_from), strict=True):
            self._cell(dimension, value).records_in += 1
        self._count(utterance.speaker, _Cell(records_in=1, records_out=1, seconds_in=seconds, seconds_out=seconds))

    def count_rejected(self, record: Any) -> None:
        """Count a record that is rejected: a mapping, or the text of a line that is not JSON."""
        seconds, tag = 0.0, ""
        if isinstance(record, dict):
            duration, speaker = record.get("duration"), record.get("speaker")
            if isinstance(duration, (int, float)) and not isinstance(duration, bool) and 0 < duration <= MAX_SECONDS:
                seconds = float(duration)
            tag = speaker if isinstance(speaker, str) else ""
        self._count(tag, _Cell(records_in=1, seconds_in=seconds))

    def move_to_rejected(self, utterance: Utterance) -> None:
        """Move a record that was counted as kept, and is a duplicate, to the rejected ones."""
        self._count(utterance.speaker, _Cell(records_out=-1, seconds_out=-utterance.duration))

    def add(self, other: HoursTable) -> None:
        for dimension, row in other._cells.items():
            for value, cell in row.items():
                self._cell(dimension, value).add(cell)

    def report(self, totals: Totals) -> dict[str, Any]:
        """Return the content of ``stats.json``."""
        total = self._cells["total"].get("total", _Cell()).report()
        by = {
            f"by_{dimension}": {value: cell.report() for value, cell in sorted(self._cells[dimension].items())}
            for dimension in _DIMENSIONS
        }
        origins = {
            f"{dimension}_from": {value: cell.records_in for value, cell in sorted(self._cells[dimension].items())}
            for dimension in _ORIGINS
        }
        return {**total, "rejects": dict(sorted(totals.rejects.items())), **origins, **by}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self._cells)

    @classmethod
    def from_json(cls, data: bytes) -> HoursTable:
        return cls(msgspec.json.decode(data, type=dict[str, dict[str, _Cell]]))

    def _count(self, tag: str, cell: _Cell) -> None:
        try:
            parsed = parse_speaker_tag(tag)
            values = {"dataset": parsed.dataset, "language": parsed.language, "speaker": parsed.speaker}
        except RejectRecord:
            values = dict.fromkeys(_DIMENSIONS, _UNKNOWN)
        for dimension, value in {"total": "total", **values}.items():
            self._cell(dimension, value).add(cell)

    def _cell(self, dimension: str, value: str) -> _Cell:
        row = self._cells[dimension]
        cell = row.get(value)
        if cell is None:
            cell = row[value] = _Cell()
        return cell
