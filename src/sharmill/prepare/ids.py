"""Duplicates and ambiguous ids over a whole input, found from 64-bit hashes: 32 bytes a record."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xxhash

from sharmill.engine.hashes import find_first
from sharmill.manifest import SOURCE_CUT_ID, Utterance, segment_id

HASH_FIELDS = np.dtype([("segment", "u8"), ("file", "u8"), ("recording", "u8"), ("cut", "u8")])


def hash_utterance(utterance: Utterance) -> tuple[int, int, int, int]:
    """Return hashes of the exact segment, of its file and channel, and of the two ids, for ``find_suspects``."""
    file = _file_text(utterance)
    return (
        _hash(_segment_text(utterance)),
        _hash(file),
        _hash(utterance.recording_id),
        # An id that was kept says nothing about the file.
        _hash(f"{'' if SOURCE_CUT_ID in utterance.custom else file}\n{utterance.cut_id}"),
    )


@dataclass(frozen=True)
class Suspects:
    """The records of an input that have to be looked at again, as they may be a duplicate or share an id.

    All others are known to be unique.

    Attributes:
        records: (N,) bool, by the number of the record.
        repeated: (N,) bool, those that may be a duplicate, or have one.
        recordings: the hashes of recording ids that stand for more than one file.
        cuts: the hashes of cut ids that stand for more than one segment, of those made of paths within a file.
    """

    records: np.ndarray
    repeated: np.ndarray
    recordings: frozenset[int]
    cuts: frozenset[int]


def find_suspects(hashes: np.ndarray) -> Suspects:
    """Find the records that may be a duplicate or share an id, from rows (N,) of ``HASH_FIELDS``."""
    each = np.arange(len(hashes))
    repeated = _has_several(hashes["segment"], each)
    recordings = _has_several(hashes["recording"], hashes["file"])
    cuts = _has_several(hashes["cut"], hashes["segment"])
    return Suspects(
        records=repeated | recordings | _has_several(hashes["cut"], each),
        repeated=repeated,
        recordings=frozenset(hashes["recording"][recordings].tolist()),
        cuts=frozenset(hashes["cut"][cuts].tolist()),
    )


@dataclass
class IdKeeper:
    """A pass over the suspects in the order of the input that tells duplicates and makes ids unique.

    An ambiguous id gets a suffix made from what it stands for, so that it does not depend on the order of the input.
    """

    recordings: frozenset[int]
    cuts: frozenset[int]
    _seen: set[bytes] = field(default_factory=set)

    def is_duplicate(self, utterance: Utterance) -> bool:
        """Return True if this segment was here before: told from 128 bits, which do not meet by chance."""
        key = xxhash.xxh3_128_digest(_segment_text(utterance).encode())
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def make_unique(self, utterance: Utterance) -> None:
        """Give the utterance ids that no other one has."""
        segment, file, recording, cut = hash_utterance(utterance)
        if recording in self.recordings:
            utterance.recording_id += f"-{file:016x}"
            if SOURCE_CUT_ID not in utterance.custom:
                utterance.cut_id = segment_id(utterance.recording_id, utterance.offset, utterance.duration)
        if cut in self.cuts:
            utterance.cut_id += f"-{segment:016x}"


def _file_text(utterance: Utterance) -> str:
    channel = "" if utterance.channel is None else f"\n{utterance.channel}"
    return f"{utterance.root}/{utterance.audio_filepath}{channel}"


def _segment_text(utterance: Utterance) -> str:
    return f"{_file_text(utterance)}\n{utterance.offset!r}\n{utterance.duration!r}"


def _has_several(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mark the entries whose key occurs with more than one value."""
    first = find_first(keys)
    several = np.zeros(len(keys), bool)
    several[first[values != values[first]]] = True
    return several[first]


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
