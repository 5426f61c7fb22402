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

from sharmill.engine.stored import decode_stored, read_stored_lines
from sharmill.manifest import parse_speaker_tag


class _Head(msgspec.Struct):
    audio_filepath: str
    speaker: str
    duration: float


@dataclass(frozen=True)
class ManifestIndex:
    """Offsets, durations and groups of N lines, for planning: 20 bytes a line; making it needs about 100.

    Attributes:
        offsets: (N,) int64, where each line begins.
        seconds: (N,) float32, durations.
        groups: (N,) int64, the number of each line's group, groups being numbered as they first appear.
    """

    offsets: np.ndarray
    seconds: np.ndarray
    groups: np.ndarray


def index_manifest(path: Path, group_key: Callable[[str, str], str], *further: Path) -> ManifestIndex:
    """Read a prepared manifest once, and the lines of ``further`` manifests behind its own; offsets are in their files.

    Groups are told apart by 128-bit hashes of their keys.
    """
    offsets, seconds = array("q"), array("f")
    high, low = array("Q"), array("Q")
    for file in (path, *further):
        position = 0
        for line in read_stored_lines(file):
            head = decode_stored(file, line, _Head)
            key = group_key(head.audio_filepath, parse_speaker_tag(head.speaker).speaker)
            digest = xxhash.xxh3_128_intdigest(key.encode())
            offsets.append(position)
            seconds.append(head.duration)
            high.append(digest >> 64)
            low.append(digest & 0xFFFFFFFFFFFFFFFF)
            position += len(line)
    groups = _number(np.array(high, dtype=np.uint64), np.array(low, dtype=np.uint64))
    return ManifestIndex(np.array(offsets, dtype=np.int64), np.array(seconds, dtype=np.float32), groups)


def _number(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the number of each entry's key (N,), keys being numbered as they first appear."""
    order = np.lexsort((low, high))
    high, low = high[order], low[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    # The sort is stable, so the first of each run of equal keys is its first appearance.
    first = order[begins]
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = rank[np.cumsum(begins) - 1]
    return numbers


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
    cumulative = np.concatenate([[0.0], np.cumsum(index.seconds[order], dtype=np.float64)])
    sizes = np.bincount(index.groups) if len(order) else np.empty(0, dtype=np.int64)
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
