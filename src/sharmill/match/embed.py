"""Speaker embeddings of a unit's segments, on the fly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from sharmill.audio.resample import Resampling, resample_for_encoder
from sharmill.audio.segments import SegmentAudio, SegmentReader
from sharmill.audio.spool import Kept, Spool
from sharmill.engine.delays import spent_on
from sharmill.errors import RejectRecord
from sharmill.manifest import AudioNotes, Segment
from sharmill.models.memory import MemoryGuard
from sharmill.models.protocols import SpeakerEncoder, pad, padded_batches
from sharmill.models.shapes import Padding
from sharmill.prefetch import prefetch

_SPOOLED_BYTES: Final = 64 << 20
_BATCHES_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class EmbeddedSegment:
    """The voice of a segment, and what was seen while its audio was decoded.

    Attributes:
        embedding: (D,) float32: an array, or a tensor on the encoder's device where that is no CPU.
        content: equal for segments with the same samples.
        notes: about the file, for the next stage that reads it.
    """

    embedding: Any
    content: int
    notes: AudioNotes


_Loaded = tuple[np.ndarray, int, AudioNotes]


@dataclass(frozen=True)
class BegunSegments:
    """Segments whose decoding has begun, in batches of their numbers; ``loaded`` yields what was decoded in order."""

    segments: Sequence[Segment]
    batches: list[list[int]]
    loaded: Iterator[_Loaded | RejectRecord]


@dataclass(frozen=True)
class Embedder:
    """A speaker encoder, fed by ``threads`` threads that decode and resample ahead of its batches.

    ``batch_seconds`` is the audio in one batch, padding included; ``pinned`` is for an encoder on a GPU, which gets its
    batches from pinned memory: the next is put together while it computes.
    """

    encoder: SpeakerEncoder
    reader: SegmentReader
    batch_seconds: float
    threads: int
    resampling: Resampling = "soxr"
    guard: MemoryGuard = field(default_factory=lambda: MemoryGuard("the speaker encoder", "match.batch_seconds"))
    pinned: bool = False

    def __call__(
        self, segments: Sequence[Segment], advance: Callable[[float], None] = lambda seconds: None
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or why it has none; ``advance`` as of ``finish``."""
        return self.finish(self.begin(segments), advance)

    def begin(self, segments: Sequence[Segment]) -> BegunSegments:
        """Begin to decode segments, and return when the first is decoded.

        Some batches of audio are held, and in a spool all segments of each recording that has several of them.
        """
        decoded = _Decoded(self, segments)
        batches = padded_batches([segment.duration for segment in segments], self.batch_seconds)
        loaded = prefetch(
            decoded.load,
            [index for batch in batches for index in batch],
            threads=self.threads,
            ahead=_BATCHES_AHEAD * self.batch_seconds,
            weigh=lambda index: segments[index].duration,
        )
        return BegunSegments(segments, batches, chain(list(islice(loaded, 1)), loaded))

    def finish(
        self,
        begun: BegunSegments,
        advance: Callable[[float], None] = lambda seconds: None,
        padding: Padding | None = None,
        when_all_begun: Callable[[], None] = lambda: None,
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or why it has none.

        ``advance`` is called with the seconds of every batch that is done, what was padded is added to ``padding``, and
        ``when_all_begun`` is called at each of the last batches, which are being decoded by then.
        """
        segments, loaded = begun.segments, begun.loaded
        outcomes: dict[int, EmbeddedSegment | RejectRecord] = {}
        for number, batch in enumerate(begun.batches, start=1):
            if number + _BATCHES_AHEAD > len(begun.batches):
                when_all_begun()
            usable: dict[int, _Loaded] = {}
            for index in batch:
                with spent_on("decoding"):
                    item = next(loaded)
                if isinstance(item, RejectRecord):
                    outcomes[index] = item
                else:
                    usable[index] = item
            try:
                with spent_on("model"):
                    outcomes.update(self._embed(usable, padding))
            except RejectRecord as reject:
                outcomes.update(dict.fromkeys(usable, reject))
            advance(sum(segments[index].duration for index in batch))
        self.guard.unit_done()
        return [outcomes[index] for index in range(len(segments))]

    def _embed(self, usable: dict[int, _Loaded], padding: Padding | None) -> dict[int, EmbeddedSegment]:
        """Return the embeddings of a batch; raise RejectRecord for a segment that is too long to fit in memory."""
        if not usable:
            return {}
        items = [samples for samples, _, _ in usable.values()]
        audio, num_samples = pad(items, pinned=self.pinned)
        seconds = audio.numel() / self.encoder.sampling_rate
        if padding is not None:
            padding.add(items, audio, self.encoder.sampling_rate)
        with self.guard.batch(seconds, len(usable), is_long=len(usable) == 1 and seconds > self.batch_seconds):
            rows = self.encoder.embed(audio, num_samples).float()
        return {
            index: EmbeddedSegment(row, content, notes)
            for row, (index, (_, content, notes)) in zip(
                rows.numpy() if rows.device.type == "cpu" else rows, usable.items(), strict=True
            )
        }

    def prepare(self, audio: SegmentAudio) -> np.ndarray:
        """Return the samples of a segment at the rate of the encoder."""
        return resample_for_encoder(audio.samples, audio.sampling_rate, self.encoder.sampling_rate, self.resampling)


class _Decoded:
    """The audio of segments, in any order.

    Recordings of which there are several are decoded first: each is opened once and read in the order of offsets. What
    will be asked for in another order lies in a spool until then.
    """

    def __init__(self, embedder: Embedder, segments: Sequence[Segment]) -> None:
        self._embedder = embedder
        self._segments = segments
        self._spool = Spool(_SPOOLED_BYTES)
        self._found: dict[int, tuple[Kept, int, AudioNotes] | RejectRecord] = {}
        recordings: dict[Hashable, list[int]] = {}
        for index, segment in enumerate(segments):
            if not segment.whole_file:
                recordings.setdefault(segment.recording, []).append(index)
        several = [indices for indices in recordings.values() if len(indices) > 1]
        for found in prefetch(self._decode_recording, several, threads=embedder.threads, ahead=0):
            self._found.update(found)

    def load(self, index: int) -> _Loaded | RejectRecord:
        """Return samples, content and notes of a segment, or why it cannot be used; once for each."""
        found = self._found.pop(index, None)
        if found is None:
            return self._decode(self._segments[index])
        if isinstance(found, RejectRecord):
            return found
        kept, content, notes = found
        samples = np.frombuffer(self._spool.get(kept), dtype=np.float32).copy()
        self._spool.forget(kept)
        return samples, content, notes

    def _decode(self, segment: Segment) -> _Loaded | RejectRecord:
        try:
            audio = self._embedder.reader.read(segment)
            return self._embedder.prepare(audio), audio.content, audio.notes
        except RejectRecord as reject:
            return reject

    def _decode_recording(self, indices: list[int]) -> dict[int, tuple[Kept, int, AudioNotes] | RejectRecord]:
        found: dict[int, tuple[Kept, int, AudioNotes] | RejectRecord] = {}
        for place, audio in self._embedder.reader.read_recording([self._segments[index] for index in indices]):
            index = indices[place]
            if isinstance(audio, RejectRecord):
                found[index] = audio
                continue
            try:
                samples = self._embedder.prepare(audio)
            except RejectRecord as reject:
                found[index] = reject
                continue
            found[index] = self._spool.put(samples.astype(np.float32).tobytes()), audio.content, audio.notes
        return found
