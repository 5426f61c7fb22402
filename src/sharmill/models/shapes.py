"""Shapes of a codec's batches: they follow from the lengths, the configuration and the kind of device alone.

A batch is planned in frames. Canonical batches have a few lengths and one size for each, whatever is in them, so that
an item meets the same arithmetic beside any neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sharmill.models.arithmetic import fit_batch_seconds
from sharmill.models.protocols import pad, padded_batches

if TYPE_CHECKING:
    from torch import Tensor

    from sharmill.models.protocols import Codec

# Lengths between a power of two and the next. Rounding up to one of them pads by 1 / 45 on average.
_LENGTHS_PER_OCTAVE: Final = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of a batch by their indices, and its shape.

    Args:
        items: their indices.
        num_frames: frames of each row.
        num_rows: those beyond the items are silence.
        as_one_length: True if every row counts as ``num_frames`` long, with silence behind what is shorter.
    """

    items: list[int]
    num_frames: int
    num_rows: int
    as_one_length: bool = False


def plan_batches(
    frames: Sequence[int], batch_seconds: float, codec: Codec, device: str, *, canonical: bool = False
) -> list[Batch]:
    """Return the batches of items with these numbers of frames, the longest first.

    Args:
        batch_seconds: audio in one batch, padding included, before the limit of the kind of device.
        device: ``cpu`` or ``cuda``.
        canonical: give every item its canonical length, in a batch of as many rows as such lengths fit in one. On a CPU
            that is one row: there, items one by one take no longer, and no row is silence.
    """
    seconds = fit_batch_seconds(batch_seconds, device)
    max_frames = seconds * codec.sampling_rate / codec.samples_per_frame
    if canonical:
        return canonical_batches(frames, 0.0 if device == "cpu" else max_frames, equal_only=codec.equal_lengths_only)
    return [
        Batch(items, frames[items[0]], len(items))
        for items in padded_batches(frames, max_frames, equal_only=codec.equal_lengths_only)
    ]


def canonical_batches(frames: Sequence[int], max_frames: float, *, equal_only: bool) -> list[Batch]:
    """Return batches in which an item's row has the same shape and as many rows beside it whatever the others are.

    With ``equal_only``, for codecs whose codes depend on padding, an item has its own length and is alone.
    """
    lengths = [length if equal_only else canonical_length(length) for length in frames]
    batches: list[Batch] = []
    for index in sorted(range(len(frames)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        num_rows = 1 if equal_only else max(1, int(max_frames // max(1, length)))
        if batches and batches[-1].num_frames == length and len(batches[-1].items) < num_rows:
            batches[-1].items.append(index)
        else:
            batches.append(Batch([index], length, num_rows, as_one_length=True))
    return batches


def canonical_length(num_frames: int) -> int:
    """Return the least canonical length that is not less: one of 16 between a power of two and the next.

    >>> [canonical_length(n) for n in (7, 31, 33, 100, 1000)]
    [7, 31, 34, 100, 1024]
    """
    step = max(1, (1 << max(0, num_frames.bit_length() - 1)) // _LENGTHS_PER_OCTAVE)
    return -(-num_frames // step) * step


def fill_batch(
    batch: Batch, samples: Sequence[np.ndarray], samples_per_frame: int, *, pinned: bool = False
) -> tuple[Tensor, Tensor]:
    """Return audio (rows, samples) float32 and the rows' lengths (rows,) int64 for the items of a batch.

    ``pinned`` as of ``pad``.
    """
    audio, lengths = pad(samples, at_least=(batch.num_rows, batch.num_frames * samples_per_frame), pinned=pinned)
    if batch.as_one_length:
        lengths = lengths.new_full((batch.num_rows,), audio.shape[1])
    return audio, lengths
