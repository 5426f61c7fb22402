"""Long segments in pieces, for codecs whose codes depend on a bounded stretch of the audio around them.

Each piece has as much audio on both sides of its own frames as their codes depend on, so that in exact arithmetic the
codes are those of the whole. Where a segment is cut follows from its length and the codec alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sharmill.models.protocols import pad
from sharmill.models.shapes import Padding

if TYPE_CHECKING:
    from sharmill.models.protocols import Codec

# A segment that is longer is cut. As much as a batch has by default, and more than most utterances have.
PIECE_SECONDS: Final = 30.0


@dataclass(frozen=True)
class SegmentPiece:
    """Frames ``start`` to ``stop`` of a segment go through the codec; those from ``first`` to ``last`` are kept."""

    start: int
    stop: int
    first: int
    last: int


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

    def divide(self, num_frames: int) -> list[SegmentPiece]:
        """Return the pieces of a segment that is longer than one; what is kept of them is the segment, in order."""
        pieces: list[SegmentPiece] = []
        kept = 0
        while kept < num_frames:
            start = min(max(0, kept - self.before), num_frames - self.length)
            stop = start + self.length
            last = stop if stop == num_frames else stop - self.after
            pieces.append(SegmentPiece(start, stop, kept, last))
            kept = last
        return pieces

    def rows(self, max_frames: float) -> int:
        """Return how many pieces a batch of so many frames has; one at least."""
        return max(1, int(max_frames // self.length))

    def encode(
        self,
        codec: Codec,
        samples: np.ndarray,
        max_frames: float,
        padding: Padding | None = None,
        *,
        pinned: bool = False,
    ) -> np.ndarray:
        """Return the codes (codebooks, frames) of a segment (samples,), made of its pieces in batches.

        Args:
            max_frames: frames of a batch.
            padding: that of the batches is added to it; what two pieces share is no padding.
            pinned: as of ``pad``.
        """
        size = codec.samples_per_frame
        pieces = self.divide(-(-len(samples) // size))
        rows = self.rows(max_frames)
        kept: list[np.ndarray] = []
        for begin in range(0, len(pieces), rows):
            batch = pieces[begin : begin + rows]
            parts = [samples[piece.start * size : piece.stop * size] for piece in batch]
            audio, lengths = pad(parts, pinned=pinned)
            if padding is not None:
                padding.add(parts, audio, codec.sampling_rate)
            codes = codec.encode(audio, lengths).numpy()
            kept += [
                row[:, piece.first - piece.start : piece.last - piece.start]
                for piece, row in zip(batch, codes, strict=True)
            ]
        return np.concatenate(kept, axis=1)


def find_pieces(codec: Codec, seconds: float = PIECE_SECONDS) -> Pieces | None:
    """Return how a codec's long segments can be divided; None where its codes may depend on more than a piece."""
    find_reach = getattr(codec, "find_reach", None)
    reach = find_reach() if find_reach is not None else None
    if reach is None:
        return None
    length = round(seconds * codec.sampling_rate / codec.samples_per_frame)
    return Pieces(length=length, before=reach[0], after=reach[1]) if length > sum(reach) else None
