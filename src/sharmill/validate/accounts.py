"""Accounting from the original manifests: every record ended in the dataset or among the rejects, once.

A record is known by its path, offset and duration, or by its whole line where it has not even those; its transcript is
compared as well. Only 64-bit hashes are in memory, 16 bytes a record; what does not add up is looked for again in the
files, so that it can be named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import iterate_lines
from sharmill.shar.layout import CUTS
from sharmill.sources import Source
from sharmill.storage import checksum
from sharmill.validate.findings import Finding

_decoder = msgspec.json.Decoder()
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# What is said of a record that cannot be named otherwise.
_SHOWN_CHARACTERS: Final = 200

# The hash of a record, and of the record with its transcript; both 0 where a cut does not say what it came from.
_COLUMNS: Final = ("record", "text")
RECORD_HASHES: Final = np.dtype([(name, "u8") for name in _COLUMNS])


@dataclass(frozen=True, slots=True)
class NamedRecord:
    """A record found again by a hash: both of its hashes, its shard if it is a cut's, and how it is named."""

    hashes: tuple[int, int]
    shard: int | None
    name: str
    text: str


# From a column of ``RECORD_HASHES`` and the wanted hashes to the records that have them.
FindRecords = Callable[[str, set[int]], Iterator[NamedRecord]]


@dataclass(frozen=True, kw_only=True)
class ExpectedRecords:
    """The sources and files of rejects that a dataset is compared with.

    ``audio_roots`` are the folders that absolute paths in the manifests are meant below.
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


@dataclass
class Records:
    """The records of manifests, of a dataset or of rejects: hashes (N,) of ``RECORD_HASHES``, and a way back."""

    hashes: np.ndarray
    find: FindRecords


@dataclass(frozen=True)
class Accounts:
    """The outcome of accounting: what does not add up, and how many records were found where."""

    findings: list[Finding]
    counts: dict[str, int]


def cut_hashes(cut: dict[str, Any]) -> tuple[int, int]:
    """Return the ``RECORD_HASHES`` of the record that a cut came from."""
    try:
        (supervision,) = cut["supervisions"]
        custom = supervision["custom"]
        record = _hash_segment(custom["audio_filepath"], custom.get("offset"), custom["duration"])
        return record, _hash_text(record, supervision)
    except (LookupError, TypeError, ValueError, AttributeError):
        return 0, 0


def find_records(cuts: Iterable[tuple[int, dict[str, Any]]], column: str, wanted: set[int]) -> Iterator[NamedRecord]:
    """Yield the records with one of the wanted hashes that cuts, each with its shard's index, came from."""
    for shard, cut in cuts:
        if cut_hashes(cut)[_COLUMNS.index(column)] in wanted:
            yield _describe_cut(cut, shard)


def _describe_cut(cut: dict[str, Any], shard: int) -> NamedRecord:
    custom = cut["supervisions"][0]["custom"]
    name = _describe_segment(custom["audio_filepath"], custom.get("offset"), custom["duration"])
    return NamedRecord(cut_hashes(cut), shard, name, transcript_of(cut["supervisions"][0]))


def check_accounts(expected: ExpectedRecords, cuts: Records, *, compare_texts: bool) -> Accounts:
    """Account for the records of manifests.

    Args:
        cuts: the records of the dataset's cuts, those that say what they came from.
        compare_texts: the cuts should have the transcripts of the manifests, as in a dataset of sharmill's own.
    """
    manifests = _read_records(expected, _manifest_lines)
    rejects = _read_records(expected, _reject_lines)
    wanted, in_cuts, in_rejects = (side.hashes["record"] for side in (manifests, cuts, rejects))
    ended = np.concatenate([in_cuts, in_rejects])
    lost = _difference(wanted, ended)
    findings = list(_name("lost_record", "neither in the dataset nor among the rejects", lost, [manifests]))
    surplus = _difference(ended, wanted)
    known = np.isin(np.array(list(surplus), dtype=np.uint64), wanted)
    for code, sentence, chosen in (
        ("doubled_record", "in the dataset or the rejects more often than in the manifests", known),
        ("unknown_record", "in the dataset or the rejects, and in none of the manifests", ~known),
    ):
        extra = {key: count for (key, count), is_chosen in zip(surplus.items(), chosen, strict=True) if is_chosen}
        findings += _name(code, sentence, extra, [cuts, rejects])
    if compare_texts:
        findings += _compare_texts(manifests, cuts)
    counts = {
        "records of the manifests": len(wanted),
        "records found as cuts": int(np.isin(in_cuts, wanted).sum()),
        "records found among the rejects": int(np.isin(in_rejects, wanted).sum()),
        "records not found": sum(lost.values()),
    }
    return Accounts(findings, counts)


def _read_records(expected: ExpectedRecords, lines: Callable[[ExpectedRecords], Iterator[tuple[str, Any]]]) -> Records:
    def find(column: str, wanted: set[int]) -> Iterator[NamedRecord]:
        position = _COLUMNS.index(column)
        for text, record in lines(expected):
            if (hashes := _hash_record(record, roots))[position] in wanted:
                yield NamedRecord(hashes, None, _describe(text, record), transcript_of(record))

    roots = _roots(expected)
    hashes = (_hash_record(record, roots) for _, record in lines(expected))
    return Records(np.fromiter(hashes, dtype=RECORD_HASHES), find)


def _name(code: str, sentence: str, wanted: dict[int, int], sides: Sequence[Records]) -> Iterator[Finding]:
    """Yield a finding for each hash that is wanted, named by the first record that has it."""
    left = set(wanted)
    for side in sides if wanted else ():
        for found in side.find("record", set(left)):
            if (key := found.hashes[0]) in left:
                left.remove(key)
                times = f" ({wanted[key]} times)" if wanted[key] > 1 else ""
                yield Finding(code=code, sentence=f"it is {sentence}{times}", shard=found.shard, member=found.name)


def _compare_texts(manifests: Records, cuts: Records) -> Iterator[Finding]:
    """Yield a finding for each cut whose transcript no record of its segment has."""
    known = np.isin(cuts.hashes["record"], manifests.hashes["record"])
    texts = cuts.hashes["text"][known]
    wanted = set(texts[~np.isin(texts, manifests.hashes["text"])].tolist())
    if not wanted:
        return
    found = list(cuts.find("text", wanted))
    right: dict[int, str] = {}
    for record in manifests.find("record", {cut.hashes[0] for cut in found}):
        right.setdefault(record.hashes[0], record.text)
    for cut in found:
        sentence = f"its text is {cut.text!r:.80}, in the manifest it is {right[cut.hashes[0]]!r:.80}"
        yield Finding(code="different_text", sentence=sentence, shard=cut.shard, field=CUTS, member=cut.name)


def _difference(left: np.ndarray, right: np.ndarray) -> dict[int, int]:
    """Count how many more of each hash there are on the left than on the right."""
    keys, counts = np.unique(left, return_counts=True)
    other_keys, other_counts = np.unique(right, return_counts=True)
    position = np.searchsorted(other_keys, keys)
    inside = position < len(other_keys)
    same = np.zeros(len(keys), dtype=bool)
    same[inside] = other_keys[position[inside]] == keys[inside]
    left_over = counts.copy()
    left_over[same] -= other_counts[position[same]]
    more = left_over > 0
    return dict(zip(keys[more].tolist(), left_over[more].tolist(), strict=True))


def _manifest_lines(against: ExpectedRecords) -> Iterator[tuple[str, Any]]:
    """Yield (line, record) of all manifests."""
    for source in against.sources:
        for line in source.records():
            text = line.decode("utf-8", "replace")
            yield text, _parse(text)


def _reject_lines(against: ExpectedRecords) -> Iterator[tuple[str, Any]]:
    """Yield (line, record) of all rejects."""
    for name in against.rejects:
        for line in iterate_lines(Path(name)):
            try:
                record = _decoder.decode(line)["record"]
            except (*_NOT_JSON, LookupError, TypeError) as error:
                raise ConfigError(f"{name} is not a file of rejects: {error!r}", code="bad_manifest") from error
            text = record if isinstance(record, str) else ""
            yield text, _parse(text) if text else record


def _parse(text: str) -> Any:
    """Return a record as an object or, where it is none, as the text that the stage prepare rejects it as.

    The text is parsed and not the bytes, which may be no text: rejects have what was made of those.
    """
    try:
        record = _decoder.decode(text)
    except _NOT_JSON:
        return text
    return record if isinstance(record, dict) else text


def _roots(against: ExpectedRecords) -> list[str]:
    return [name for root in AudioRoots.of(against.audio_roots).roots for name in root.names]


def transcript_of(record: Any) -> str:
    """Return the transcript that the stage prepare takes from a record: ``text``, else ``normalized_text``."""
    if not isinstance(record, dict):
        return ""
    texts = (record.get(key) for key in ("text", "normalized_text"))
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _hash_record(record: Any, roots: Sequence[str]) -> tuple[int, int]:
    """Return the ``RECORD_HASHES`` by path, offset and duration where the record has them, else by all that it is."""
    try:
        key = _hash_segment(record["audio_filepath"], record.get("offset"), record["duration"], roots)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        key = xxhash.xxh3_64_intdigest(msgspec.json.encode(record, order="sorted"))
    return key, _hash_text(key, record)


def _hash_text(key: int, record: Any) -> int:
    return xxhash.xxh3_64_intdigest(f"{key}\n{transcript_of(record)}".encode("utf-8", "surrogatepass"))


def _hash_segment(path: Any, offset: Any, duration: Any, roots: Sequence[str] = ()) -> int:
    """Return the hash of a segment; raises TypeError or ValueError where these are not a path and seconds."""
    if not isinstance(path, str) or isinstance(offset, bool) or isinstance(duration, bool):
        raise TypeError("not a segment")
    begin, seconds = float(offset or 0.0), float(duration)
    if isinstance(offset, str) or isinstance(duration, str) or not (math.isfinite(begin) and math.isfinite(seconds)):
        raise TypeError("not a segment")
    if not _is_plain(path):
        path = _relative(path, roots)
    return xxhash.xxh3_64_intdigest(f"{path}\n{begin!r}\n{seconds!r}".encode("utf-8", "surrogatepass")) or 1


def _is_plain(path: str) -> bool:
    return path[:1] not in ("/", ".", "") and "//" not in path and "/." not in path and path[-1] != "/"


def _relative(path: str, roots: Sequence[str]) -> str:
    """Return a path as the stage prepare normalises it; one that it rejects stays as it is."""
    try:
        return normalise_path(path, roots)
    except RejectRecord:
        return path


def _describe(text: str, record: Any) -> str:
    if isinstance(record, dict) and isinstance(record.get("audio_filepath"), str):
        return _describe_segment(record["audio_filepath"], record.get("offset"), record.get("duration"))
    return (text or str(record))[:_SHOWN_CHARACTERS]


def _describe_segment(path: str, offset: Any, duration: Any) -> str:
    """Return how a record is named in a finding."""
    return f"{path} at {offset or 0.0} s, {duration} s long"
