"""Accounting: no id is there twice, and every record of the manifests ended in the dataset or among the rejects, once.

A record is known by its path, offset and duration, if it has one, or by its whole line where it has not even a path;
its transcript is compared as well. All of them are in a temporary database on disk, so that memory does not grow with
the dataset.
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

# In this order they name a record.
_SIDES: Final = {"manifests": 0, "cuts": 1, "rejects": 2}
_WRONG: Final = {
    "lost_record": "neither in the dataset nor among the rejects",
    "doubled_record": "in the dataset or the rejects more often than in the manifests",
    "unknown_record": "in the dataset or the rejects, and in none of the manifests",
}

_decoder = msgspec.json.Decoder()


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    """A record of a manifest, of the rejects or of a cut.

    Attributes:
        key: equal for records of one segment; None of a cut that does not say what it came from.
        text: the transcript.
        name: what a finding calls it.
        id: of a cut.
    """

    key: str | None = None
    text: str = ""
    name: str = ""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class ExpectedRecords:
    """The sources and files of rejects that a dataset is compared with.

    ``audio_roots`` are the folders that absolute paths in the manifests are meant below; by default each source's own.
    """

    sources: tuple[Source, ...] = ()
    rejects: tuple[str, ...] = ()
    audio_roots: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError where a file cannot be read, before any work."""
        for source in self.sources:
            source.check()
        refuse(
            *((not Path(name).is_file(), f"there is no file of rejects {name}") for name in self.rejects),
            code="missing_input",
        )

    def identity(self) -> dict[str, Any]:
        """Return what the accounts depend on."""
        # By their contents: the rejects of a run are merged again whenever it goes on.
        manifests = [source.identity() for source in self.sources]
        rejects = {name: [Path(name).stat().st_size, checksum(Path(name))] for name in self.rejects}
        return {"manifests": manifests, "rejects": rejects, "audio_roots": list(self.audio_roots)}

    @cached_property
    def root_names(self) -> list[list[str]]:
        """The absolute paths that the roots of each source are known by."""
        roots = (AudioRoots.of([self.audio_roots or source.audio_root]).roots for source in self.sources)
        return [[name for root in of_source for name in root.names] for of_source in roots]

    def manifest_rows(self) -> Iterator[RecordRow]:
        """Read the records of all manifests."""
        for source, roots in zip(self.sources, self.root_names, strict=True):
            for line in source.records():
                data = record_text(line)
                text = data.decode("utf-8", "replace")
                yield row_of(_parse(text) if len(data) <= MAX_RECORD_BYTES else text, roots, text)

    def reject_rows(self) -> Iterator[RecordRow]:
        """Read the records of all rejects."""
        for name in self.rejects:
            for _, line in iterate_lines(Path(name), "rejects"):
                try:
                    reject = _decoder.decode(line)
                    record, source = reject["record"], reject.get("source", 0)
                    # Those of later stages name no source, and their paths need no root.
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
    """Return a record as an object or, where it is none, as the text that the stage prepare rejects it as.

    The text is parsed and not the bytes, which may be no text: rejects have what was made of those.
    """
    try:
        record = decode_object(text.encode(), "the record is no object")
    except RejectRecord:
        return text
    # In rejects, NaN is null.
    return {key: None if value in (math.inf, -math.inf) or value != value else value for key, value in record.items()}


@contextmanager
def open_accounts() -> Iterator["Accounts"]:
    """Yield empty accounts, whose temporary file is removed at the end.

    Raises:
        FatalError: there is no room for it.
    """
    try:
        with closing(sqlite3.connect("")) as records:
            yield Accounts(records)
    except sqlite3.OperationalError as error:
        raise FatalError(
            f"no room for the records of the dataset in the folder for temporary files: {error}; free some there, or "
            "set TMPDIR to a folder with 4 GB for 10 million cuts, and run the same command again",
            code="disk",
        ) from error


class Accounts:
    """The records of manifests, rejects and cuts, in a database of their own."""

    def __init__(self, records: sqlite3.Connection) -> None:
        self._records = records
        records.execute("CREATE TABLE records (side INTEGER, shard INTEGER, key TEXT, text TEXT, name TEXT, id TEXT)")

    def add(self, side: str, rows: Iterable[RecordRow], shard: int | None = None) -> None:
        """Add the records of the manifests, the rejects or the cuts of a shard."""
        self._records.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)",
            ((_SIDES[side], shard, row.key, row.text, row.name, row.id) for row in rows),
        )

    def find_duplicates(self) -> Iterator[Finding]:
        """Yield a finding for every cut whose id occurs more than once: nothing tells which is the right one."""
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
        """Count the cuts that do not say what they came from."""
        return int(self._records.execute("SELECT count(*) FROM records WHERE side = 1 AND key IS NULL").fetchone()[0])

    def check(self, expected: ExpectedRecords, *, compare_texts: bool) -> tuple[list[Finding], dict[str, int]]:
        """Account for the records of manifests; return what does not add up, and how many records were found where.

        Args:
            compare_texts: the cuts should have the transcripts of the manifests, as in a dataset of sharmill's own.
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
        """Return a finding about a record, named by the first that has a key: where it ended, or else in a manifest."""
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
        """Yield a finding for each cut whose transcript no record of its segment has."""
        other = self._records.execute(
            "SELECT cut.name, cut.shard, cut.text, (SELECT text FROM records WHERE key = cut.key AND side = 0 "
            "ORDER BY rowid LIMIT 1) AS expected FROM records AS cut WHERE cut.side = 1 AND expected IS NOT NULL "
            "AND cut.text NOT IN (SELECT text FROM records WHERE key = cut.key AND side = 0)"
        )
        for name, shard, text, expected in other:
            yield Finding(
                code="different_text", shard=shard, field=CUTS, member=name,
                sentence=f"its text is {text!r:.80}, in the manifest it is {expected!r:.80}",
            )  # fmt: skip


def row_of(record: Any, roots: Sequence[str] = (), line: str = "") -> RecordRow:
    """Return the row of a record; ``roots`` are the absolute paths that its path may be below, ``line`` its text."""
    kept = record.kept if isinstance(record, Reduced) else record
    key = _segment_key(kept, roots)
    if key is None:
        key = f"{record.hash if isinstance(record, Reduced) else hash_whole(record):016x}"
    name = (line or str(kept))[:200]
    if isinstance(kept, dict) and isinstance(path := kept.get("audio_filepath"), str):
        name = f"{path} at {kept.get('offset') or 0.0} s, {kept.get('duration')} s long"
    return RecordRow(key, transcript_of(kept), name)


def row_of_cut(cut: dict[str, Any]) -> RecordRow:
    """Return the row of a cut, by the record that its supervision carries."""
    supervision, custom = supervision_of(cut)
    row = RecordRow()
    if "duration" in custom and _segment_key(custom, ()) is not None:
        row = row_of({key: custom[key] for key in SEGMENT_KEYS if key in custom} | {"text": supervision.get("text")})
    return msgspec.structs.replace(row, id=str(cut.get("id")))


def _segment_key(record: Any, roots: Sequence[str]) -> str | None:
    """Return the path of a record, relative to its root, with offset and duration; None where these are none.

    The duration is None where the source does not say it, also if the stage prepare has read it from the header.
    """
    if not isinstance(record, dict):
        return None
    path, offset = record.get("audio_filepath"), record.get("offset") or 0.0
    duration: Any = None if record.get(DURATION_FROM_HEADER) is True else record.get("duration")
    # JSON has true and false as well, which Python takes for numbers.
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
    """Return a path as the stage prepare normalises it; one that it rejects stays as it is."""
    if path[:1] not in ("/", ".", "") and "//" not in path and "/." not in path and path[-1] != "/":
        return path
    try:
        return normalise_path(path, roots)
    except RejectRecord:
        return path
