"""Stage ``prepare``: one clean manifest and the rejects, from manifests as they come."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from sharmill.audio.fetch import FETCHES_AT_ONCE
from sharmill.audio.roots import AudioRoots
from sharmill.config import Config
from sharmill.engine.identity import identify_folder, versions
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Advance, Processor, Stage, add_up
from sharmill.engine.unit import Commit, Output, Totals, Unit, make_unit
from sharmill.errors import RejectRecord
from sharmill.files.staging import Staging
from sharmill.files.storage import open_atomic, open_stored, remove_for_good, write_atomic
from sharmill.files.stored import load_stored_array, read_stored, save_array
from sharmill.manifest import Reject, Utterance, write_lines
from sharmill.prefetch import prefetch
from sharmill.prepare.check import RecordCheck, parse_record
from sharmill.prepare.config import PrepareConfig
from sharmill.prepare.filters import parse_filters
from sharmill.prepare.ids import (
    HASH_FIELDS,
    IdKeeper,
    find_suspects,
    hash_utterance,
)
from sharmill.prepare.known import KnownRecords
from sharmill.prepare.speaker_key import make_speaker_key, whole_corpus
from sharmill.prepare.stats import HoursTable
from sharmill.sources import Located, RawRecord, Source, Unreadable, record_text


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
        append_to = self.config.append_to
        # Where it lies, and not what it has: it has more once the new shards are appended.
        grows = {} if append_to is None else {"append_to": identify_folder(Path(append_to), self.run_dir.path)}
        return grows | {
            "prepare": dataclasses.asdict(self.config.section(PrepareConfig)),
            "speaker_key": self.config.speaker_key if self.config.has_contexts else None,
            "sources": [self._identify(source) for source in self.config.sources],
            "input": [source.identity() for source in self.config.sources],
            "versions": versions(),
        }

    def _identify(self, source: Source) -> dict[str, Any]:
        folders = identify_roots(AudioRoots.of([source.audio_root]), self.run_dir.path)
        return source.settings() | {"audio_root": folders[0] if len(folders) == 1 else folders}

    def plan(self, folder: Path) -> Iterator[Unit]:
        index = 0
        for number, source in enumerate(self.config.sources):
            for piece in source.pieces(self.config.section(PrepareConfig).unit_records):
                params = {"source": number, "piece": piece.params}
                yield make_unit(index, cost=float(piece.num_records), size=piece.num_records, params=params)
                index += 1

    def expect_units(self, num_records: float, cost: float) -> int:
        return max(1, math.ceil(num_records / self.config.section(PrepareConfig).unit_records))

    def check_node(self) -> None:
        self.make_check().roots.check_node()

    def open(self, device: str) -> Processor:
        return PrepareProcessor(self.config.sources, self.make_check())

    def finalize(self, units: list[Unit], commits: Iterable[Commit]) -> Totals:
        commits = list(commits)
        totals = add_up(commits)
        hours = HoursTable()
        for commit in commits:
            hours.add(HoursTable.from_json(read_stored(self.root / commit.files[2].name)))
        found, seconds = self._merge(commits, hours)
        if found:
            self._append_rejects()
        rejects = totals.rejects | found
        result = Totals(
            num_in=totals.num_in,
            num_out=totals.num_out - sum(found.values()),
            rejects=rejects,
            hours=totals.hours - seconds / 3600,
        )
        write_atomic(
            self.run_dir.stats, msgspec.json.format(msgspec.json.encode(hours.report(result)), indent=2) + b"\n"
        )
        return result

    def products(self) -> list[Path]:
        return [prepared_manifest(self.config), self.run_dir.stats]

    def discard(self) -> None:
        remove_for_good((*self.products(), self._duplicates))

    def make_check(self) -> RecordCheck:
        """Return the checks of a record, by the configuration."""
        prepare = self.config.section(PrepareConfig)
        return RecordCheck(
            config=prepare,
            filters=parse_filters(prepare.filters),
            roots=AudioRoots.of((source.audio_root for source in self.config.sources), self.run_dir.copies),
            speakers=[source.speaker_rule(self.config.name) for source in self.config.sources],
            channels=[source.channel for source in self.config.sources],
            keep_ids=[source.keeps_ids for source in self.config.sources],
            group_key=make_speaker_key(self.config.speaker_key) if self.config.has_contexts else whole_corpus,
        )

    def _merge(self, commits: list[Commit], hours: HoursTable) -> tuple[dict[str, int], float]:
        """Write the prepared manifest and, aside, the rejects of records that are elsewhere already.

        Returns:
            how many they are by reason, and their seconds.
        """
        parts = (load_stored_array(self.root / commit.files[1].name) for commit in commits)
        suspects = find_suspects(np.concatenate([np.empty(0, HASH_FIELDS), *parts]))
        keeper = IdKeeper(suspects.recordings, suspects.cuts)
        known = KnownRecords(Path(self.config.append_to)) if self.config.append_to is not None else None
        found, seconds = Counter[str](), 0.0
        with open_atomic(prepared_manifest(self.config)) as merged, open_atomic(self._duplicates) as rejected:
            for position, line in enumerate(self._lines(commits)):
                if suspects.records[position] or known is not None:
                    utterance = Utterance.from_json(line)
                    reject = None
                    if suspects.repeated[position] and keeper.is_duplicate(utterance):
                        reject = _reject(utterance, "duplicate_id", "is the same segment as an earlier record")
                    else:
                        keeper.make_unique(utterance)
                        if known is not None and utterance in known:
                            reject = _reject(utterance, "already_there", "is in the dataset that is appended to")
                    if reject is not None:
                        rejected.write(reject.to_json() + b"\n")
                        hours.move_to_rejected(utterance)
                        found[reject.reason] += 1
                        seconds += utterance.duration
                        continue
                    line = utterance.to_json() + b"\n"
                merged.write(line)
        return dict(found), seconds

    def _lines(self, commits: list[Commit]) -> Iterator[bytes]:
        for commit in commits:
            with open_stored(self.root / commit.files[0].name) as part:
                yield from part

    @property
    def _duplicates(self) -> Path:
        return self.dir.path / "duplicates.jsonl"

    def _append_rejects(self) -> None:
        with open_atomic(self.dir.rejects) as merged:
            for path in (self.dir.rejects, self._duplicates):
                with open_stored(path) as part:
                    shutil.copyfileobj(part, merged)


class PrepareProcessor(Processor):
    """The checks of the records of pieces of the sources, in one rank."""

    def __init__(self, sources: Sequence[Source], check: RecordCheck) -> None:
        self._sources = sources
        self._check = check

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        number = unit.params["source"]
        kept: list[Utterance] = []
        rejects: list[Reject] = []
        hours = HoursTable()
        for record, found in self._outcomes(number, self._sources[number].read(unit.params["piece"])):
            if isinstance(found, RejectRecord):
                rejects.append(Reject(PrepareStage.kind, found.reason, found.detail, record, number))
                hours.count_rejected(record)
            else:
                kept.append(found)
                hours.count_kept(found, self._check.speakers[number].origin(record))
            advance(1.0)
        part = f"parts/{unit.index:06d}"
        write_lines(staging.path(f"{part}.jsonl"), (utterance.to_json() for utterance in kept))
        hashes = np.array([hash_utterance(utterance) for utterance in kept], dtype=HASH_FIELDS)
        save_array(staging.path(f"{part}.npy"), hashes)
        staging.path(f"{part}.stats.json").write_bytes(hours.to_json())
        return Output(
            files=[f"{part}.jsonl", f"{part}.npy", f"{part}.stats.json"],
            num_out=len(kept),
            rejects=rejects,
            stats={"seconds": sum(utterance.duration for utterance in kept)},
        )

    def _outcomes(self, source: int, lines: Iterator[RawRecord]) -> Iterator[tuple[Any, Utterance | RejectRecord]]:
        """Yield each record with what the checks make of it; where audio is fetched, of several at once."""
        if self._check.roots.fetches(source):
            return prefetch(partial(self._outcome, source), lines, threads=FETCHES_AT_ONCE, ahead=4 * FETCHES_AT_ONCE)
        return map(partial(self._outcome, source), lines)

    def _outcome(self, source: int, line: RawRecord) -> tuple[Any, Utterance | RejectRecord]:
        text = record_text(line)
        record: Any = text.decode("utf-8", "replace")
        try:
            if isinstance(line, Unreadable):
                raise RejectRecord(line.reason, line.detail)
            record = parse_record(text)
            return record, self._check(record, source, line.member if isinstance(line, Located) else None)
        except RejectRecord as reject:
            return record, reject


def _reject(utterance: Utterance, reason: str, why: str) -> Reject:
    return Reject(PrepareStage.kind, reason, f"{utterance.cut_id} {why}", utterance.public_record())


def identify_roots(roots: AudioRoots, run_dir: Path) -> list[dict[str, str]]:
    """Return what identifies audio roots in the identity of a plan: folders, however they are spelt, and URLs."""
    return [{"url": root.url} if root.url else identify_folder(root.path, run_dir) for root in roots.roots]


def manifest_stem(config: Config) -> str:
    """Return how the manifests of a dataset are called: after its only manifest, or after the dataset."""
    stem = config.sources[0].stem if len(config.sources) == 1 else None
    return stem or config.name


def prepared_manifest(config: Config) -> Path:
    """Return the path of the manifest that ``prepare`` leaves."""
    return RunDir(Path(config.run_dir)).manifests / f"{manifest_stem(config)}_prepared.json"
