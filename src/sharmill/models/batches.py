"""Planning of batches for models, and division of long segments into pieces.

The shapes and the padding of batches depend only on the lengths of the items, the configuration and the kind of device.
Batches for a codec are planned in frames. Canonical batches have only a few lengths, and a fixed number of rows for
each length. The arithmetic for an item then does not depend on the other items in the batch.

Long segments are divided for codecs whose codes depend on a bounded stretch of audio. Each piece includes this stretch
on both sides of its own frames, so that in exact arithmetic the codes equal the codes of the undivided segment. The
division depends only on the length of the segment and on the codec.
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

# Number of canonical lengths from a power of two to the next. On average, rounding up to these lengths adds 1 / 45 of
# padding.
_LENGTHS_PER_OCTAVE: Final = 16
# Segments longer than this are divided. This limit is the default size of a batch, which is longer than most
# utterances.
PIECE_SECONDS: Final = 20.0


def padded_batches(lengths: Sequence[float], max_padded: float, *, equal_below: float = 0.0) -> list[list[int]]:
    """Group items of similar length into batches, and return the indices of each batch.

    Args:
        lengths: the lengths of the items.
        max_padded: the limit on the number of items times the greatest length; a longer item is a batch by itself.
        equal_below: items shorter than this are only grouped with items of equal length.
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
        items: float32 arrays, or int16 arrays with a full scale of 32768.
        at_least: the minimum numbers of rows and samples.
        pinned: True to use pinned memory, from which copies to a GPU are asynchronous; torch reuses such memory.
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
    """The items and the shape of a batch.

    Args:
        items: the indices of the items.
        num_frames: the number of frames of each row.
        num_rows: the number of rows; rows beyond the items are silence.
        as_one_length: True if every row counts as ``num_frames`` frames long, with silence after shorter items.
    """

    items: list[int]
    num_frames: int
    num_rows: int
    as_one_length: bool = False

    def fill(
        self, samples: Sequence[np.ndarray], samples_per_frame: int, *, pinned: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return audio (rows, samples) float32 and the lengths of the rows (rows,) int64.

        Args:
            samples: the samples of each item.
            samples_per_frame: the number of samples in a frame.
            pinned: see ``pad``.
        """
        audio, lengths = pad(samples, at_least=(self.num_rows, self.num_frames * samples_per_frame), pinned=pinned)
        if self.as_one_length:
            lengths = lengths.new_full((self.num_rows,), audio.shape[1])
        return audio, lengths


def plan_batches(
    frames: Sequence[int], batch_seconds: float, codec: Codec, device: str, *, canonical: bool = False
) -> list[Batch]:
    """Plan batches for items with these numbers of frames, the longest first.

    Args:
        frames: the number of frames of each item.
        batch_seconds: maximum seconds of audio in a batch, padding included; the kind of device may lower this limit.
        codec: the codec.
        device: ``cpu`` or ``cuda``.
        canonical: True to pad every item to its canonical length, and every batch to the number of rows that fit. On a
            CPU, a batch then has one row, because encoding items one by one takes no longer and needs no silent rows.
    """
    max_frames = fit_batch_seconds(batch_seconds, device) * codec.sampling_rate / codec.samples_per_frame
    if canonical:
        return canonical_batches(frames, 0.0 if device == "cpu" else max_frames, equal_only=codec.equal_lengths_only)
    return [
        Batch(items, frames[items[0]], len(items))
        for items in padded_batches(frames, max_frames, equal_below=math.inf if codec.equal_lengths_only else 0.0)
    ]


def canonical_batches(frames: Sequence[int], max_frames: float, *, equal_only: bool) -> list[Batch]:
    """Return batches whose shapes depend only on the canonical lengths of their items.

    With ``equal_only``, for codecs whose codes depend on padding, each item keeps its length and is a batch by itself.
    """
    lengths = [length if equal_only else canonical_length(length) for length in frames]
    most = 0.0 if equal_only else max_frames
    return [
        Batch(items, lengths[items[0]], max(1, int(most // max(1, lengths[items[0]]))), as_one_length=True)
        for items in padded_batches(lengths, most, equal_below=math.inf)
    ]


def canonical_length(num_frames: int) -> int:
    """Round up to a canonical length: one of 16 between a power of two and the next.

    >>> [canonical_length(n) for n in (7, 31, 33, 100, 1000)]
    [7, 31, 34, 100, 1024]
    """
    step = max(1, (1 << max(0, num_frames.bit_length() - 1)) // _LENGTHS_PER_OCTAVE)
    return -(-num_frames // step) * step


def log_padding(stats: Sequence[Mapping[str, Any]], done: str) -> None:
    """Log the share of padding over all units, from ``padded_seconds`` and ``<done>_seconds`` in their statistics."""
    seconds, padded = (sum(one[f"{name}_seconds"] for one in stats) for name in (done, "padded"))
    share = 100 * (1 - seconds / padded) if padded else 0.0
    log.info("%.1f s of audio %s, %.2f %% of the batches is padding", seconds, done, share)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The division of long segments into pieces for a codec.

    Args:
        length: the number of frames in each piece; all pieces have the same length, so that any codec can batch them.
        before: the number of preceding frames on which the codes of a frame depend.
        after: the number of following frames on which the codes of a frame depend.
    """

    length: int
    before: int
    after: int

    def divide(self, num_frames: int) -> list[tuple[int, slice]]:
        """Divide a segment longer than a piece; return the first frame of each piece and the slice of frames to keep.

        The kept frames of all pieces, in order, make up the segment.
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
        """Return the number of pieces in a batch of ``max_frames`` frames; at least 1."""
        return max(1, int(max_frames // self.length))

    def encode(self, codec: Codec, samples: np.ndarray, max_frames: float, *, pinned: bool = False) -> np.ndarray:
        """Encode the pieces of a segment (samples,) in batches, and return its codes (codebooks, frames).

        Args:
            codec: the codec.
            samples: the samples of the segment.
            max_frames: the maximum number of frames in a batch.
            pinned: see ``pad``.
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
    """Return the division of long segments for a codec; None if its codes may depend on more audio than a piece has."""
    reach = getattr(codec, "find_reach", lambda: None)()
    if reach is None:
        return None
    length = round(seconds * codec.sampling_rate / codec.samples_per_frame)
    return Pieces(length=length, before=reach[0], after=reach[1]) if length > sum(reach) else None
