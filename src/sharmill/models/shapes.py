"""Shapes of batches and their padding: they follow from the lengths, the configuration and the kind of device alone.

A codec's batch is planned in frames. Canonical batches have a few lengths and one size for each, whatever is in them,
so that an item meets the same arithmetic beside any neighbours. Padding is counted in a unit, kept in the stats of its
commit, and logged when a stage ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sharmill.models.arithmetic import fit_batch_seconds
from sharmill.models.protocols import pad, padded_batches

if TYPE_CHECKING:
    from torch import Tensor

    from sharmill.models.protocols import Codec

log = logging.getLogger(__name__)

_PADDED: Final = "padded_seconds"
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


@dataclass
class Padding:
    """Audio that went through a model: seconds, and seconds with the padding of its batches."""

    seconds: float = 0.0
    padded: float = 0.0

    def add(self, items: Sequence[np.ndarray], audio: Tensor, sampling_rate: int) -> None:
        """Count a batch: its items (samples,), and the audio (rows, samples) that was made of them."""
        self.seconds += sum(map(len, items)) / sampling_rate
        self.padded += audio.numel() / sampling_rate

    def stats(self, done: str) -> dict[str, float]:
        """Return the stats of a commit; ``done`` is the word for the model's work, such as ``embedded``."""
        return {f"{done}_seconds": self.seconds, _PADDED: self.padded}


def log_padding(stats: Sequence[Mapping[str, Any]], done: str) -> None:
    """Log the padding of all units."""
    seconds, padded = (sum(one[name] for one in stats) for name in (f"{done}_seconds", _PADDED))
    share = 100 * (1 - seconds / padded) if padded else 0.0
    log.info("%.1f s of audio %s, %.2f %% of the batches is padding", seconds, done, share)
