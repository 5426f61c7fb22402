"""The unique segments of a dataset's stored audio.

A place is an item of an audio field of a shard. Places are numbered through the dataset: all targets in the order of
the shards, then all contexts. Places with the same bytes hold one segment, whose owner is the first of them. Segments
are numbered in the order in which they are encoded: by place, except that neighbours are sorted by length.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from sharmill.engine.hashes import find_first
from sharmill.files.arrays import load_stored_array, write_array
from sharmill.files.atomic import open_atomic

# The place of an item's data in its file, and facts from its metadata.
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


def seconds_of(segments: np.ndarray) -> np.ndarray:
    """Return the durations of segments in seconds, float64."""
    return np.asarray(segments["place"]["num_samples"] / segments["place"]["sampling_rate"])


def merge_tables(
    tables: list[Path], shape: tuple[int, int], segments_file: Path, numbers_file: Path, *, window: int = _WINDOW
) -> None:
    """Write the unique segments of a dataset, and their numbers at all places.

    Args:
        tables: for each shard an array (audio fields, cuts) of ``PLACE``.
        shape: numbers of audio fields and of cuts of the dataset.
        window: number of segments that are sorted by length together.
    """
    # Its name lasts with the fsync of the stage's folder that comes before done.json.
    segments_file.parent.mkdir(exist_ok=True)
    # Copies: a view would keep the whole table.
    parts = (table["hash"].copy() for _, _, table in _read_tables(tables, shape[0]))
    hashes = np.concatenate([np.empty((0, 2), np.uint64), *parts])
    # For each place the first place that has the same hash.
    owners = find_first(*hashes.T)
    del hashes
    count = int(np.count_nonzero(owners == np.arange(len(owners), dtype=np.uint32)))
    numbers = np.empty(len(owners), np.uint32)

    def number_segments() -> Iterator[np.ndarray]:
        number = 0
        for segments, places in _sorted_segments(_read_tables(tables, shape[0]), owners, window):
            numbers[places] = np.arange(number, number + len(places), dtype=np.uint32)
            number += len(places)
            yield segments

    with open_atomic(segments_file) as stream:
        write_array(stream, SEGMENT, (count,), number_segments())
    with open_atomic(numbers_file) as stream:
        write_array(stream, np.dtype("<u4"), shape, [numbers[owners]])


def _sorted_segments(
    tables: Iterable[tuple[int, int, np.ndarray]], owners: np.ndarray, window: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the segments, arrays of ``SEGMENT``, in the order of their numbers, and the places of their owners."""
    place = 0
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for shard, field, table in tables:
        here = np.arange(place, place + len(table), dtype=np.uint32)
        place += len(table)
        own = owners[here] == here
        segments = np.empty(int(own.sum()), SEGMENT)
        segments["place"], segments["shard"], segments["field"] = table[own], shard, field
        found.append((segments, here[own]))
        if sum(len(places) for _, places in found) >= window:
            yield _sort_by_length(found)
            found = []
    if found:
        yield _sort_by_length(found)


def _sort_by_length(found: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    segments, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(-seconds_of(segments), kind="stable")
    return segments[order], places[order]


def _read_tables(paths: list[Path], num_fields: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield shard, field and the ``PLACE`` records of every file of audio, in the order of the places."""
    for field in range(num_fields):
        for shard, path in enumerate(paths):
            yield shard, field, load_stored_array(path)[field]
