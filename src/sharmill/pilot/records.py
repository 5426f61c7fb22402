"""The records of a pilot: all are read for their speaker groups, those of the sample are checked as prepare does."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from sharmill.audio.containers import read_member
from sharmill.audio.files import probe, probe_bytes
from sharmill.config import Config
from sharmill.errors import RejectRecord
from sharmill.manifest import Utterance
from sharmill.pilot.sample import Sample, draw_groups
from sharmill.prepare.check import RecordCheck, parse_record
from sharmill.prepare.config import PrepareConfig
from sharmill.prepare.stage import PrepareStage
from sharmill.sources import Located, Piece, RawRecord, Unreadable, record_text


@dataclass
class PilotRecords:
    """A sample of the input, checked.

    Attributes:
        num_records: of the whole input.
        sample: the records that were drawn.
        utterances: those that passed the checks; ``index`` is the place in the sample.
        rejects: of the others, by the place in the sample.
        formats: numbers of files by format, sampling rate and channels.
        seconds_to_read, seconds_to_check: of all records, and of those in the sample.
    """

    num_records: int
    sample: Sample
    utterances: list[Utterance] = field(default_factory=list)
    rejects: dict[int, RejectRecord] = field(default_factory=dict)
    formats: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    seconds_to_read: float = 0.0
    seconds_to_check: float = 0.0


def read_pilot(config: Config, size: int, seed: int) -> PilotRecords:
    """Draw whole speaker groups of the sources until there are ``size`` records, and check these.

    Raises:
        ConfigError: a source cannot be used.
    """
    check = PrepareStage(config).make_check()
    check.roots.check()
    pieces = [
        (number, piece)
        for number, source in enumerate(config.sources)
        for piece in source.pieces(config.section(PrepareConfig).unit_records)
    ]
    started = time.monotonic()
    groups = _read_groups(config, check, pieces)
    found = PilotRecords(len(groups), draw_groups(groups, size, seed), seconds_to_read=time.monotonic() - started)
    started = time.monotonic()
    for place, (number, raw) in enumerate(_read_rows(config, pieces, found.sample.rows.tolist())):
        try:
            record, member = _decode(raw)
            utterance = check(record, number, member)
            utterance.index = place
            _note_format(found, check, utterance)
        except RejectRecord as reject:
            found.rejects[place] = reject
        else:
            found.utterances.append(utterance)
    found.seconds_to_check = time.monotonic() - started
    return found


def _read_groups(config: Config, check: RecordCheck, pieces: list[tuple[int, Piece]]) -> np.ndarray:
    """Return the number of the speaker group of every record (N,)."""
    hashes = array("Q")
    for number, piece in pieces:
        for raw in config.sources[number].read(piece.params):
            try:
                record, member = _decode(raw)
                key = check.group(record, number, member)
            except RejectRecord:
                key = f"\0{len(hashes)}"  # a record without a group is one of its own
            hashes.append(xxhash.xxh3_64_intdigest(key.encode()))
    return np.unique(np.frombuffer(hashes, np.uint64), return_inverse=True)[1].astype(np.int64)


def _read_rows(config: Config, pieces: list[tuple[int, Piece]], rows: list[int]) -> Iterator[tuple[int, RawRecord]]:
    """Yield the source and the raw record of each number, in increasing order; only their pieces are read."""
    wanted = iter(rows)
    row = next(wanted, None)
    begins = accumulate((piece.num_records for _, piece in pieces), initial=0)
    for begin, (number, piece) in zip(begins, pieces, strict=False):
        if row is None:
            return
        if row >= begin + piece.num_records:
            continue
        for position, raw in enumerate(config.sources[number].read(piece.params), begin):
            if position == row:
                yield number, raw
                row = next(wanted, None)


def _decode(raw: RawRecord) -> tuple[dict[str, Any], Any]:
    if isinstance(raw, Unreadable):
        raise RejectRecord(raw.reason, raw.detail)
    return parse_record(record_text(raw)), raw.member if isinstance(raw, Located) else None


def _note_format(found: PilotRecords, check: RecordCheck, utterance: Utterance) -> None:
    path, member = check.roots.locate(utterance.segment), utterance.member
    info = probe(path) if member is None else probe_bytes(read_member(path, member), utterance.audio_filepath)
    found.formats[info.format, info.sampling_rate, info.channels] += 1
