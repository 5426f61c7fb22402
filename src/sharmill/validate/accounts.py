"""Accounting: cut ids are unique, and each manifest record occurs exactly once, in the dataset or the rejects.

A record is identified by path, offset and duration (if it has one), or by its whole line if it lacks even a path; its
transcript is compared as well. All records are kept in a temporary database on disk, so that memory use does not depend
on the size of the dataset.
"""

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Final

import msgspec

from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import ConfigError, FatalError, RejectRecord, refuse
from sharmill.files.checksums import checksum
from sharmill.files.stored import NOT_JSON
from sharmill.manifest import (
    DURATION_FROM_HEADER,
    MAX_PATH,
    MAX_RECORD_BYTES,
    SEGMENT_KEYS,
    Reduced,
    hash_whole,
    transcript_of,
)
from sharmill.shar.fields import CUTS
from sharmill.shar.histograms import supervision_of
from sharmill.sources import Source, record_text
from sharmill.sources.files import decode_object, iterate_lines
from sharmill.validate.findings import Finding

# Numbers of the places (sides) where a record can occur. Findings name a record by its entry on the first side in this
# order.
_SIDES: Final = {"manifests": 0, "cuts": 1, "rejects": 2}
_WRONG: Final = {
    "lost_record": "neither in the dataset nor among the rejects",
    "doubled_record": "in the dataset or the rejects more often than in the manifests",
    "unknown_record": "in the dataset or the rejects, but in none of the manifests",
}

_decoder = msgspec.json.Decoder()


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    """A record from a manifest, from the rejects or from a cut.

    Attributes:
        key: equal for records of the same segment; None for a cut that does not record its origin.
        text: the transcript.
        name: the name of the record in findings.
        id: the id of the cut; empty for other records.
    """

    key: str | None = None
    text: str = ""
    name: str = ""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class ExpectedRecords:
    """The sources, and the files of rejects, that a dataset is compared with.

    ``audio_roots`` are the root folders of absolute paths in the manifests; by default, those of each source.
    """

    sources: tuple[Source, ...] = ()
    rejects: tuple[str, ...] = ()
    audio_roots: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError if a file cannot be read; called before any work."""
        for source in self.sources:
            source.check()
        refuse(
            *((not Path(name).is_file(), f"the file of rejects {name} does not exist") for name in self.rejects),
            code="missing_input",
        )

    def identity(self) -> dict[str, Any]:
        """Return the values that the accounts depend on."""
        # Identify rejects by their contents, since a run merges them again whenever it is resumed.
        manifests = [source.identity() for source in self.sources]
        rejects = {name: [Path(name).stat().st_size, checksum(Path(name))] for name in self.rejects}
        return {"manifests": manifests, "rejects": rejects, "audio_roots": list(self.audio_roots)}

    @cached_property
    def root_names(self) -> list[list[str]]:
        """The names that each source's root folders may have in absolute paths."""
        roots = (AudioRoots.of([self.audio_roots or source.audio_root]).roots for source in self.sources)
        return [[name for root in of_source for name in root.names] for of_source in roots]

    def manifest_rows(self) -> Iterator[RecordRow]:
        """Yield the records of all manifests."""
        for source, roots in zip(self.sources, self.root_names, strict=True):
            for line in source.records():
                data = record_text(line)
                text = data.decode("utf-8", "replace")
                yield row_of(_parse(text) if len(data) <= MAX_RECORD_BYTES else text, roots, text)

    def reject_rows(self) -> Iterator[RecordRow]:
        """Yield the records in all files of rejects."""
        for name in self.rejects:
            for _, line in iterate_lines(Path(name), "rejects"):
                try:
                    reject = _decoder.decode(line)
                    record, source = reject["record"], reject.get("source", 0)
                    # Rejects of later stages name no source, and their paths are already relative to a root.
                    roots = self.root_names[source] if source < len(self.root_names) else self.root_names[0]
                except (*NOT_JSON, LookupError, TypeError) as error:
                    raise ConfigError(f"{name} is not a file of rejects: {error!r}", code="bad_manifest") from error
                text = record if isinstance(record, str) else ""
                if isinstance(whole := reject.get("record_hash"), int):
                    record = Reduced(record, whole)
                elif text:
                    record = _parse(text)
                yield row_of(record, roots, text)


def _parse(text: str) -> Any:
    """Parse a record; return it as an object or, if it is not one, as the text that the stage prepare rejects.

    The text is parsed instead of the bytes, because rejects contain the text, and the bytes may be invalid UTF-8.
    """
    try:
        record = decode_object(text.encode(), "the record is no object")
    except RejectRecord:
        return text
    # Rejects contain null instead of NaN and infinity.
    return {key: None if value in (math.inf, -math.inf) or value != value else value for key, value in record.items()}


@contextmanager
def open_accounts() -> Iterator["Accounts"]:
    """Yield empty accounts, whose temporary file is removed at the end.

    Raises:
        FatalError: there is no disk space for the temporary file.
    """
    try:
        with closing(sqlite3.connect("")) as records:
            yield Accounts(records)
    except sqlite3.OperationalError as error:
        raise FatalError(
            f"the folder for temporary files has no room for the records of the dataset: {error}; free some space, or "
            "set TMPDIR to a folder with 4 GB per 10 million cuts, and run the same command again",
            code="disk",
        ) from error


class Accounts:
    """The records of manifests, rejects and cuts, in a temporary database."""

    def __init__(self, records: sqlite3.Connection) -> None:
        self._records = records
        records.execute("CREATE TABLE records (side INTEGER, shard INTEGER, key TEXT, text TEXT, name TEXT, id TEXT)")

    def add(self, side: str, rows: Iterable[RecordRow], shard: int | None = None) -> None:
        """Add the records of one side: of the manifests, the rejects, or the cuts of a shard."""
        self._records.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)",
            ((_SIDES[side], shard, row.key, row.text, row.name, row.id) for row in rows),
        )

    def find_duplicates(self) -> Iterator[Finding]:
        """Yield a finding for every shard that has a cut with a repeated id, since it is unknown which cut is right."""
        repeated = self._records.execute(
            "SELECT id, count(*), group_concat(DISTINCT shard) FROM records WHERE side = 1 "
            "GROUP BY id HAVING count(*) > 1 ORDER BY min(rowid)"
        )
        for cut_id, count, found in repeated:
            shards = sorted(map(int, found.split(",")))
            sentence = f"{count} cuts have this id, in the shards {', '.join(map(str, shards[:10]))}"
            for shard in shards:
                yield Finding(code="duplicate_id", sentence=sentence, shard=shard, field=CUTS, member=cut_id)

    def count_unknown_origins(self) -> int:
        """Count the cuts that do not record their origin."""
        return int(self._records.execute("SELECT count(*) FROM records WHERE side = 1 AND key IS NULL").fetchone()[0])

    def check(self, expected: ExpectedRecords, *, compare_texts: bool) -> tuple[list[Finding], dict[str, int]]:
        """Account for the records of the manifests; return findings, and counts such as ``records found as cuts``.

        Args:
            compare_texts: require cuts to have the transcripts of the manifests, as in a dataset written by sharmill.
        """
        self.add("manifests", expected.manifest_rows())
        self.add("rejects", expected.reject_rows())
        self._records.execute("CREATE INDEX by_key ON records (key, side)")
        found: dict[str, list[Finding]] = {code: [] for code in _WRONG}
        counts = Counter[str]()
        sums = self._records.execute(
            "SELECT key, sum(side = 0), sum(side = 1), sum(side = 2) FROM records WHERE key IS NOT NULL GROUP BY key"
        )
        for key, wanted, cuts, rejects in sums:
            counts["records of the manifests"] += wanted
            counts["records found as cuts"] += cuts if wanted else 0
            counts["records found among the rejects"] += rejects if wanted else 0
            surplus = cuts + rejects - wanted
            counts["records not found"] += max(0, -surplus)
            if surplus:
                code = "lost_record" if surplus < 0 else "doubled_record" if wanted else "unknown_record"
                found[code].append(self._name(key, code, abs(surplus)))
        texts = self._compare_texts() if compare_texts else ()
        return [*(finding for code in found for finding in found[code]), *texts], dict(counts)

    def _name(self, key: str, code: str, times: int) -> Finding:
        """Return a finding about the record with this key.

        A lost record is named after its first entry in a manifest, any other after its first entry in a cut or reject.
        """
        name, shard = self._records.execute(
            "SELECT name, shard FROM records WHERE key = ? AND (side = 0) = ? ORDER BY side, rowid LIMIT 1",
            (key, code == "lost_record"),
        ).fetchone()
        return Finding(
            code=code,
            sentence=f"it is {_WRONG[code]}{f' ({times} times)' if times > 1 else ''}",
            shard=shard,
            member=name,
        )

    def _compare_texts(self) -> Iterator[Finding]:
        """Yield a finding for each cut whose transcript differs from those of all manifest records of its segment."""
        other = self._records.execute(
            "SELECT cut.name, cut.shard, cut.text, (SELECT text FROM records WHERE key = cut.key AND side = 0 "
            "ORDER BY rowid LIMIT 1) AS expected FROM records AS cut WHERE cut.side = 1 AND expected IS NOT NULL "
            "AND cut.text NOT IN (SELECT text FROM records WHERE key = cut.key AND side = 0)"
        )
        for name, shard, text, expected in other:
            yield Finding(
                code="different_text", shard=shard, field=CUTS, member=name,
                sentence=f"its text is {text!r:.80}, but the manifest has {expected!r:.80}",
            )  # fmt: skip


def row_of(record: Any, roots: Sequence[str] = (), line: str = "") -> RecordRow:
    """Return the row of a record; ``roots`` are the root folders that its path may have, and ``line`` is its text."""
    kept = record.kept if isinstance(record, Reduced) else record
    key = _segment_key(kept, roots)
    if key is None:
        key = f"{record.hash if isinstance(record, Reduced) else hash_whole(record):016x}"
    name = (line or str(kept))[:200]
    if isinstance(kept, dict) and isinstance(path := kept.get("audio_filepath"), str):
        name = f"{path} at {kept.get('offset') or 0.0} s, {kept.get('duration')} s long"
    return RecordRow(key, transcript_of(kept), name)


def row_of_cut(cut: dict[str, Any]) -> RecordRow:
    """Return the row of a cut, using the record in its supervision."""
    supervision, custom = supervision_of(cut)
    row = RecordRow()
    if "duration" in custom and _segment_key(custom, ()) is not None:
        row = row_of({key: custom[key] for key in SEGMENT_KEYS if key in custom} | {"text": supervision.get("text")})
    return msgspec.structs.replace(row, id=str(cut.get("id")))


def _segment_key(record: Any, roots: Sequence[str]) -> str | None:
    """Return a key made of path (relative to its root), offset and duration; None if one of these is invalid.

    The duration in the key is None if the source does not state it, even if the stage prepare has read it from the
    audio's header.
    """
    if not isinstance(record, dict):
        return None
    path, offset = record.get("audio_filepath"), record.get("offset") or 0.0
    duration: Any = None if record.get(DURATION_FROM_HEADER) is True else record.get("duration")
    # Compare types exactly: Python treats JSON's true and false as numbers.
    if (
        isinstance(path, str)
        and len(path) <= MAX_PATH
        and type(offset) in (int, float)
        and type(duration) in (int, float, NoneType)
    ):
        with suppress(OverflowError):
            begin, seconds = float(offset), None if duration is None else float(duration)
            if math.isfinite(begin) and math.isfinite(seconds or 0.0):
                return f"{_normalise(path, roots)}\n{begin!r}\n{seconds!r}"
    return None


def _normalise(path: str, roots: Sequence[str]) -> str:
    """Return a path as the stage prepare normalizes it; a path that it would reject is returned unchanged."""
    if path[:1] not in ("/", ".", "") and "//" not in path and "/." not in path and path[-1] != "/":
        return path
    try:
        return normalise_path(path, roots)
    except RejectRecord:
        return path
