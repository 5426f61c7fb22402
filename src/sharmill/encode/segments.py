"""Unique segments of a dataset's stored audio.

A place is an item of an audio field of a shard. Places are numbered across the dataset: all targets in the order of
shards, then all contexts. Places with equal bytes contain the same segment; the first of them owns it. Segments are
numbered in the order of encoding: in the order of places, but sorted by length, longest first, within windows.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from sharmill.engine.hashes import find_first
from sharmill.files.arrays import load_stored_array, publish_array
from sharmill.files.stored import damaged_file
from sharmill.shar.places import PLACE

# The place that owns a segment, and its shard; ``field`` is the index of the audio field in the dataset's list.
SEGMENT: Final = np.dtype([("place", PLACE), ("shard", "<u4"), ("field", "<u4")])
# Number of segments that are sorted by length together: large enough for batches of similar lengths, small enough to
# keep the segments of a shard close together.
_WINDOW: Final = 1 << 15


def seconds_of(places: np.ndarray) -> np.ndarray:
    """Return the durations of ``PLACE`` records in seconds, float64."""
    return np.asarray(places["num_samples"] / places["sampling_rate"])


def list_segments(
    tables: Sequence[tuple[Path, int]], num_fields: int, segments_file: Path, numbers_file: Path, window: int = _WINDOW
) -> None:
    """Write the unique segments of a dataset, and the segment number of each place.

    Args:
        tables: for each shard, the file of an array (audio fields, cuts) of ``PLACE``, and the number of cuts.
        num_fields: number of audio fields.
        segments_file: output file for an array (segments,) of ``SEGMENT``.
        numbers_file: output file for an array (audio fields, cuts) of segment numbers, uint32.
        window: number of segments that are sorted by length together.

    Raises:
        ConfigError: a file does not contain such an array.
    """
    bounds = np.cumsum([0, *(count for _, count in tables)])
    places = np.empty((num_fields, bounds[-1]), PLACE)
    for (path, count), (start, stop) in zip(tables, pairwise(bounds), strict=True):
        table = load_stored_array(path)
        if table.dtype != PLACE or table.shape != (num_fields, count):
            raise damaged_file(path, "it does not contain the places of these items")
        places[:, start:stop] = table
    flat = places.reshape(-1)
    # owners[n] is the first place with the same hash as place n.
    owners = find_first(*flat["hash"].T)
    firsts = np.flatnonzero(owners == np.arange(len(owners), dtype=np.uint32))
    windows = np.arange(len(firsts)) // window
    firsts = firsts[np.lexsort((-seconds_of(flat)[firsts], windows))]
    numbers = np.empty(len(owners), np.uint32)
    numbers[firsts] = np.arange(len(firsts), dtype=np.uint32)

    def in_windows() -> Iterator[np.ndarray]:
        for begin in range(0, len(firsts), window):
            owner = firsts[begin : begin + window]
            field, cut = np.divmod(owner, bounds[-1])
            segments = np.empty(len(owner), SEGMENT)
            segments["place"], segments["field"] = flat[owner], field
            segments["shard"] = np.searchsorted(bounds, cut, side="right") - 1
            yield segments

    publish_array(segments_file, SEGMENT, firsts.shape, in_windows())
    publish_array(numbers_file, np.dtype("<u4"), places.shape, [numbers[owners]])
