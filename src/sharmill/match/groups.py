"""Speaker groups over a whole manifest, and their division into units."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from sharmill.engine.spill import FirstEqual
from sharmill.engine.stored import decode_stored, read_stored_lines
from sharmill.speaker_tag import tagged_speaker

# Lines whose hashes are taken together, and that are put in order together.
_DIGESTS_AT_ONCE = 1 << 16
_AT_ONCE = 1 << 20


class _Head(msgspec.Struct):
    audio_filepath: str
    speaker: str
    duration: float


@dataclass(frozen=True)
class ManifestIndex:
    """Offsets, durations and groups of N lines, for planning: 16 bytes a line.

    Attributes:
        offsets: (N,) int64, where each line begins.
        seconds: (N,) float32, durations.
        groups: (N,) uint32, the number of the first line of each line's group.
    """

    offsets: np.ndarray
    seconds: np.ndarray
    groups: np.ndarray


def index_manifest(path: Path, group_key: Callable[[str, str], str], *further: Path) -> ManifestIndex:
    """Read a prepared manifest once, and the lines of ``further`` manifests behind its own; offsets are in their files.

    Groups are told apart by 128-bit hashes of their keys, which lie in a temporary file beside the manifest.
    """
    offsets, seconds = array("q"), array("f")
    with FirstEqual(path.parent) as hashes:
        for file in (path, *further):
            position = 0
            digests = bytearray()
            # Line by line: of what is no manifest a line may have 64 MiB.
            for line in read_stored_lines(file):
                head = decode_stored(file, line, _Head)
                key = group_key(head.audio_filepath, tagged_speaker(head.speaker))
                digests += xxhash.xxh3_128_digest(key.encode())
                offsets.append(position)
                seconds.append(head.duration)
                position += len(line)
                if len(offsets) % _DIGESTS_AT_ONCE == 0:
                    hashes.append(_rows(digests))
                    digests = bytearray()
            hashes.append(_rows(digests))
        groups = hashes.find()
    return ManifestIndex(np.frombuffer(offsets, np.int64), np.frombuffer(seconds, np.float32), groups)


def _rows(digests: bytearray) -> np.ndarray:
    """Return digests as rows of numbers: they have their high half first, and their bytes are big-endian."""
    return np.frombuffer(digests, ">u8").reshape(-1, 2)


def order_by_group(groups: np.ndarray) -> np.ndarray:
    """Return the numbers of lines (N,) uint32 by group, as a stable sort has them, in 8 bytes a line.

    Args:
        groups: (N,) the number of the first line of each line's group.
    """
    # First the size of each group, then where it ends, then where that of it ends which is not placed yet.
    ends = np.zeros(len(groups), np.uint32)
    for begin in range(0, len(groups), _AT_ONCE):
        np.add.at(ends, groups[begin : begin + _AT_ONCE].astype(np.intp), np.uint32(1))
    np.cumsum(ends, out=ends)
    order = np.empty(len(groups), np.uint32)
    for begin in reversed(range(0, len(groups), _AT_ONCE)):
        part = groups[begin : begin + _AT_ONCE]
        lines = np.argsort(part, kind="stable")
        found, starts, counts = np.unique(part[lines], return_index=True, return_counts=True)
        ends[found] -= counts.astype(np.uint32)
        order[np.repeat(ends[found] - starts, counts) + np.arange(len(part))] = begin + lines
    return order


@dataclass(frozen=True)
class Span:
    """The lines of a unit, in the order by group: lines ``start`` to ``stop``, ``seconds`` of audio."""

    start: int
    stop: int
    seconds: float


def divide(index: ManifestIndex, order: np.ndarray, *, unit_seconds: float, max_group: int | None) -> Iterator[Span]:
    """Divide lines into spans: whole groups, about ``unit_seconds`` together, and parts of those above ``max_group``.

    ``order`` (N,) has the lines sorted by group. A group is never divided unless ``max_group`` says so, since contexts
    are sought within a span.
    """
    begin = position = 0
    until_begin = until_position = 0.0
    for end, until_end in _group_ends(index, order):
        too_large = max_group is not None and end - position > max_group
        if begin < position and (too_large or until_end - until_begin > unit_seconds):
            yield _span(index, order, begin, position)
            begin, until_begin = position, until_position
        if too_large:
            # Parts of nearly equal size.
            size = end - position
            count = -(-size // (max_group or size))
            for start, stop in pairwise([position + size * part // count for part in range(count + 1)]):
                yield _span(index, order, start, stop)
            begin, until_begin = end, until_end
        position, until_position = end, until_end
    if begin < position:
        yield _span(index, order, begin, position)


def _group_ends(index: ManifestIndex, order: np.ndarray) -> Iterator[tuple[int, float]]:
    """Yield where each group ends in an order by group, and the seconds until there."""
    so_far = 0.0
    for begin in range(0, len(order), _AT_ONCE):
        lines = order[begin : begin + _AT_ONCE]
        seconds = np.cumsum(np.concatenate([[so_far], index.seconds[lines]]), dtype=np.float64)[1:]
        so_far = float(seconds[-1])
        # The group of the line behind tells whether the last one here ends.
        groups = index.groups[order[begin : begin + _AT_ONCE + 1]]
        last = np.flatnonzero(groups[1:] != groups[:-1])
        if begin + len(lines) == len(order):
            last = np.append(last, len(lines) - 1)
        yield from zip((begin + 1 + last).tolist(), seconds[last].tolist(), strict=True)


def _span(index: ManifestIndex, order: np.ndarray, start: int, stop: int) -> Span:
    return Span(start, stop, round(float(index.seconds[order[start:stop]].sum(dtype=np.float64)), 3))
