"""Tables of the stored audio of a dataset: its places, and the unique segments that lie at them.

A place is an item of an audio field of a shard. Places are numbered through the dataset: all targets in the order of
the shards, then all contexts. Places with the same bytes hold one segment, whose owner is the first of them. Segments
are numbered in the order in which they are encoded: by place, except that neighbours are sorted by length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import numpy as np
import xxhash

HASH: Final = np.dtype(("<u8", 2))
# Where the data of an item lies in its file, and what its metadata say of it.
PLACE: Final = np.dtype(
    [("hash", HASH), ("offset", "<i8"), ("size", "<i8"), ("num_samples", "<u4"), ("sampling_rate", "<u4")]
)
# The owner of a segment: ``field`` counts the audio fields of the dataset.
SEGMENT: Final = np.dtype([("place", PLACE), ("shard", "<u4"), ("field", "<u4")])

# Hashes that are sorted at once, which takes 60 bytes of memory each, and read at once.
_SORTED_AT_ONCE: Final = 1 << 23
_READ_AT_ONCE: Final = 1 << 20
# Segments that are sorted by length together: enough for batches of equal lengths, few enough for a shard's segments
# to stay near each other.
_WINDOW: Final = 1 << 15


def hash_segment(data: bytes | memoryview, num_samples: int, sampling_rate: int) -> tuple[int, int]:
    """Return the two halves of the xxh3-128 of stored audio; other metadata make another segment of the same bytes."""
    digest = xxhash.xxh3_128_intdigest(data, seed=sampling_rate << 32 | num_samples)
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def find_owners(hashes: BinaryIO, num_places: int) -> np.ndarray:
    """Return for each place (P,) uint32 the first place that has the same hash.

    The hashes, a file of ``HASH`` for each place, are gone through once for each range of their first half that fits
    in memory.
    """
    assert num_places < 1 << 32
    owners = np.empty(num_places, np.uint32)
    passes = max(1, -(-num_places // _SORTED_AT_ONCE))
    width = -(-(1 << 64) // passes)
    for low in range(0, 1 << 64, width):
        high = min(low + width, 1 << 64) - 1
        chosen = [
            (begin + inside, part[inside])
            for begin, part in _read_hashes(hashes, num_places)
            if len(inside := np.flatnonzero((part[:, 0] >= np.uint64(low)) & (part[:, 0] <= np.uint64(high))))
        ]
        if not chosen:
            continue
        places = np.concatenate([found for found, _ in chosen])
        keys = np.concatenate([part for _, part in chosen])
        del chosen
        # Stable: of places with the same hash, the first one stays the first.
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        places, keys = places[order], keys[order]
        begins = np.ones(len(places), bool)
        begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        owners[places] = places[begins][np.cumsum(begins) - 1]
    return owners


def _read_hashes(hashes: BinaryIO, num_places: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of the first place of each part of the file, and its hashes (n, 2)."""
    hashes.seek(0)
    for begin in range(0, num_places, _READ_AT_ONCE):
        data = hashes.read(HASH.itemsize * min(_READ_AT_ONCE, num_places - begin))
        yield begin, np.frombuffer(data, "<u8").reshape(-1, 2)


class SegmentNumbers:
    """The numbers of segments, given as their owners come by.

    Args:
        owners: for each place (P,) the first place that has the same hash.
    """

    def __init__(self, owners: np.ndarray) -> None:
        self._owners = owners
        self._numbers = np.empty(len(owners), np.uint32)

    def sort(self, tables: Iterable[tuple[int, int, np.ndarray]]) -> Iterator[np.ndarray]:
        """Yield the segments, arrays of ``SEGMENT``, in the order of their numbers.

        Args:
            tables: of each file in the order of the places: shard, field and its ``PLACE`` records.
        """
        place = number = 0
        window: list[np.ndarray] = []
        places: list[np.ndarray] = []
        for shard, field, table in tables:
            here = np.arange(place, place + len(table), dtype=np.uint32)
            own = self._owners[place : place + len(table)] == here
            segments = np.empty(int(own.sum()), SEGMENT)
            segments["place"], segments["shard"], segments["field"] = table[own], shard, field
            window.append(segments)
            places.append(here[own])
            place += len(table)
            if sum(map(len, window)) >= _WINDOW:
                yield self._number(number, np.concatenate(window), np.concatenate(places))
                number += sum(map(len, window))
                window, places = [], []
        if window:
            yield self._number(number, np.concatenate(window), np.concatenate(places))

    def _number(self, first: int, segments: np.ndarray, places: np.ndarray) -> np.ndarray:
        order = np.argsort(-seconds_of(segments), kind="stable")
        self._numbers[places[order]] = np.arange(first, first + len(order), dtype=np.uint32)
        return segments[order]

    def of_places(self) -> Iterator[np.ndarray]:
        """Yield the number of the segment of each place, in parts; once all segments have come by."""
        for begin in range(0, len(self._owners), _READ_AT_ONCE):
            yield self._numbers[self._owners[begin : begin + _READ_AT_ONCE]]


def seconds_of(segments: np.ndarray) -> np.ndarray:
    """Return the durations of segments in seconds, float64."""
    return np.asarray(segments["place"]["num_samples"] / segments["place"]["sampling_rate"])
