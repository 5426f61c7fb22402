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

from sharmill.engine.hashes import find_first
from sharmill.files.stored import decode_stored, read_stored_lines
from sharmill.speaker_tag import tagged_speaker


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

    Groups are told apart by 128-bit hashes of their keys.
    """
    offsets, seconds, digests = array("q"), array("f"), bytearray()
    for file in (path, *further):
        position = 0
        # Line by line: of what is no manifest a line may have 64 MiB.
        for line in read_stored_lines(file):
            head = decode_stored(file, line, _Head)
            key = group_key(head.audio_filepath, tagged_speaker(head.speaker))
            digests += xxhash.xxh3_128_digest(key.encode())
            offsets.append(position)
            seconds.append(head.duration)
            position += len(line)
    groups = find_first(*np.frombuffer(digests, np.uint64).reshape(-1, 2).T)
    return ManifestIndex(np.frombuffer(offsets, np.int64), np.frombuffer(seconds, np.float32), groups)


def order_by_group(groups: np.ndarray) -> np.ndarray:
    """Return the numbers of lines (N,) uint32 sorted by group, those of a group in their order.

    Args:
        groups: (N,) the number of the first line of each line's group.
    """
    return np.argsort(groups, kind="stable").astype(np.uint32)


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
    seconds = np.cumsum(index.seconds[order], dtype=np.float64)
    groups = index.groups[order]
    ends = np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(order)) if len(order) else order
    # One at a time: lists of all would take ten times the memory.
    return ((int(end), float(seconds[end - 1])) for end in ends)


def _span(index: ManifestIndex, order: np.ndarray, start: int, stop: int) -> Span:
    return Span(start, stop, round(float(index.seconds[order[start:stop]].sum(dtype=np.float64)), 3))
