"""Speaker embeddings of a unit's segments, on the fly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sharmill.audio.resample import resample
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import AudioNotes, Segment
from sharmill.models.protocols import SpeakerEncoder, pad, padded_batches
from sharmill.prefetch import prefetch


@dataclass(frozen=True, slots=True)
class EmbeddedSegment:
    """The voice of a segment, and what was seen while its audio was decoded.

    Attributes:
        embedding: (D,) float32.
        content: equal for segments with the same samples.
        notes: about the file, for the next stage that reads it.
    """

    embedding: np.ndarray
    content: int
    notes: AudioNotes


@dataclass(frozen=True)
class Embedder:
    """A speaker encoder, fed by ``threads`` threads that decode and resample ahead of its batches.

    ``batch_seconds`` is the audio in one batch, padding included.
    """

    encoder: SpeakerEncoder
    reader: SegmentReader
    batch_seconds: float
    threads: int

    def __call__(
        self, segments: Sequence[Segment], advance: Callable[[float], None] = lambda seconds: None
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or why it has none.

        ``advance`` is called with the seconds of every batch that is done.
        """
        outcomes: dict[int, EmbeddedSegment | RejectRecord] = {}
        batches = padded_batches([segment.duration for segment in segments], self.batch_seconds)
        loaded = prefetch(
            lambda index: self._load(segments[index]),
            [index for batch in batches for index in batch],
            threads=self.threads,
            ahead=2 * self.batch_seconds,
            weigh=lambda index: segments[index].duration,
        )
        for batch in batches:
            usable: dict[int, tuple[np.ndarray, int, AudioNotes]] = {}
            for index in batch:
                item = next(loaded)
                if isinstance(item, RejectRecord):
                    outcomes[index] = item
                else:
                    usable[index] = item
            if usable:
                rows = self.encoder.embed(*pad([samples for samples, _, _ in usable.values()])).numpy()
                for row, (index, (_, content, notes)) in zip(rows, usable.items(), strict=True):
                    outcomes[index] = EmbeddedSegment(row.astype(np.float32), content, notes)
            advance(sum(segments[index].duration for index in batch))
        return [outcomes[index] for index in range(len(segments))]

    def _load(self, segment: Segment) -> tuple[np.ndarray, int, AudioNotes] | RejectRecord:
        try:
            audio = self.reader.read(segment)
            samples = resample(audio.samples, audio.sampling_rate, self.encoder.sampling_rate)
        except RejectRecord as reject:
            return reject
        return samples, audio.content, audio.notes
