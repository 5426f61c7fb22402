"""Stage ``prepare``: one clean manifest and the rejects, from manifests as they come, and the hours of both.

Duplicates and ambiguous ids over a whole input, and records that a finished dataset has already, are told from hashes:
40 bytes a record of the input, 16 bytes a cut of the dataset.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import xxhash

from sharmill.audio.roots import AudioRoots
from sharmill.config import Config
from sharmill.engine.hashes import find_first
from sharmill.engine.stage import (
    Advance,
    Commit,
    Output,
    Processor,
    RunDir,
    Stage,
    Totals,
    Unit,
    add_up,
    identify_folder,
    make_unit,
    versions,
)
from sharmill.errors import RejectRecord
from sharmill.files.arrays import load_stored_array, save_array
from sharmill.files.atomic import open_atomic, write_atomic, write_new
from sharmill.files.checksums import hash_text
from sharmill.files.remote import FETCHES_AT_ONCE, is_url
from sharmill.files.staging import Staging
from sharmill.files.stored import load_record, open_stored
from sharmill.manifest import (
    DURATION_FROM_HEADER,
    SOURCE_CUT_ID,
    Reject,
    Utterance,
    parse_speaker_tag,
    segment_id,
    write_lines,
)
from sharmill.prefetch import prefetch
from sharmill.prepare.check import MAX_SECONDS, PrepareConfig, RecordCheck, parse_filters, parse_record
from sharmill.prepare.speaker_key import is_doubtful, make_speaker_key
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.manifests import read_utterances
from sharmill.sources import Described, Piece, RawRecord, notes_of, record_text
from sharmill.sources.speakers import is_missing

_DIMENSIONS = ("dataset", "language", "speaker")
# A segment is known by 128 bits, which do not meet by chance.
HASH_FIELDS = np.dtype([("segment", "u8", 2), ("file", "u8"), ("recording", "u8"), ("cut", "u8")])


class HoursTable(msgspec.Struct, forbid_unknown_fields=True):
    """Counts of records and seconds, and of what speaker tags and durations were made of; tables of parts add up.

    Attributes:
        sums: by dimension and value, of records that came in and that went on, and of their seconds; of origins, of the
            records alone.
    """

    sums: dict[str, dict[str, list[float]]] = {}

    def count_kept(self, utterance: Utterance, tag_from: str) -> None:
        """Count a record that passed the checks; ``tag_from`` is what its speaker tag was made of."""
        self._add("tag", tag_from, 1)
        self._add("duration", "header" if utterance.custom.get(DURATION_FROM_HEADER) else "record", 1)
        for key in filter(lambda key: _is_lost(utterance.custom[key]), utterance.custom):
            self._add("nan_as_null", key, 1)
        self._count(utterance.speaker, 1, 1, utterance.segment.duration, utterance.segment.duration)

    def count_rejected(self, record: Any) -> None:
        """Count a record that is rejected: a mapping, or the text of a line that is not JSON."""
        found = record if isinstance(record, dict) else {}
        duration, speaker = found.get("duration"), found.get("speaker")
        if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not 0 < duration <= MAX_SECONDS:
            duration = 0.0
        self._count(speaker if isinstance(speaker, str) else "", 1, 0, float(duration), 0.0)

    def count_notes(self, notes: Mapping[str, int]) -> None:
        """Count the notes that the source of a record makes with it."""
        for note, count in notes.items():
            self._add("noted", note, count)

    def move_to_rejected(self, utterance: Utterance) -> None:
        """Move a record that was counted as kept, and is a duplicate, to the rejected ones."""
        self._count(utterance.speaker, 0, -1, 0.0, -utterance.segment.duration)

    def add(self, other: "HoursTable") -> None:
        for dimension, row in other.sums.items():
            for value, numbers in row.items():
                self._add(dimension, value, *numbers)

    def doubts(self, num_recordings: int) -> list[str]:
        """Return a sentence about a speaker with most of the records that were kept, if there is one."""
        kept = Counter({name: int(row[1]) for name, row in self.sums.get("speaker", {}).items()})
        total = kept.total()
        return [
            f"{count / total:.0%} of {total:,} utterances from {num_recordings:,} recordings have the speaker "
            f"{name[:80]!r}: check that this is one person, and not a name that stands for many"
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
    """Return True if a value of a record is or holds NaN or an infinite number, which is stored as null."""
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


def hash_utterance(utterance: Utterance) -> tuple[tuple[int, int], int, int, int]:
    """Return hashes of the exact segment, of its file and channel, and of the two ids: a row of ``HASH_FIELDS``."""
    file = _file_text(utterance)
    segment = xxhash.xxh3_128_intdigest(_segment_text(utterance).encode())
    return (
        (segment >> 64, segment & (1 << 64) - 1),
        hash_text(file),
        hash_text(utterance.recording_id),
        # An id that was kept says nothing about the file.
        hash_text(f"{'' if SOURCE_CUT_ID in utterance.custom else file}\n{utterance.cut_id}"),
    )


@dataclass(frozen=True)
class Ids:
    """The duplicates and the ambiguous ids of an input.

    Attributes:
        duplicates: (N,) bool, by the number of the record: those whose segment was there before.
        ambiguous: (N,) bool, those with an id that stands for something else too.
        recordings: the hashes of recording ids that stand for more than one file.
        cuts: the hashes of cut ids that stand for more than one segment, of those made of paths within a file.
    """

    duplicates: np.ndarray
    ambiguous: np.ndarray
    recordings: frozenset[int]
    cuts: frozenset[int]

    @classmethod
    def of(cls, hashes: np.ndarray) -> "Ids":
        """Return those of an input, from rows (N,) of ``HASH_FIELDS``."""
        segment = find_first(*hashes["segment"].T)
        recordings = _has_several(hashes["recording"], hashes["file"])
        cuts = _has_several(hashes["cut"], segment)
        return cls(
            duplicates=segment != np.arange(len(hashes), dtype=np.uint32),
            ambiguous=recordings | cuts,
            recordings=frozenset(hashes["recording"][recordings].tolist()),
            cuts=frozenset(hashes["cut"][cuts].tolist()),
        )

    def make_unique(self, utterance: Utterance) -> None:
        """Give an utterance ids that no other one has.

        An ambiguous id gets a suffix made from what it stands for, so that it does not depend on the order of the
        input.
        """
        _, file, recording, cut = hash_utterance(utterance)
        if recording in self.recordings:
            utterance.recording_id += f"-{file:016x}"
            if SOURCE_CUT_ID not in utterance.custom:
                segment = utterance.segment
                utterance.cut_id = segment_id(utterance.recording_id, segment.offset, segment.duration)
        if cut in self.cuts:
            utterance.cut_id += f"-{hash_text(_segment_text(utterance)):016x}"


def _file_text(utterance: Utterance) -> str:
    segment = utterance.segment
    channel = "" if segment.channel is None else f"\n{segment.channel}"
    return f"{segment.root}/{segment.audio_filepath}{channel}"


def _segment_text(utterance: Utterance) -> str:
    return f"{_file_text(utterance)}\n{utterance.segment.offset!r}\n{utterance.segment.duration!r}"


def _has_several(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mark the entries whose key occurs with more than one value."""
    first = find_first(keys)
    several = np.zeros(len(keys), bool)
    several[first[values != values[first]]] = True
    return several[first]


class KnownRecords:
    """The cuts of a dataset, by what they were made of (path, channel, offset, duration) and by their ids.

    Args:
        directory: a finished dataset of sharmill's own.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: a file of cuts cannot be read, or a cut does not say what it was made of.
    """

    def __init__(self, directory: Path) -> None:
        files = [directory / shard.fields[CUTS].file for shard in ShardedDataset(directory).shards()]
        hashes = (number for file in files for _, one in read_utterances(file) for number in _known_by(one))
        # The last one is for what would stand behind all others.
        self._hashes = np.append(np.unique(np.fromiter(hashes, np.uint64)), np.uint64(0))

    def __contains__(self, utterance: Utterance) -> bool:
        wanted = np.array(_known_by(utterance), np.uint64)
        return bool((self._hashes[np.searchsorted(self._hashes[:-1], wanted)] == wanted).any())


def _known_by(utterance: Utterance) -> tuple[int, int]:
    segment = utterance.segment
    text = f"{segment.audio_filepath}\n{segment.channel}\n{segment.offset!r}\n{segment.duration!r}"
    return hash_text(text), hash_text(utterance.cut_id)


class PrepareStage(Stage):
    """The stage that checks every record; it writes ``manifests/<stem>_prepared.json`` and ``stats.json``."""

    kind: ClassVar[str] = "prepare"
    section: ClassVar = PrepareConfig
    cost_unit: ClassVar = "records"

    @classmethod
    def check(cls, config: Config) -> None:
        parse_filters(config.section(PrepareConfig).filters)
        make_speaker_key(config.speaker_key)

    def check_input(self) -> None:
        for source in self.config.sources:
            AudioRoots.of([source.audio_root]).check()
            source.check()
            source.check_speaker()

    def identity(self) -> dict[str, Any]:
        self.make_check().roots.check()
        roots = [
            identify_roots(AudioRoots.of([source.audio_root]), self.run_dir.path) for source in self.config.sources
        ]
        append_to = self.config.append_to
        # The place of the dataset, not its content: it has more once the new shards are appended.
        grows = {} if append_to is None else {"append_to": identify_folder(Path(append_to), self.run_dir.path)}
        return grows | {
            "prepare": asdict(self.config.section(PrepareConfig)),
            "speaker_key": self.config.speaker_key if self.config.has_contexts else None,
            "sources": [
                source.settings() | {"audio_root": folders[0] if len(folders) == 1 else folders}
                for source, folders in zip(self.config.sources, roots, strict=True)
            ],
            "input": [source.identity() for source in self.config.sources],
            "versions": versions(),
        }

    def plan(self, folder: Path) -> Iterator[Unit]:
        for index, (number, piece) in enumerate(self.pieces()):
            yield make_unit(
                index, cost=float(piece.num_records), size=piece.num_records,
                params={"source": number, "piece": piece.params},
            )  # fmt: skip

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of all sources, each with the number of its source."""
        for number, source in enumerate(self.config.sources):
            yield from ((number, piece) for piece in source.pieces(self.config.section(PrepareConfig).unit_records))

    def expect_units(self, num_records: float, cost: float) -> int:
        return max(1, math.ceil(num_records / self.config.section(PrepareConfig).unit_records))

    def check_node(self) -> None:
        self.make_check().roots.check_node()

    def open(self, device: str) -> Processor:
        return PrepareProcessor(self.make_check())

    def finalize(self, units: list[Unit], commits: list[Commit]) -> Totals:
        totals = add_up(commits)
        hours = HoursTable()
        for commit in commits:
            hours.add(load_record(self.root / commit.files[2].name, HoursTable))
        found, seconds, num_recordings = self._merge(commits, hours)
        result = Totals(
            num_in=totals.num_in,
            num_out=totals.num_out - found.total(),
            rejects=totals.rejects | found,
            hours=totals.hours - seconds / 3600,
        )
        stats = hours.report(result)
        write_atomic(self.run_dir.stats, msgspec.json.format(msgspec.json.encode(stats), indent=2) + b"\n")
        noted = [f"{count:,} {note}" for note, count in stats.get("noted", {}).items()]
        return replace(result, notes=noted + hours.doubts(num_recordings))

    def products(self) -> list[Path]:
        return [prepared_manifest(self.config), self.run_dir.stats]

    def make_check(self) -> RecordCheck:
        """Return the checks of a record, by the configuration."""
        prepare = self.config.section(PrepareConfig)
        return RecordCheck(
            config=prepare,
            filters=parse_filters(prepare.filters),
            roots=AudioRoots.of(
                (source.audio_root for source in self.config.sources),
                self.config.cache,
                (source.float_scale for source in self.config.sources),
            ),
            sources=self.config.sources,
            speakers=[source.speaker_rule(self.config.name) for source in self.config.sources],
            group_key=make_speaker_key(self.config.speaker_key if self.config.has_contexts else "all"),
        )

    def _merge(self, commits: list[Commit], hours: HoursTable) -> tuple[Counter[str], float, int]:
        """Write the prepared manifest, and append the rejects of records that are elsewhere already to the others.

        Returns:
            how many they are by reason, their seconds, and how many recordings all records are from.
        """
        parts = (load_stored_array(self.root / commit.files[1].name) for commit in commits)
        hashes = np.concatenate([np.empty(0, HASH_FIELDS), *parts])
        ids = Ids.of(hashes)
        known = KnownRecords(Path(self.config.append_to)) if self.config.append_to is not None else None
        found, seconds = Counter[str](), 0.0
        # The rejects of the units are merged anew before a stage is finalized once more.
        with (
            open_atomic(prepared_manifest(self.config)) as merged,
            open_stored(self.dir.rejects, append=True) as rejects,
        ):
            for number, line in enumerate(self._lines(commits)):
                if not (ids.duplicates[number] or ids.ambiguous[number] or known is not None):
                    merged.write(line)
                    continue
                utterance = Utterance.from_json(line)
                reason, why = "duplicate_id", "is the same segment as an earlier record"
                if not ids.duplicates[number]:
                    ids.make_unique(utterance)
                    if known is None or utterance not in known:
                        merged.write(utterance.to_json() + b"\n")
                        continue
                    reason, why = "already_there", "is in the dataset that is appended to"
                reject = Reject(self.kind, reason, f"{utterance.cut_id} {why}", utterance.public_record())
                rejects.write(reject.to_json() + b"\n")
                hours.move_to_rejected(utterance)
                found[reason] += 1
                seconds += utterance.segment.duration
            rejects.flush()
            os.fsync(rejects.fileno())
        return found, seconds, len(np.unique(hashes["file"]))

    def _lines(self, commits: list[Commit]) -> Iterator[bytes]:
        for commit in commits:
            with open_stored(self.root / commit.files[0].name) as part:
                yield from part


@dataclass(frozen=True)
class PrepareProcessor(Processor):
    """The checks of the records of pieces of the sources, in one rank."""

    check: RecordCheck

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        number = unit.params["source"]
        kept: list[Utterance] = []
        rejects: list[Reject] = []
        hours = HoursTable()
        check, lines = partial(self._outcome, number), self.check.sources[number].read(unit.params["piece"])
        outcomes: Iterator[tuple[Mapping[str, int], Any, Utterance | RejectRecord]] = map(check, lines)
        if any(map(is_url, self.check.sources[number].named("audio_root"))):
            # Audio is fetched of several at once.
            outcomes = prefetch(check, lines, threads=FETCHES_AT_ONCE, ahead=4 * FETCHES_AT_ONCE)
        for notes, record, found in outcomes:
            hours.count_notes(notes)
            if isinstance(found, RejectRecord):
                rejects.append(Reject(PrepareStage.kind, found.reason, found.detail, record, number))
                hours.count_rejected(record)
            else:
                kept.append(found)
                hours.count_kept(found, self.check.speakers[number].origin(record))
            advance(1.0)
        part = f"parts/{unit.index:06d}"
        write_lines(staging.path(f"{part}.jsonl"), (utterance.to_json() for utterance in kept))
        save_array(staging.path(f"{part}.npy"), np.array([hash_utterance(one) for one in kept], dtype=HASH_FIELDS))
        write_new(staging.path(f"{part}.stats.json"), msgspec.json.encode(hours))
        return Output(
            files=[f"{part}.jsonl", f"{part}.npy", f"{part}.stats.json"],
            num_out=len(kept),
            rejects=rejects,
            stats={"seconds": sum(utterance.segment.duration for utterance in kept)},
        )

    def _outcome(self, source: int, line: RawRecord) -> tuple[Mapping[str, int], Any, Utterance | RejectRecord]:
        """Return the notes of a record, the record or its text, and what the checks make of it."""
        record: Any = record_text(line).decode("utf-8", "replace")
        try:
            record = parse_record(line)
            member = line.member if isinstance(line, Described) else None
            return notes_of(line), record, self.check(record, source, member)
        except RejectRecord as reject:
            return notes_of(line), record, reject


def identify_roots(roots: AudioRoots, run_dir: Path) -> list[dict[str, Any]]:
    """Return what identifies audio roots in the identity of a plan: folders, however they are spelt, and URLs.

    The scale of floats is named if it is not 1.
    """
    return [
        ({"url": root.url} if root.url else identify_folder(root.path, run_dir))
        | ({} if root.float_scale == 1 else {"float_scale": root.float_scale})
        for root in roots.roots
    ]


def manifest_stem(config: Config) -> str:
    """Return how the manifests of a dataset are called: after its only manifest, or after the dataset."""
    return (config.sources[0].stem if len(config.sources) == 1 else None) or config.name


def prepared_manifest(config: Config) -> Path:
    """Return the path of the manifest that ``prepare`` leaves."""
    return RunDir(Path(config.run_dir)).manifests / f"{manifest_stem(config)}_prepared.json"
