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

from sharmill.engine.spill import HASH, SpilledRows
from sharmill.engine.stored import decode_stored, read_stored_lines
from sharmill.speaker_tag import tagged_speaker

# Lines whose hashes go to the temporary file together.
_DIGESTS_AT_ONCE = 1 << 16


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
    with SpilledRows(path.parent, HASH) as hashes:
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
        groups = hashes.first_equal()
    return ManifestIndex(np.frombuffer(offsets, np.int64), np.frombuffer(seconds, np.float32), groups)


def _rows(digests: bytearray) -> np.ndarray:
    """Return digests as rows of numbers: they have their high half first, and their bytes are big-endian."""
    return np.frombuffer(digests, ">u8").reshape(-1, 2)


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
    cumulative = np.zeros(len(order) + 1)
    np.cumsum(index.seconds[order], dtype=np.float64, out=cumulative[1:])
    groups = index.groups[order]
    ends = np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(groups))
    sizes = np.diff(ends, prepend=0)
    begin = position = 0
    for size in sizes.tolist():
        end = position + size
        too_large = max_group is not None and size > max_group
        if begin < position and (too_large or cumulative[end] - cumulative[begin] > unit_seconds):
            yield _span(begin, position, cumulative)
            begin = position
        if too_large:
            # Parts of nearly equal size.
            count = -(-size // (max_group or size))
            for start, stop in pairwise([position + size * part // count for part in range(count + 1)]):
                yield _span(start, stop, cumulative)
            begin = end
        position = end
    if begin < position:
        yield _span(begin, position, cumulative)


def _span(start: int, stop: int, cumulative: np.ndarray) -> Span:
    return Span(start, stop, round(float(cumulative[stop] - cumulative[start]), 3))
