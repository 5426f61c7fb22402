"""Speaker embeddings of a unit's segments, and a sample of the embeddings for the report."""

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import numpy as np
import xxhash

from sharmill.audio.decoder import to_float
from sharmill.audio.resample import Resampling, resample
from sharmill.audio.segments import FileCopy, RecordingSegments, SegmentAudio, SegmentMaker, SegmentReader, SegmentsOnce
from sharmill.engine.delays import add_delay, spent_on
from sharmill.engine.feeders import BATCHES_AHEAD, Feed, Feeders
from sharmill.errors import RejectRecord
from sharmill.manifest import AudioNotes, Segment
from sharmill.models import SpeakerEncoder
from sharmill.models.batches import pad, padded_batches
from sharmill.models.device import DeviceClock
from sharmill.models.memory import MemoryGuard

# Number of embeddings in the sample for the whole dataset, and maximum number per speaker group.
_WANTED_VOICES: Final = 1500
_VOICES_PER_GROUP: Final = 12
NO_TURN: Final = (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class EmbeddedSegment:
    """The speaker embedding of a segment, and facts that were found while its audio was decoded.

    Attributes:
        embedding: (D,) float32, as a tensor if the encoder is on a GPU, otherwise as an array.
        content: hash of the samples; equal for segments with the same samples.
        notes: facts about the file for later stages.
        turn: the lowest similarity of the voices before and after a boundary of windows, and the time of this boundary
            in seconds; NaN if the segment was not divided into windows.
        own, other: similarity to the voice of its own group, and to the most similar voice of another group; NaN if
            unknown.
    """

    embedding: Any
    content: int
    notes: AudioNotes
    turn: tuple[float, float] = NO_TURN
    own: float = math.nan
    other: float = math.nan


_Loaded = tuple[np.ndarray, int, AudioNotes]


@dataclass(frozen=True, slots=True)
class PendingSegments:
    """Segments that feeders are decoding.

    Attributes:
        items: all segments.
        batches: for each batch, the indices of its segments in ``items``.
        once: the decoded segments; each recording is decoded only once.
        feed: the feeders' results for the recordings.
    """

    items: Sequence[Segment]
    batches: list[list[int]]
    once: SegmentsOnce[np.ndarray, tuple[str, int, AudioNotes]]
    feed: Feed[RecordingSegments, Any]

    def count_seconds(self) -> dict[str, float]:
        """Return the seconds of audio to embed, with and without padding, for the statistics of a unit."""
        # The first segment of each batch is its longest.
        padded = sum(len(batch) * self.items[batch[0]].duration for batch in self.batches)
        return {"padded_seconds": padded, "embedded_seconds": sum(segment.duration for segment in self.items)}


@dataclass(frozen=True)
class _ResampledSegment:
    """A callable that returns a segment's samples at an encoder's rate, with their dtype, content hash and notes."""

    sampling_rate: int
    resampling: Resampling

    def __call__(self, audio: SegmentAudio | FileCopy) -> tuple[np.ndarray, tuple[str, int, AudioNotes]]:
        assert isinstance(audio, SegmentAudio)
        samples = audio.samples
        if audio.sampling_rate != self.sampling_rate:
            samples = resample(to_float(samples), audio.sampling_rate, self.sampling_rate, self.resampling)
            samples = samples.astype(np.float32, copy=False)
        return np.ascontiguousarray(samples), (samples.dtype.str, audio.content, audio.notes)


@dataclass
class Embedder:
    """A speaker encoder, with feeders that decode and resample the audio of its next batches.

    Attributes:
        batch_seconds: seconds of audio per batch, including padding.
        pinned: the encoder is on a GPU and receives its batches in pinned memory, so that the next batch can be
            assembled while the encoder computes.
        window_seconds: length of the windows that are compared to find a change of the voice; None to skip the search.
    """

    encoder: SpeakerEncoder
    reader: SegmentReader
    batch_seconds: float
    num_feeders: int = 0
    resampling: Resampling = "soxr"
    guard: MemoryGuard = field(default_factory=lambda: MemoryGuard("the speaker encoder", "match.batch_seconds"))
    pinned: bool = False
    window_seconds: float | None = None

    def __post_init__(self) -> None:
        make = SegmentMaker(self.reader, _ResampledSegment(self.encoder.sampling_rate, self.resampling))
        ahead = BATCHES_AHEAD * self.batch_seconds
        self._clock = DeviceClock("cuda" if self.pinned else "cpu")
        self.feeders = Feeders(make, self.num_feeders, weigh=attrgetter("seconds"), ahead=ahead)

    def close(self) -> None:
        """Stop the feeders."""
        self.feeders.close()

    def __call__(
        self, segments: Sequence[Segment], advance: Callable[[float], None] = lambda seconds: None
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or a RejectRecord with the reason why it has none; see ``finish``."""
        return self.finish(self.begin(segments), advance)

    def begin(self, segments: Sequence[Segment]) -> PendingSegments:
        """Start decoding segments in the feeders.

        The feeders hold a few batches of audio in memory. If a recording has several segments, the decoded segments are
        kept until they are used, in a temporary file if they need much memory.
        """
        batches = padded_batches([segment.duration for segment in segments], self.batch_seconds)
        once = SegmentsOnce[np.ndarray, Any](
            self.reader.roots, (segments[index] for batch in batches for index in batch)
        )
        feed = once.results = self.feeders.feed(once.recordings())
        return PendingSegments(segments, batches, once, feed)

    def finish(
        self,
        begun: PendingSegments,
        advance: Callable[[float], None] = lambda seconds: None,
        when_all_begun: Callable[[], None] = lambda: None,
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or a RejectRecord with the reason why it has none.

        Args:
            advance: called after each batch, with its seconds of audio.
            when_all_begun: called when all segments have been passed to feeders.
        """
        outcomes: dict[int, EmbeddedSegment | RejectRecord] = {}
        self._clock.restart()
        for batch in begun.batches:
            usable: dict[int, _Loaded] = {}
            with spent_on("decoding"):
                for index in batch:
                    try:
                        data, (dtype, content, notes) = begun.once.get(begun.items[index])
                        usable[index] = np.frombuffer(data, dtype), content, notes
                    except RejectRecord as reject:
                        outcomes[index] = reject
            if begun.feed.all_given:
                when_all_begun()
            try:
                outcomes.update(self._embed(usable))
            except RejectRecord as reject:
                outcomes.update(dict.fromkeys(usable, reject))
            advance(sum(begun.items[index].duration for index in batch))
        self.guard.unit_done()
        add_delay("model", self._clock.take())
        return [outcomes[index] for index in range(len(begun.items))]

    def _embed(self, usable: dict[int, _Loaded]) -> dict[int, EmbeddedSegment]:
        """Return the embeddings of the segments of a batch, keyed by index.

        Raises:
            RejectRecord: the batch is a single long segment, which does not fit in memory.
        """
        if not usable:
            return {}
        audio, num_samples = pad([samples for samples, _, _ in usable.values()], pinned=self.pinned)
        seconds = audio.numel() / self.encoder.sampling_rate
        is_long = len(usable) == 1 and seconds > self.batch_seconds
        with self.guard.batch(seconds, len(usable), is_long=is_long), self._clock.running():
            rows = self.encoder.embed(audio, num_samples).float()
        turns = {} if self.window_seconds is None else self._find_turns(usable, self.window_seconds)
        return {
            index: EmbeddedSegment(row, content, notes, turns.get(index, NO_TURN))
            for row, (index, (_, content, notes)) in zip(
                rows.numpy() if rows.device.type == "cpu" else rows, usable.items(), strict=True
            )
        }

    def _find_turns(self, usable: dict[int, _Loaded], window_seconds: float) -> dict[int, tuple[float, float]]:
        """Return ``EmbeddedSegment.turn`` of each segment with at least two whole windows, keyed by index."""
        size = max(1, round(window_seconds * self.encoder.sampling_rate))
        windows = [
            (index, samples[start : start + size])
            for index, (samples, _, _) in usable.items()
            for start in range(0, len(samples) - size + 1, size)
            if len(samples) >= 2 * size
        ]
        found: dict[int, list[np.ndarray]] = {}
        per_batch = max(1, int(self.batch_seconds / window_seconds))
        for start in range(0, len(windows), per_batch):
            batch = windows[start : start + per_batch]
            audio, num_samples = pad([samples for _, samples in batch], pinned=self.pinned)
            with self.guard.batch(len(batch) * window_seconds, len(batch), is_long=False), self._clock.running():
                rows = self.encoder.embed(audio, num_samples).float().cpu().numpy()
            for (index, _), row in zip(batch, rows, strict=True):
                found.setdefault(index, []).append(row)
        return {index: _find_turn(np.stack(rows), window_seconds) for index, rows in found.items()}


def _find_turn(windows: np.ndarray, window_seconds: float) -> tuple[float, float]:
    """Return the lowest similarity of the mean embeddings before and after a boundary of windows, and its time."""
    before = np.cumsum(windows, axis=0, dtype=np.float64)[:-1]
    after = windows.sum(axis=0, dtype=np.float64) - before
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    # Windows of silence, whose embeddings are zeros, are not a change of the voice.
    similarities = np.where(lengths > 0, (before * after).sum(axis=1) / np.maximum(lengths, 1e-9), 1.0)
    lowest = int(similarities.argmin())
    return float(similarities[lowest]), (lowest + 1) * window_seconds


def sample_voices(
    groups: Iterable[tuple[str, list[tuple[str, Any]]]], unit_id: str, size: int, total: int
) -> list[tuple[str, str]]:
    """Draw a sample of embeddings for the report, as pairs of a group's name and a packed embedding.

    Each unit stores its share of the sample in its commit record, so the whole sample has about the same size for
    datasets of any size.

    Args:
        groups: name of each speaker group, with the id and embedding (D,) of each of its utterances.
        unit_id: id of the unit, which seeds the sample.
        size: number of utterances of the unit.
        total: number of utterances of the dataset.
    """
    wanted = _WANTED_VOICES * size / max(1, total)
    found: list[tuple[str, str]] = []
    for name, members in sorted(groups, key=lambda group: _draw(unit_id, group[0])):
        chosen = sorted(members, key=lambda member: _draw(unit_id, member[0]))[:_VOICES_PER_GROUP]
        # The report shows how similar the voices of a group are, so the voices drawn from a group are included either
        # all together or not at all.
        if wanted < len(chosen) and _draw(f"share of {unit_id}", name) / 2**64 >= wanted / len(chosen):
            break
        found += [(name, pack_voice(embedding)) for _, embedding in chosen]
        wanted -= len(chosen)
        if wanted <= 0:
            break
    return found


def _draw(unit_id: str, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{unit_id}\n{name}".encode("utf-8", "surrogatepass"))


def to_array(embedding: Any) -> np.ndarray:
    """Return an embedding (D,), an array or a tensor on any device, as an array of float32."""
    return np.asarray(embedding.cpu() if hasattr(embedding, "cpu") else embedding, np.float32)


def pack_voice(embedding: Any) -> str:
    """Encode an array or a tensor (D,) as base64 text, with values quantized in steps of 1/127 of the largest."""
    values = to_array(embedding)
    steps = np.rint(values * (127 / max(float(np.abs(values).max(initial=0.0)), 1e-9)))
    return base64.b64encode(steps.astype(np.int8).tobytes()).decode()


def unpack_voice(text: str) -> np.ndarray:
    """Decode an embedding (D,) from ``pack_voice``, scaled to unit length."""
    steps = np.frombuffer(base64.b64decode(text), np.int8).astype(np.float32)
    return steps / max(float(np.linalg.norm(steps)), 1e-9)
