"""Batches of a model: which items share one, of what shape it is, and long segments in pieces.

Shapes and padding follow from the lengths, the configuration and the kind of device alone. A codec's batch is planned
in frames. Canonical batches have a few lengths and one size for each, whatever is in them, so that an item meets the
same arithmetic beside any neighbours.

Pieces are for codecs whose codes depend on a bounded stretch of the audio around them: each has as much audio on both
sides of its own frames as their codes depend on, so that in exact arithmetic the codes are those of the whole. Where a
segment is cut follows from its length and the codec alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sharmill.audio.decoder import FULL_SCALE
from sharmill.models import Codec
from sharmill.models.device import fit_batch_seconds

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# Lengths between a power of two and the next. Rounding up to one of them pads by 1 / 45 on average.
_LENGTHS_PER_OCTAVE: Final = 16
# A segment that is longer is cut. As much as a batch has by default, and more than most utterances have.
PIECE_SECONDS: Final = 20.0


def padded_batches(lengths: Sequence[float], max_padded: float, *, equal_below: float = 0.0) -> list[list[int]]:
    """Return the indices of the items in batches, sorted by length, so that little is padded.

    A batch's number of items times its longest is at most ``max_padded``; an item that is longer is alone.
    Items shorter than ``equal_below`` share a batch with others of their own length only.
    """
    batches: list[list[int]] = []
    longest = 0.0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = bool(batches) and (len(batches[-1]) + 1) * longest <= max_padded
        if fits and (lengths[index] >= equal_below or lengths[index] == longest):
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def pad(
    items: Sequence[np.ndarray], *, at_least: tuple[int, int] = (0, 0), pinned: bool = False
) -> tuple[Tensor, Tensor]:
    """Return arrays (samples,) as one zero-padded float32 tensor (batch, samples), and their lengths (items,).

    Args:
        items: float32, or int16 of which 32768 is full scale.
        at_least: rows and samples of a larger batch.
        pinned: for a model on a GPU: its copies need not wait then, and torch uses such memory again.
    """
    import torch

    lengths = [len(item) for item in items]
    shape = max(len(items), at_least[0]), max(*lengths, at_least[1])
    padded = torch.empty(shape, dtype=torch.float32, pin_memory=pinned)
    rows = padded.numpy()
    for row, item, length in zip(rows, items, lengths, strict=False):
        row[:length] = item
        row[length:] = 0.0
        if item.dtype == np.int16:
            row[:length] *= np.float32(1 / FULL_SCALE)
    rows[len(items) :] = 0.0
    return padded, torch.from_numpy(np.array(lengths, np.int64))


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

    def fill(
        self, samples: Sequence[np.ndarray], samples_per_frame: int, *, pinned: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return audio (rows, samples) float32 and the rows' lengths (rows,) int64 for the samples of the items.

        ``pinned`` as of ``pad``.
        """
        audio, lengths = pad(samples, at_least=(self.num_rows, self.num_frames * samples_per_frame), pinned=pinned)
        if self.as_one_length:
            lengths = lengths.new_full((self.num_rows,), audio.shape[1])
        return audio, lengths


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
    max_frames = fit_batch_seconds(batch_seconds, device) * codec.sampling_rate / codec.samples_per_frame
    if canonical:
        return canonical_batches(frames, 0.0 if device == "cpu" else max_frames, equal_only=codec.equal_lengths_only)
    return [
        Batch(items, frames[items[0]], len(items))
        for items in padded_batches(frames, max_frames, equal_below=math.inf if codec.equal_lengths_only else 0.0)
    ]


def canonical_batches(frames: Sequence[int], max_frames: float, *, equal_only: bool) -> list[Batch]:
    """Return batches in which an item's row has the same shape and as many rows beside it whatever the others are.

    With ``equal_only``, for codecs whose codes depend on padding, an item has its own length and is alone.
    """
    lengths = [length if equal_only else canonical_length(length) for length in frames]
    most = 0.0 if equal_only else max_frames
    return [
        Batch(items, lengths[items[0]], max(1, int(most // max(1, lengths[items[0]]))), as_one_length=True)
        for items in padded_batches(lengths, most, equal_below=math.inf)
    ]


def canonical_length(num_frames: int) -> int:
    """Return the least canonical length that is not less: one of 16 between a power of two and the next.

    >>> [canonical_length(n) for n in (7, 31, 33, 100, 1000)]
    [7, 31, 34, 100, 1024]
    """
    step = max(1, (1 << max(0, num_frames.bit_length() - 1)) // _LENGTHS_PER_OCTAVE)
    return -(-num_frames // step) * step


def log_padding(stats: Sequence[Mapping[str, Any]], done: str) -> None:
    """Log the padding of all units, whose commits have ``padded_seconds`` and, as ``done``, ``embedded_seconds``."""
    seconds, padded = (sum(one[f"{name}_seconds"] for one in stats) for name in (done, "padded"))
    share = 100 * (1 - seconds / padded) if padded else 0.0
    log.info("%.1f s of audio %s, %.2f %% of the batches is padding", seconds, done, share)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The division of long segments for a codec.

    Args:
        length: frames of a piece. All pieces of a segment have this length, so that they share a batch in any codec.
        before: frames before a frame that its codes depend on.
        after: frames behind it that they depend on.
    """

    length: int
    before: int
    after: int

    def divide(self, num_frames: int) -> list[tuple[int, slice]]:
        """Return the pieces of a segment that is longer than one: first frame, and which frames of it are kept.

        What is kept of them is the segment, in order.
        """
        pieces: list[tuple[int, slice]] = []
        kept = 0
        while kept < num_frames:
            start = min(max(0, kept - self.before), num_frames - self.length)
            end = self.length if start + self.length == num_frames else self.length - self.after
            pieces.append((start, slice(kept - start, end)))
            kept = start + end
        return pieces

    def rows(self, max_frames: float) -> int:
        """Return how many pieces a batch of so many frames has; one at least."""
        return max(1, int(max_frames // self.length))

    def encode(self, codec: Codec, samples: np.ndarray, max_frames: float, *, pinned: bool = False) -> np.ndarray:
        """Return the codes (codebooks, frames) of a segment (samples,), made of its pieces in batches.

        Args:
            max_frames: frames of a batch.
            pinned: as of ``pad``.
        """
        size = codec.samples_per_frame
        pieces = self.divide(-(-len(samples) // size))
        rows = self.rows(max_frames)
        kept: list[np.ndarray] = []
        for begin in range(0, len(pieces), rows):
            batch = pieces[begin : begin + rows]
            parts = [samples[start * size : (start + self.length) * size] for start, _ in batch]
            audio, lengths = pad(parts, pinned=pinned)
            codes = codec.encode(audio, lengths).numpy()
            kept += [row[:, own] for (_, own), row in zip(batch, codes, strict=True)]
        return np.concatenate(kept, axis=1)


def find_pieces(codec: Codec, seconds: float = PIECE_SECONDS) -> Pieces | None:
    """Return how a codec's long segments can be divided; None where its codes may depend on more than a piece."""
    reach = getattr(codec, "find_reach", lambda: None)()
    if reach is None:
        return None
    length = round(seconds * codec.sampling_rate / codec.samples_per_frame)
    return Pieces(length=length, before=reach[0], after=reach[1]) if length > sum(reach) else None
