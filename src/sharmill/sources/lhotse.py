"""lhotse manifests: a CutSet, or a RecordingSet with or without its SupervisionSet, as JSON lines, plain or in gzip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import msgspec

from sharmill.errors import RejectRecord
from sharmill.manifest import SOURCE_CUT_ID
from sharmill.sources import FileSource, Piece, Unreadable
from sharmill.sources.lhotse_records import (
    LhotseRecording,
    Supervision,
    count_records,
    cut_records,
    decode_lhotse,
    recording_record,
    supervision_record,
)
from sharmill.sources.lines import KeyedLines, LineReader, check_json_lines, iterate_checked

_WRITE_LINES: Final = "write it by lhotse as .jsonl or .jsonl.gz, such as by lhotse copy"
# The rest of a line says no more about what is wrong.
_SHOWN_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class LhotseSource(FileSource):
    """Records of lhotse manifests: cuts, supervisions with the recordings that they belong to, or recordings."""

    file_keys: ClassVar[tuple[str, ...]] = ("cuts", "supervisions", "recordings")
    type: str = "lhotse"
    cuts: str | list[str] | None = None
    """Path of a CutSet, ``.jsonl`` or ``.jsonl.gz``, or a list of them; as ``manifest`` of ``nemo`` it may name shards,
    or have ``*`` and ``?``."""
    recordings: str | list[str] | None = None
    """Path of a RecordingSet, or a list of them; instead of ``cuts``. Without ``supervisions`` each is a record."""
    supervisions: str | list[str] | None = None
    """Path of a SupervisionSet, or a list of them: each supervision is a record, in this order."""
    split: bool = False
    """Every supervision of a cut is a record. ``false``: the cut is one, with the texts of its supervisions joined; a
    cut with several speakers is then rejected."""
    keep_ids: bool = False
    """The ids of the cuts are those of the dataset: of cuts with ``split: true`` and of supervisions their ids, of
    recordings alone theirs. All sources of a dataset keep ids, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [key for key in self.file_keys if getattr(self, key) is not None]
        if named not in (["cuts"], ["recordings"], ["supervisions", "recordings"]):
            raise ValueError("give either cuts, or recordings, or recordings and supervisions")
        if self.split and self.cuts is None:
            raise ValueError("split is for cuts; of supervisions each one is a record anyway")

    def check(self) -> None:
        """Raise ConfigError where a file cannot be the manifest that it is named as."""
        for key in self.file_keys:
            for file in self.find(key):
                check_json_lines(file, key, _WRITE_LINES, functools.partial(_mistaken, key), compressed=("gzip",))

    def identity(self) -> dict[str, Any]:
        """Return the size and checksum of every file, by its key, number and name; also prove that each can be read."""
        found = super().identity()
        for file in self.find("recordings"):
            # Of records the pieces do so.
            for _ in iterate_checked(file, "recordings"):
                pass
        return found

    @cached_property
    def _lines(self) -> LineReader:
        kind = next(key for key in self.file_keys if self.named(key))
        return LineReader(self.files, kind, functools.partial(count_records, split=self.split))

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of records, each found again by the place of a line and the records of it to leave out."""
        return self._lines.pieces(records_per_piece)

    def read(self, piece: dict[str, Any]) -> Iterator[bytes | Unreadable]:
        """Yield the records of a piece."""
        return self._lines.read(piece, self._records)

    def _records(self, line: bytes) -> Iterator[bytes | Unreadable]:
        """Yield the records of a line."""
        if self.cuts is not None:
            records = cut_records(line, self.split, self.channel)
        else:
            records = iter([self._recorded(line)])
        for record in records:
            if isinstance(record, RejectRecord):
                yield Unreadable(record.reason, record.detail, line[:_SHOWN_BYTES].decode("utf-8", "replace"))
            else:
                own = record.pop(SOURCE_CUT_ID)
                yield msgspec.json.encode(record | ({SOURCE_CUT_ID: own} if self.keep_ids else {}))

    def _recorded(self, line: bytes) -> dict[str, Any] | RejectRecord:
        """Return the record of a line of a SupervisionSet or a RecordingSet, or the reason why it is none."""
        try:
            if self.supervisions is None:
                return recording_record(decode_lhotse(line, LhotseRecording), self.channel)
            supervision = decode_lhotse(line, Supervision)
            # A set may have a recording twice, as it is where parts of a corpus were put together.
            found = sorted(set(self._recordings.find(supervision.recording_id.encode())))
            if len(found) != 1:
                number = "several recordings have" if found else "no recording has"
                raise RejectRecord("malformed", f"{number} the id {supervision.recording_id[:80]!r} of the supervision")
            return supervision_record(decode_lhotse(found[0], LhotseRecording), supervision, self.channel)
        except RejectRecord as reject:
            return reject

    @cached_property
    def _recordings(self) -> KeyedLines:
        return KeyedLines(self.find("recordings"), "recordings", _recording_id)


class _Named(msgspec.Struct):
    id: str


def _recording_id(line: bytes) -> bytes | None:
    try:
        return msgspec.json.decode(line, type=_Named).id.encode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _mistaken(key: str, first: dict[str, Any]) -> str | None:
    """Return what is wrong with a file whose first object is of another manifest than its key says."""
    if "audio_filepath" in first:
        return "has the records of a NeMo manifest; read it by type: nemo"
    if "sources" in first:
        found = "recordings"
    elif "tracks" in first or "supervisions" in first or str(first.get("type")).endswith("Cut"):
        found = "cuts"
    elif "recording_id" in first:
        found = "supervisions"
    else:
        return None
    return None if found == key else f"has {found}, not {key}; name it as {found}"
