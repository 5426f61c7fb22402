"""Accounting: no id is there twice, and every record of the manifests ended in the dataset or among the rejects, once.

A record is known by its path, offset and duration, if it has one, or by its whole line where it has not even a path;
its transcript is compared as well. Only 64-bit hashes are in memory, 24 bytes a cut; what does not add up is looked for
again in the files, so that it can be named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.files.storage import checksum
from sharmill.manifest import (
    DURATION_FROM_HEADER,
    MAX_PATH,
    MAX_RECORD_BYTES,
    SEGMENT_KEYS,
    Reduced,
    hash_whole,
    iterate_lines,
    transcript_of,
)
from sharmill.shar.cut_lines import NOT_JSON, read_cuts
from sharmill.shar.layout import CUTS
from sharmill.sources import Source, record_text
from sharmill.validate.checked_dataset import CheckedDataset
from sharmill.validate.findings import Finding

# The hash of a record, and of the record with its transcript; both 0 where a cut does not say what it came from.
_RECORD: Final = ("record", "text")
_RECORD_HASHES: Final = np.dtype([(name, "u8") for name in _RECORD])
# What the check of a shard leaves of each cut: the hashes of its id and of its record.
CUT_HASHES: Final = np.dtype([("id", "u8"), *_RECORD_HASHES.descr])
# What is said of a record that cannot be named otherwise.
_SHOWN_CHARACTERS: Final = 200

# A record as it is read: its shard if it is a cut's, the line that it stands in, the record, and the absolute paths of
# the roots that its path may be below.
Row = tuple[int | None, str, Any, Sequence[str]]

_decoder = msgspec.json.Decoder()


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
        for name in self.rejects:
            if not Path(name).is_file():
                raise ConfigError(f"there is no file of rejects {name}", code="missing_input")

    def identity(self) -> dict[str, Any]:
        """Return what the accounts depend on."""
        # By their contents: the rejects of a run are merged again whenever it goes on.
        manifests = [source.identity() for source in self.sources]
        rejects = {name: [Path(name).stat().st_size, checksum(Path(name))] for name in self.rejects}
        return {"manifests": manifests, "rejects": rejects, "audio_roots": list(self.audio_roots)}

    @cached_property
    def root_names(self) -> list[list[str]]:
        """The absolute paths that the roots of each source are known by."""
        if self.audio_roots:
            return [_names(AudioRoots.of([self.audio_roots]))] * len(self.sources)
        return [_names(AudioRoots.of([source.audio_root])) for source in self.sources]

    def manifest_rows(self) -> Iterator[Row]:
        """Read the records of all manifests."""
        for source, roots in zip(self.sources, self.root_names, strict=True):
            for line in source.records():
                data = record_text(line)
                text = data.decode("utf-8", "replace")
                yield None, text, _parse(text) if len(data) <= MAX_RECORD_BYTES else text, roots

    def reject_rows(self) -> Iterator[Row]:
        """Read the records of all rejects."""
        for name in self.rejects:
            for line in iterate_lines(Path(name)):
                try:
                    reject = _decoder.decode(line)
                    record, source = reject["record"], reject.get("source", 0)
                    # Those of later stages name no source, and their paths need no root.
                    roots = self.root_names[source] if source < len(self.root_names) else self.root_names[0]
                except (*NOT_JSON, LookupError, TypeError) as error:
                    raise ConfigError(f"{name} is not a file of rejects: {error!r}", code="bad_manifest") from error
                text = record if isinstance(record, str) else ""
                if isinstance(whole := reject.get("record_hash"), int):
                    yield None, text, Reduced(record, whole), roots
                else:
                    yield None, text, _parse(text) if text else record, roots


def _names(roots: AudioRoots) -> list[str]:
    return [name for root in roots.roots for name in root.names]


def _parse(text: str) -> Any:
    """Return a record as an object or, where it is none, as the text that the stage prepare rejects it as.

    The text is parsed and not the bytes, which may be no text: rejects have what was made of those.
    """
    try:
        record = _decoder.decode(text)
    except NOT_JSON:
        return text
    return record if isinstance(record, dict) else text


@dataclass(frozen=True)
class Records:
    """The records of manifests, of rejects or of a dataset: their hashes, and a way back.

    Attributes:
        hashes: of each record, (N,).
        read: reads the records again, or those of them that may have some hashes in a column.
    """

    hashes: np.ndarray
    read: Callable[[str, set[int]], Iterable[Row]]

    def find(self, column: str, wanted: set[int]) -> Iterator[tuple[tuple[int, int], Row]]:
        """Yield the records that have one of some hashes in a column, with both of their hashes."""
        for row in self.read(column, wanted):
            hashes = hash_record(*row[2:])
            if hashes[_RECORD.index(column)] in wanted:
                yield hashes, row


@dataclass(frozen=True)
class CutHashes:
    """The hashes of all cuts, one array (cuts,) of ``CUT_HASHES`` for each shard."""

    subject: CheckedDataset
    parts: Sequence[np.ndarray]

    def column(self, name: str) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype=np.uint64), *(part[name] for part in self.parts)])

    def find_duplicates(self) -> Iterator[Finding]:
        """Yield a finding for every cut whose id occurs more than once: nothing tells which is the right one."""
        ids = np.sort(self.column("id"))
        repeated = set(ids[1:][ids[1:] == ids[:-1]].tolist())
        places: dict[str, list[int]] = {}
        for shard, cut in self._cuts("id", repeated):
            if hash_cut(cut)[0] in repeated:
                places.setdefault(str(cut.get("id")), []).append(shard)
        for cut_id, shards in places.items():
            # Different ids may have the same hash.
            if len(shards) > 1:
                sentence = f"{len(shards)} cuts have this id, in the shards {', '.join(map(str, shards[:10]))}"
                for shard in sorted(set(shards)):
                    yield Finding(code="duplicate_id", sentence=sentence, shard=shard, field=CUTS, member=cut_id)

    def records(self) -> Records:
        """Return the records that the cuts came from, those that say so."""

        def read(column: str, wanted: set[int]) -> Iterator[Row]:
            for shard, cut in self._cuts(column, wanted):
                if hash_cut(cut)[1]:
                    supervision = _supervision_of(cut)
                    segment = {key: value for key, value in supervision["custom"].items() if key in SEGMENT_KEYS}
                    yield shard, "", segment | {"text": supervision.get("text")}, ()

        known = [part[part["record"] != 0] for part in self.parts]
        return Records(np.concatenate([np.empty(0, CUT_HASHES), *known])[list(_RECORD)], read)

    def _cuts(self, column: str, wanted: set[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read again the cuts of the shards that have any of the hashes."""
        hashes = np.fromiter(wanted, np.uint64, len(wanted))
        for shard, part in zip(self.subject.shards, self.parts, strict=True):
            if CUTS in shard.files and np.isin(part[column], hashes).any():
                # One that has changed since its check will be found by the next.
                with suppress(DamagedShard):
                    for cut in read_cuts(self.subject.directory / shard.files[CUTS]):
                        yield shard.index, cut


def check_accounts(
    expected: ExpectedRecords, cuts: Records, *, compare_texts: bool
) -> tuple[list[Finding], dict[str, int]]:
    """Account for the records of manifests; return what does not add up, and how many records were found where.

    Args:
        cuts: the records of the dataset's cuts, those that say what they came from.
        compare_texts: the cuts should have the transcripts of the manifests, as in a dataset of sharmill's own.
    """
    manifests, rejects = _read_records(expected.manifest_rows), _read_records(expected.reject_rows)
    wanted, in_cuts, in_rejects = (side.hashes["record"] for side in (manifests, cuts, rejects))
    surplus = count_surplus(np.concatenate([in_cuts, in_rejects]), wanted)
    known = set(wanted[np.isin(wanted, list(surplus))].tolist())
    lost = {key: -number for key, number in surplus.items() if number < 0}
    doubled = {key: number for key, number in surplus.items() if number > 0 and key in known}
    unknown = {key: number for key, number in surplus.items() if key not in known}
    ended = [cuts, rejects]
    findings = [
        *_name("lost_record", "neither in the dataset nor among the rejects", lost, [manifests]),
        *_name("doubled_record", "in the dataset or the rejects more often than in the manifests", doubled, ended),
        *_name("unknown_record", "in the dataset or the rejects, and in none of the manifests", unknown, ended),
        *(_compare_texts(manifests, cuts) if compare_texts else ()),
    ]
    counts = {
        "records of the manifests": len(wanted),
        "records found as cuts": int(np.isin(in_cuts, wanted).sum()),
        "records found among the rejects": int(np.isin(in_rejects, wanted).sum()),
        "records not found": sum(lost.values()),
    }
    return findings, counts


def _read_records(read: Callable[[], Iterator[Row]]) -> Records:
    hashes = np.fromiter((hash_record(record, roots) for _, _, record, roots in read()), dtype=_RECORD_HASHES)
    return Records(hashes, lambda column, wanted: read())


def count_surplus(left: np.ndarray, right: np.ndarray) -> dict[int, int]:
    """Count how many more of each hash there are on the left than on the right: negative where there are fewer."""
    keys, position = np.unique(np.concatenate([left, right]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(keys)) for part in np.split(position, [len(left)])]
    surplus = counts[0] - counts[1]
    return dict(zip(keys[surplus != 0].tolist(), surplus[surplus != 0].tolist(), strict=True))


def _name(code: str, sentence: str, wanted: dict[int, int], sides: Sequence[Records]) -> Iterator[Finding]:
    """Yield a finding for each hash that is wanted, named by the first record that has it."""
    left = set(wanted)
    for side in sides if wanted else ():
        for (key, _), row in side.find("record", set(left)):
            if key in left:
                left.remove(key)
                times = f" ({wanted[key]} times)" if wanted[key] > 1 else ""
                yield Finding(code=code, sentence=f"it is {sentence}{times}", shard=row[0], member=_describe(row))


def _compare_texts(manifests: Records, cuts: Records) -> Iterator[Finding]:
    """Yield a finding for each cut whose transcript no record of its segment has."""
    known = np.isin(cuts.hashes["record"], manifests.hashes["record"])
    texts = cuts.hashes["text"][known]
    wanted = set(texts[~np.isin(texts, manifests.hashes["text"])].tolist())
    if not wanted:
        return
    found = list(cuts.find("text", wanted))
    right: dict[int, str] = {}
    for (key, _), (_, _, record, _) in manifests.find("record", {key for (key, _), _ in found}):
        right.setdefault(key, transcript_of(record))
    for (key, _), row in found:
        sentence = f"its text is {transcript_of(row[2])!r:.80}, in the manifest it is {right[key]!r:.80}"
        yield Finding(code="different_text", sentence=sentence, shard=row[0], field=CUTS, member=_describe(row))


def _describe(row: Row) -> str:
    """Return how a record is named in a finding."""
    _, line, record, _ = row
    record = record.kept if isinstance(record, Reduced) else record
    if isinstance(record, dict) and isinstance(path := record.get("audio_filepath"), str):
        return f"{path} at {record.get('offset') or 0.0} s, {record.get('duration')} s long"
    return (line or str(record))[:_SHOWN_CHARACTERS]


def _supervision_of(cut: dict[str, Any]) -> dict[str, Any]:
    """Return the supervision of a cut, which carries its record; an empty one where there is not just one."""
    supervisions: Any = cut.get("supervisions")
    has_one = isinstance(supervisions, list) and len(supervisions) == 1 and isinstance(supervisions[0], dict)
    return supervisions[0] if has_one else {}


def hash_cut(cut: dict[str, Any]) -> tuple[int, int, int]:
    """Return the ``CUT_HASHES`` of a cut."""
    supervision = _supervision_of(cut)
    custom = supervision.get("custom")
    key = _segment_key(custom, ()) if isinstance(custom, dict) and "duration" in custom else None
    return _hash(str(cut.get("id"))), *((0, 0) if key is None else _hashes(_hash(key), supervision))


def hash_record(record: Any, roots: Sequence[str] = ()) -> tuple[int, int]:
    """Return the hashes of a record by path, offset and duration where it has them, else by all that it is."""
    kept = record.kept if isinstance(record, Reduced) else record
    if (key := _segment_key(kept, roots)) is not None:
        return _hashes(_hash(key), kept)
    return _hashes(record.hash if isinstance(record, Reduced) else hash_whole(record), kept)


def _hashes(number: int, record: Any) -> tuple[int, int]:
    number = number or 1
    return number, _hash(f"{number}\n{transcript_of(record)}")


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


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
