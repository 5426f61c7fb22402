"""Detection of duplicates and ambiguous ids in the whole input, and of records that a finished dataset already has.

Records are compared by hashes, which take 40 bytes per record of the input and 16 bytes per cut of the dataset.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from sharmill.engine.hashes import find_first
from sharmill.files.checksums import hash_text
from sharmill.manifest import SOURCE_CUT_ID, Utterance, segment_id
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import CUTS
from sharmill.shar.manifests import read_utterances

# A segment is identified by a hash of 128 bits, so that collisions are negligible.
HASH_FIELDS: Final = np.dtype([("segment", "u8", 2), ("file", "u8"), ("recording", "u8"), ("cut", "u8")])


def hash_utterance(utterance: Utterance) -> tuple[tuple[int, int], int, int, int]:
    """Return a row of ``HASH_FIELDS``: hashes of the segment, its file and channel, its recording id and its cut id."""
    file = _file_text(utterance)
    segment = xxhash.xxh3_128_intdigest(_segment_text(utterance).encode())
    return (
        (segment >> 64, segment & (1 << 64) - 1),
        hash_text(file),
        hash_text(utterance.recording_id),
        # An id that is kept from the source must be unique across all files.
        hash_text(f"{'' if SOURCE_CUT_ID in utterance.custom else file}\n{utterance.cut_id}"),
    )


@dataclass(frozen=True)
class Ids:
    """The duplicates and ambiguous ids of an input.

    Attributes:
        duplicates: (N,) bool by record number; True if an earlier record has the same segment.
        ambiguous: (N,) bool by record number; True if the recording id also names another file, or the cut id another
            segment.
        recordings: hashes of recording ids that name more than one file.
        cuts: hashes of cut ids that name more than one segment. An id derived from a path is hashed together with its
            file.
    """

    duplicates: np.ndarray
    ambiguous: np.ndarray
    recordings: frozenset[int]
    cuts: frozenset[int]

    @classmethod
    def from_hashes(cls, hashes: np.ndarray) -> "Ids":
        """Find duplicates and ambiguous ids in rows (N,) of ``HASH_FIELDS``."""
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
        """Make the ids of an utterance unique.

        An ambiguous id gets a hash of the file or segment as a suffix, so that the new id does not depend on the order
        of the input.
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
    """Return an (N,) bool mask of the entries whose key occurs with more than one value."""
    first = find_first(keys)
    several = np.zeros(len(keys), bool)
    several[first[values != values[first]]] = True
    return several[first]


class KnownRecords:
    """The records that a dataset already has, by origin (path, channel, offset, duration) and by cut id.

    Args:
        directory: a finished dataset written by sharmill.

    Raises:
        ConfigError: the dataset does not exist or is not finished.
        DamagedShard: a file of cuts is unreadable, or a cut does not name its origin.
    """

    def __init__(self, directory: Path) -> None:
        files = [directory / shard.fields[CUTS].file for shard in ShardedDataset(directory).shards()]
        hashes = (number for file in files for _, one in read_utterances(file) for number in _origin_hashes(one))
        # The last entry is a sentinel, which searchsorted finds for hashes greater than all others.
        self._hashes = np.append(np.unique(np.fromiter(hashes, np.uint64)), np.uint64(0))

    def __contains__(self, utterance: Utterance) -> bool:
        wanted = np.array(_origin_hashes(utterance), np.uint64)
        return bool((self._hashes[np.searchsorted(self._hashes[:-1], wanted)] == wanted).any())


def _origin_hashes(utterance: Utterance) -> tuple[int, int]:
    segment = utterance.segment
    text = f"{segment.audio_filepath}\n{segment.channel}\n{segment.offset!r}\n{segment.duration!r}"
    return hash_text(text), hash_text(utterance.cut_id)
