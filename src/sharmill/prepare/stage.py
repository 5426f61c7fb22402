"""The stage ``prepare``: it turns the input manifests into one clean manifest, rejects and statistics."""

import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from sharmill.audio.roots import AudioRoots
from sharmill.config import Config
from sharmill.engine.stage import Advance, Processor, Stage, StageRun, identify_folder, versions
from sharmill.engine.unit import Output, Totals, Unit, add_up, make_unit
from sharmill.errors import RejectRecord, refuse
from sharmill.files.arrays import load_array_and_rest, save_array
from sharmill.files.atomic import open_atomic, write_atomic
from sharmill.files.clients import FETCHES_AT_ONCE
from sharmill.files.location import is_url
from sharmill.files.staging import Staging
from sharmill.files.stored import decode_stored, open_stored
from sharmill.manifest import (
    Reject,
    Utterance,
)
from sharmill.prefetch import prefetch
from sharmill.prepare.check import PrepareConfig, RecordCheck, parse_filters, parse_record
from sharmill.prepare.duplicates import HASH_FIELDS, Ids, KnownRecords, hash_utterance
from sharmill.prepare.hours import HoursTable
from sharmill.sources import DescribedRecord, Piece, RawRecord, Source, notes_of, record_text
from sharmill.stages.inputs import identify_roots, manifest_stem
from sharmill.stages.lines import FIRST_OF_GROUP, LINE, finish_manifest, merge_columns, number_groups, write_part
from sharmill.stages.speaker_key import SpeakerKey, key_of, make_speaker_key


class PrepareStage(Stage):
    """The stage that checks every record and writes ``manifests/<stem>_prepared.json`` and ``stats.json``."""

    kind = "prepare"
    section = PrepareConfig
    cost_unit = "records"

    def check(self, config: Config) -> None:
        parse_filters(config.section(PrepareConfig).filters)
        make_speaker_key(config.speaker_key)

    def input(self, run: StageRun) -> "PrepareInput":
        return PrepareInput(run.config.sources, make_check(run.config).roots)

    def identity(self, run: StageRun) -> dict[str, Any]:
        config = run.config
        make_check(config).roots.check()
        roots = [identify_roots(AudioRoots.of([source.audio_root]), run.run_dir.path) for source in config.sources]
        append_to = config.append_to
        # Identify the dataset by its location, because its content changes once the new shards are appended.
        grows = {} if append_to is None else {"append_to": identify_folder(Path(append_to), run.run_dir.path)}
        return grows | {
            "prepare": asdict(run.settings),
            "speaker_key": config.prepared_key if config.has_contexts else None,
            "sources": [
                source.settings() | {"audio_root": folders[0] if len(folders) == 1 else folders}
                for source, folders in zip(config.sources, roots, strict=True)
            ],
            "input": [source.identity() for source in config.sources],
            "versions": versions(),
        }

    def plan(self, run: StageRun) -> Iterator[Unit]:
        for index, (number, piece) in enumerate(pieces_of(run.config)):
            yield make_unit(
                index, cost=float(piece.num_records), size=piece.num_records,
                params={"source": number, "piece": piece.params},
            )  # fmt: skip

    def expect_units(self, run: StageRun, num_records: float, cost: float) -> int:
        return max(1, math.ceil(num_records / run.settings.unit_records))

    def open(self, run: StageRun, device: str) -> Processor:
        # The key of groups applies only to contexts, but a dataset without contexts may still be ordered by speaker.
        key = make_speaker_key(run.config.prepared_key if run.config.has_contexts else "speaker")
        return PrepareProcessor(make_check(run.config), key)

    def finalize(self, run: StageRun) -> Totals:
        totals = add_up(run.commits)
        hours = HoursTable()
        manifest = run.run_dir.manifests / f"{manifest_stem(run.config)}_prepared.json"
        merged = self._merge(run, manifest, hours)
        result = replace(
            totals,
            num_out=totals.num_out - merged.rejects.total(),
            rejects=totals.rejects | merged.rejects,
            hours=totals.hours - merged.seconds / 3600,
        )
        stats = hours.report(result)
        write_atomic(run.run_dir.stats, msgspec.json.format(msgspec.json.encode(stats), indent=2) + b"\n")
        noted = [f"{count:,} {note}" for note, count in stats.get("noted", {}).items()]
        result = replace(result, notes=noted + hours.doubts(merged.num_recordings))
        parts = [run.root / commit.files[1].name for commit in run.commits]
        columns = merge_columns(
            run.dir.merged, parts, ["seconds", "group"], count=len(merged.lengths), lengths=np.asarray(merged.lengths),
            kept=merged.kept,
        )  # fmt: skip
        columns |= {FIRST_OF_GROUP: number_groups(columns["group"]), "stats": run.run_dir.stats}
        return finish_manifest(run, manifest, columns, result, duration_tolerance=run.settings.duration_tolerance)

    def _merge(self, run: StageRun, manifest: Path, hours: HoursTable) -> "MergeResult":
        """Write the prepared manifest, and append rejects for duplicates and for records that the dataset already has.

        Args:
            hours: table to which the tables of all parts are added.
        """
        parts = [np.empty(0, HASH_FIELDS)]
        for commit in run.commits:
            rows, rest = load_array_and_rest(path := run.root / commit.files[1].name)
            parts.append(rows[list(HASH_FIELDS.names or ())].astype(HASH_FIELDS))
            hours.add(decode_stored(path, rest, HoursTable))
        hashes = np.concatenate(parts)
        ids = Ids.from_hashes(hashes)
        append_to = run.config.append_to
        known = KnownRecords(Path(append_to)) if append_to is not None else None
        done = MergeResult(np.ones(len(hashes), bool), len(np.unique(hashes["file"])))
        # Appending is safe: if the stage is finalized again, the file is first rewritten from the rejects of its units.
        with (
            open_atomic(manifest) as stream,
            open_stored(run.dir.rejects, append=True) as rejects,
        ):
            for number, line in enumerate(_lines(run)):
                if not (ids.duplicates[number] or ids.ambiguous[number] or known is not None):
                    done.lengths.append(stream.write(line))
                    continue
                utterance = Utterance.from_json(line)
                reason, why = "duplicate_id", "is the same segment as an earlier record"
                if not ids.duplicates[number]:
                    ids.make_unique(utterance)
                    if known is None or utterance not in known:
                        done.lengths.append(stream.write(utterance.to_json() + b"\n"))
                        continue
                    reason, why = "already_there", "is already in the dataset that is appended to"
                reject = Reject(self.kind, reason, f"{utterance.cut_id} {why}", utterance.public_record())
                rejects.write(reject.to_json() + b"\n")
                hours.move_to_rejected(utterance)
                done.kept[number] = False
                done.rejects[reason] += 1
                done.seconds += utterance.segment.duration
            rejects.flush()
            os.fsync(rejects.fileno())
        return done


@dataclass
class MergeResult:
    """The outcome of merging the parts of a manifest.

    Attributes:
        kept: (N,) bool; True for each record of the parts that is in the manifest.
        num_recordings: number of recordings in the parts.
        lengths: length of each line of the manifest in bytes.
        rejects: number of dropped records by reason.
        seconds: total duration of the dropped records.
    """

    kept: np.ndarray
    num_recordings: int
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    rejects: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def _lines(run: StageRun) -> Iterator[bytes]:
    for commit in run.commits:
        with open_stored(run.root / commit.files[0].name) as part:
            yield from part


def _require_sources(sources: Sequence[Source]) -> None:
    refuse((not sources, "prepare needs sources; name at least one manifest or other input"), code="missing_key")


def pieces_of(config: Config) -> Iterator[tuple[int, Piece]]:
    """Yield (source number, piece) for all sources; raise ConfigError if there are none."""
    _require_sources(config.sources)
    for number, source in enumerate(config.sources):
        yield from ((number, piece) for piece in source.pieces(config.section(PrepareConfig).unit_records))


def make_check(config: Config) -> RecordCheck:
    """Return the checks that a configuration requires of every record."""
    prepare = config.section(PrepareConfig)
    return RecordCheck(
        config=prepare,
        filters=parse_filters(prepare.filters),
        roots=AudioRoots.of(
            (source.audio_root for source in config.sources),
            config.cache,
            (source.float_scale for source in config.sources),
        ),
        sources=config.sources,
        speakers=[source.speaker_rule(config.name) for source in config.sources],
        group_key=make_speaker_key(config.prepared_key if config.has_contexts else "all"),
    )


@dataclass(frozen=True)
class PrepareInput:
    """The sources of a dataset and the folders with their audio."""

    sources: Sequence[Source]
    roots: AudioRoots

    def check(self) -> None:
        _require_sources(self.sources)
        for source in self.sources:
            # Check the source before its audio root: the source's messages name its own keys, one of which may
            # determine the audio root.
            source.check()
            AudioRoots.of([source.audio_root]).check()
            source.check_keys()

    def check_node(self) -> None:
        self.roots.check_node()


@dataclass(frozen=True)
class PrepareProcessor(Processor):
    """Reads and checks the records of the units that one rank processes."""

    check: RecordCheck
    speaker_key: SpeakerKey

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        number = unit.params["source"]
        kept: list[Utterance] = []
        rejects: list[Reject] = []
        hours = HoursTable()
        check, lines = partial(self._outcome, number), self.check.sources[number].read(unit.params["piece"])
        outcomes: Iterator[tuple[Mapping[str, int], Any, Utterance | RejectRecord]] = map(check, lines)
        if any(map(is_url, self.check.sources[number].named("audio_root"))):
            # Fetch the audio of several records at once.
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
        name = f"parts/{unit.index:06d}"
        columns = write_part(staging.path(f"{name}.jsonl"), kept, partial(key_of, self.speaker_key))
        hashes = np.array([hash_utterance(one) for one in kept], dtype=HASH_FIELDS)
        rows = np.empty(len(kept), np.dtype(LINE.descr + HASH_FIELDS.descr))
        for part in (columns, hashes):
            for key in part.dtype.names or ():
                rows[key] = part[key]
        save_array(staging.path(f"{name}.npy"), rows, msgspec.json.encode(hours))
        return Output(
            files=[f"{name}.jsonl", f"{name}.npy"],
            num_out=len(kept),
            rejects=rejects,
            stats={"seconds": sum(utterance.segment.duration for utterance in kept)},
        )

    def _outcome(self, source: int, line: RawRecord) -> tuple[Mapping[str, int], Any, Utterance | RejectRecord]:
        """Return the notes of a record; the record, or its text if decoding fails; and its utterance or reject."""
        record: Any = record_text(line).decode("utf-8", "replace")
        try:
            record = parse_record(line)
            member = line.member if isinstance(line, DescribedRecord) else None
            return notes_of(line), record, self.check(record, source, member)
        except RejectRecord as reject:
            return notes_of(line), record, reject
