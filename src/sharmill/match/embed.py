"""Speaker embeddings of a unit's segments, on the fly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sharmill.audio.resample import resample
from sharmill.audio.segments import SegmentReader
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment
from sharmill.models.batches import pad, padded_batches
from sharmill.models.protocols import SpeakerEncoder
from sharmill.prefetch import prefetch


@dataclass(frozen=True)
class Embedder:
    """Decodes ahead in ``threads`` threads, resamples to the encoder's rate, embeds in batches of padded seconds."""

    encoder: SpeakerEncoder
    reader: SegmentReader
    batch_seconds: float
    threads: int

    def __call__(
        self, segments: Sequence[Segment], advance: Callable[[float], None] = lambda seconds: None
    ) -> tuple[np.ndarray, dict[int, RejectRecord]]:
        """Return embeddings (N, D) float32, and why there is none for some; those rows are zero.

        ``advance`` is called with the seconds of audio of each batch.
        """
        embeddings = np.zeros((len(segments), self.encoder.embedding_size), dtype=np.float32)
        rejects: dict[int, RejectRecord] = {}
        batches = padded_batches([segment.duration for segment in segments], self.batch_seconds)
        in_order = [index for batch in batches for index in batch]
        loaded = prefetch(
            lambda index: self._load(segments[index]),
            in_order,
            threads=self.threads,
            ahead=2 * self.batch_seconds,
            weigh=lambda index: segments[index].duration,
        )
        for batch in batches:
            usable: list[tuple[int, np.ndarray]] = []
            for index in batch:
                samples = next(loaded)
                if isinstance(samples, RejectRecord):
                    rejects[index] = samples
                else:
                    usable.append((index, samples))
            if usable:
                indices, arrays = zip(*usable, strict=True)
                embeddings[list(indices)] = self.encoder.embed(*pad(arrays)).numpy()
            advance(sum(segments[index].duration for index in batch))
        return embeddings, rejects

    def _load(self, segment: Segment) -> np.ndarray | RejectRecord:
        try:
            samples, rate = self.reader.read(segment)
            return resample(samples, rate, self.encoder.sampling_rate)
        except RejectRecord as reject:
            return reject
