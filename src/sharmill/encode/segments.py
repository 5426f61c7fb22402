"""Tables of the stored audio of a dataset: its places, and the unique segments that lie at them.

A place is an item of an audio field of a shard. Places are numbered through the dataset: all targets in the order of
the shards, then all contexts. Places with the same bytes hold one segment, whose owner is the first of them. Segments
are numbered in the order in which they are encoded: by place, except that neighbours are sorted by length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import xxhash

# Where the data of an item lies in its file, and what its metadata say of it.
PLACE: Final = np.dtype(
    [("hash", "<u8", 2), ("offset", "<i8"), ("size", "<i8"), ("num_samples", "<u4"), ("sampling_rate", "<u4")]
)
# The owner of a segment: ``field`` counts the audio fields of the dataset.
SEGMENT: Final = np.dtype([("place", PLACE), ("shard", "<u4"), ("field", "<u4")])

# Segments that are sorted by length together: enough for batches of equal lengths, few enough for a shard's segments
# to stay near each other.
_WINDOW: Final = 1 << 15


def hash_segment(data: bytes | memoryview, num_samples: int, sampling_rate: int) -> tuple[int, int]:
    """Return the two halves of the xxh3-128 of stored audio; other metadata make another segment of the same bytes."""
    digest = xxhash.xxh3_128_intdigest(data, seed=sampling_rate << 32 | num_samples)
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


class SegmentNumbers:
    """The numbers of segments, given as their owners come by.

    Args:
        owners: for each place (P,) the first place that has the same hash.
    """

    def __init__(self, owners: np.ndarray) -> None:
        self._owners = owners
        self._numbers = np.empty(len(owners), np.uint32)

    def count(self) -> int:
        """Return the number of segments: of places that are their own owners."""
        return int(np.count_nonzero(self._owners == np.arange(len(self._owners), dtype=np.uint32)))

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

    def of_places(self) -> np.ndarray:
        """Return the number of the segment of each place (P,) uint32; once all segments have come by."""
        return self._numbers[self._owners]


def seconds_of(segments: np.ndarray) -> np.ndarray:
    """Return the durations of segments in seconds, float64."""
    return np.asarray(segments["place"]["num_samples"] / segments["place"]["sampling_rate"])
