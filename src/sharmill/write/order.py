"""The order of a dataset's cuts, and their division into shards."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from sharmill.engine.balance import divide_evenly
from sharmill.files.stored import decode_stored, read_stored_lines
from sharmill.match.groups import index_manifest, order_by_group
from sharmill.prepare.speaker_key import speaker_of_tag
from sharmill.write.config import WriteConfig


class _Head(msgspec.Struct):
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = msgspec.field(name="_index")
    duration: float
    context_audio_duration: float


@dataclass(frozen=True)
class LineIndex:
    """Offsets, positions and durations of N lines of the manifest that is written, by speaker group.

    Attributes:
        offsets: (N,) int64, where each line begins.
        positions: (N,) uint32, the line's number in the prepared manifest.
        target_seconds: (N,) float32, durations of the targets.
        seconds: (N,) float32, durations of target and context together.
    """

    offsets: np.ndarray
    positions: np.ndarray
    target_seconds: np.ndarray
    seconds: np.ndarray


def index_matched(path: Path) -> LineIndex:
    """Read the matched manifest once; it has its lines by speaker group."""
    offsets, positions, targets, seconds = array("q"), array("I"), array("f"), array("f")
    begin = 0
    for line in read_stored_lines(path):
        head = decode_stored(path, line, _Head)
        offsets.append(begin)
        positions.append(head.index)
        targets.append(head.duration)
        seconds.append(head.duration + head.context_audio_duration)
        begin += len(line)
    return LineIndex(
        np.frombuffer(offsets, np.int64),
        np.frombuffer(positions, np.uint32),
        np.frombuffer(targets, np.float32),
        np.frombuffer(seconds, np.float32),
    )


def index_prepared(path: Path) -> LineIndex:
    """Read the prepared manifest once, for a dataset without contexts; its groups are the speakers."""
    index = index_manifest(path, speaker_of_tag)
    by_group = order_by_group(index.groups)
    seconds = index.seconds[by_group]
    return LineIndex(index.offsets[by_group], by_group, seconds, seconds)


def order_lines(index: LineIndex, order: Literal["manifest", "speaker", "shuffle"], seed: int) -> np.ndarray:
    """Return the line numbers (N,) uint32: as in the input, by speaker group, or in a seeded permutation.

    The permutation is of the input's order, so it does not depend on how groups were found.
    """
    if order == "speaker":
        return np.arange(len(index.offsets), dtype=np.uint32)
    lines = np.argsort(index.positions, kind="stable").astype(np.uint32)
    if order == "shuffle":
        np.random.Generator(np.random.PCG64(seed)).shuffle(lines)
    return lines


def divide_into_shards(seconds: np.ndarray, write: WriteConfig) -> list[int]:
    """Divide cuts into shards of consecutive ones, none of them empty.

    Args:
        seconds: (N,) durations of the targets, in the order of the cuts.
        write: says how large shards are.

    Returns:
        The bounds (shards + 1,): shard n has the cuts from bound n to before bound n + 1.

    >>> divide_into_shards(np.ones(5), WriteConfig(shard_size=2))
    [0, 2, 4, 5]
    >>> divide_into_shards(np.ones(5), WriteConfig(num_shards=2))
    [0, 2, 5]
    >>> divide_into_shards(np.array([4.0, 1.0, 1.0, 1.0, 1.0]), WriteConfig(shard_seconds=4.0))
    [0, 1, 5]
    """
    count = len(seconds)
    if not count:
        return [0]
    if write.shard_seconds is not None:
        total = float(seconds.sum(dtype=np.float64))
        return divide_evenly(seconds, min(count, max(1, round(total / write.shard_seconds))))
    if write.num_shards is not None:
        number = min(count, write.num_shards)
        return [count * shard // number for shard in range(number + 1)]
    assert write.shard_size is not None
    return [*range(0, count, write.shard_size), count]
