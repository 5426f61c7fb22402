"""Accounting from the original manifests: every record ended in the dataset or among the rejects, once.

A record is known by its path, offset and duration, or by its whole text where it has not even those. Only 64-bit hashes
are in memory, 8 bytes a record; what does not add up is looked for again in the files, so that it can be named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import iterate_lines
from sharmill.sources import Source
from sharmill.storage import checksum
from sharmill.validate.findings import Finding

_decoder = msgspec.json.Decoder()
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# What is said of a record that cannot be named otherwise.
_SHOWN_CHARACTERS: Final = 200

# From hashes that are wanted to (hash, shard if there is one, what names the record), for every record that has one.
NameRecords = Callable[[set[int]], Iterator[tuple[int, int | None, str]]]


@dataclass(frozen=True, kw_only=True)
class ExpectedRecords:
    """What a dataset is compared with: its sources, and files of rejects.

    ``audio_roots`` are the folders that absolute paths in the manifests are meant below.
    """

    sources: tuple[Source, ...] = ()
    rejects: tuple[str, ...] = ()
    audio_roots: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigError where a file cannot be read, before any work."""
        for source in self.sources:
            source.check()
        for name in self.rejects:
            if not Path(name).is_file():
                raise ConfigError(f"there is no file of rejects {name}")

    def identity(self) -> dict[str, Any]:
        """What the accounts depend on."""
        # By their contents: the rejects of a run are merged again whenever it goes on.
        manifests = [source.identity() for source in self.sources]
        rejects = {name: [Path(name).stat().st_size, checksum(Path(name))] for name in self.rejects}
        return {"manifests": manifests, "rejects": rejects, "audio_roots": list(self.audio_roots)}


@dataclass
class _Side:
    """The records of manifests, of the dataset or of the rejects: their hashes, and how to go through them again."""

    hashes: np.ndarray
    name: NameRecords


def record_hash(cut: dict[str, Any]) -> int:
    """The hash of the record that a cut came from; 0 where the cut does not say."""
    try:
        custom = cut["supervisions"][0]["custom"]
        return _hash_segment(custom["audio_filepath"], custom.get("offset"), custom["duration"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return 0


def check_accounts(against: ExpectedRecords, dataset: np.ndarray, name_cuts: NameRecords) -> Iterator[Finding]:
    """What does not add up. ``dataset`` are the hashes (N,) of the records of the cuts, which ``name_cuts`` names."""
    manifests = _read_side(against, _manifest_lines)
    rejects = _read_side(against, _reject_lines)
    ended = np.concatenate([dataset, rejects.hashes])
    yield from _report(
        "lost_record", "neither in the dataset nor among the rejects", _difference(manifests.hashes, ended), [manifests]
    )
    surplus = _difference(ended, manifests.hashes)
    known = np.isin(np.array(list(surplus), dtype=np.uint64), manifests.hashes)
    sides = [_Side(dataset, name_cuts), rejects]
    for code, sentence, chosen in (
        ("doubled_record", "in the dataset or the rejects more often than in the manifests", known),
        ("unknown_record", "in the dataset or the rejects, and in none of the manifests", ~known),
    ):
        wanted = {key: count for (key, count), is_wanted in zip(surplus.items(), chosen, strict=True) if is_wanted}
        yield from _report(code, sentence, wanted, sides)


def _read_side(against: ExpectedRecords, lines: Callable[[ExpectedRecords], Iterator[tuple[str, Any]]]) -> _Side:
    def name(wanted: set[int]) -> Iterator[tuple[int, None, str]]:
        for text, record in lines(against):
            if (key := _hash_record(record, roots)) in wanted:
                yield key, None, _describe(text, record)

    roots = _roots(against)
    return _Side(np.fromiter((_hash_record(record, roots) for _, record in lines(against)), dtype=np.uint64), name)


def _report(code: str, sentence: str, wanted: dict[int, int], sides: Sequence[_Side]) -> Iterator[Finding]:
    """A finding for each hash that is wanted, named by the first record that has it."""
    left = set(wanted)
    for side in sides if wanted else ():
        for key, shard, text in side.name(set(left)):
            if key in left:
                left.remove(key)
                times = f" ({wanted[key]} times)" if wanted[key] > 1 else ""
                yield Finding(code=code, sentence=f"it is {sentence}{times}", shard=shard, member=text)


def _difference(left: np.ndarray, right: np.ndarray) -> dict[int, int]:
    """How many more of each hash there are on the left than on the right."""
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
    """(text, record) of all manifests."""
    for source in against.sources:
        for line in source.records():
            text = line.decode("utf-8", "replace")
            yield text, _parse(text)


def _reject_lines(against: ExpectedRecords) -> Iterator[tuple[str, Any]]:
    """(text, record) of all rejects."""
    for name in against.rejects:
        for line in iterate_lines(Path(name)):
            try:
                record = _decoder.decode(line)["record"]
            except (*_NOT_JSON, LookupError, TypeError) as error:
                raise ConfigError(f"{name} is not a file of rejects: {error!r}") from error
            text = record if isinstance(record, str) else ""
            yield text, _parse(text) if text else record


def _parse(text: str) -> Any:
    """A record as an object or, where it is none, as the text that the stage prepare rejects it as.

    Of the text and not of the bytes, which may be no text: rejects have what was made of those.
    """
    try:
        record = _decoder.decode(text)
    except _NOT_JSON:
        return text
    return record if isinstance(record, dict) else text


def _roots(against: ExpectedRecords) -> list[str]:
    return [name for root in AudioRoots.of(against.audio_roots).roots for name in root.names]


def _hash_record(record: Any, roots: Sequence[str]) -> int:
    """By path, offset and duration where the record has them, else by all that it is."""
    try:
        return _hash_segment(record["audio_filepath"], record.get("offset"), record["duration"], roots)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return xxhash.xxh3_64_intdigest(msgspec.json.encode(record, order="sorted"))


def _hash_segment(path: Any, offset: Any, duration: Any, roots: Sequence[str] = ()) -> int:
    """Raises TypeError or ValueError where these are not a path and seconds."""
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
        return describe_segment(record["audio_filepath"], record.get("offset"), record.get("duration"))
    return (text or str(record))[:_SHOWN_CHARACTERS]


def describe_segment(path: str, offset: Any, duration: Any) -> str:
    """How a record is named in a finding."""
    return f"{path} at {offset or 0.0} s, {duration} s long"
