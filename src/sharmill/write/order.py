"""The order of a dataset's cuts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np


class _Head(msgspec.Struct):
    index: int = msgspec.field(name="_index")
    duration: float
    context_audio_duration: float


@dataclass(frozen=True)
class MatchedIndex:
    """Offsets, positions and durations of N lines of the matched manifest, which has them by speaker group.

    Attributes:
        offsets: (N,) int64, where each line begins.
        positions: (N,) int64, the line's number in the prepared manifest.
        seconds: (N,) float64, target and context together.
    """

    offsets: np.ndarray
    positions: np.ndarray
    seconds: np.ndarray


def index_matched(path: Path) -> MatchedIndex:
    """Read the matched manifest once."""
    offsets, positions, seconds = array("q"), array("q"), array("d")
    decoder = msgspec.json.Decoder(_Head)
    begin = 0
    with path.open("rb") as stream:
        for line in stream:
            head = decoder.decode(line)
            offsets.append(begin)
            positions.append(head.index)
            seconds.append(head.duration + head.context_audio_duration)
            begin += len(line)
    return MatchedIndex(
        np.array(offsets, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(seconds, dtype=np.float64),
    )


def order_lines(index: MatchedIndex, order: Literal["manifest", "speaker", "shuffle"], seed: int) -> np.ndarray:
    """Return the line numbers (N,) in the order asked for: as in the input, by speaker group, or a seeded permutation.

    The permutation is of the input's order, so it does not depend on how groups were found.
    """
    if order == "speaker":
        return np.arange(len(index.offsets))
    as_in_manifest = np.argsort(index.positions, kind="stable")
    if order == "manifest":
        return as_in_manifest
    return as_in_manifest[np.random.Generator(np.random.PCG64(seed)).permutation(len(as_in_manifest))]
