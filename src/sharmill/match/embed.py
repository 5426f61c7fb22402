"""Speaker embeddings of a unit's segments, on the fly, and a sample of them for the report."""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import numpy as np
import xxhash

from sharmill.audio.decoder import to_float
from sharmill.audio.resample import Resampling, resample
from sharmill.audio.segments import FileCopy, SegmentAudio, SegmentMaker, SegmentReader, SegmentsOnce, Together
from sharmill.engine.delays import add_delay, spent_on
from sharmill.engine.feeders import BATCHES_AHEAD, Feed, Feeders
from sharmill.errors import RejectRecord
from sharmill.manifest import AudioNotes, Segment
from sharmill.models import SpeakerEncoder
from sharmill.models.batches import pad, padded_batches
from sharmill.models.device import DeviceClock
from sharmill.models.memory import MemoryGuard

# Sizes of the sample of voices: for a dataset, and for one group.
_WANTED_VOICES: Final = 1500
_VOICES_PER_GROUP: Final = 12


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


@dataclass(frozen=True, slots=True)
class BegunSegments:
    """Segments that feeders decode, in batches of their numbers.

    Attributes:
        items: all of them.
        feed: of their recordings.
    """

    items: Sequence[Segment]
    batches: list[list[int]]
    once: SegmentsOnce[np.ndarray, tuple[str, int, AudioNotes]]
    feed: Feed[Together, Any]


@dataclass(frozen=True)
class _AtRate:
    """The samples of a segment at the rate of an encoder, with their type, content and notes."""

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
    """A speaker encoder, and the feeders that decode and resample ahead of its batches.

    ``batch_seconds`` is the audio in one batch, padding included; ``pinned`` is for an encoder on a GPU, which gets its
    batches from pinned memory: the next is put together while it computes.
    """

    encoder: SpeakerEncoder
    reader: SegmentReader
    batch_seconds: float
    num_feeders: int = 0
    resampling: Resampling = "soxr"
    guard: MemoryGuard = field(default_factory=lambda: MemoryGuard("the speaker encoder", "match.batch_seconds"))
    pinned: bool = False

    def __post_init__(self) -> None:
        make = SegmentMaker(self.reader, _AtRate(self.encoder.sampling_rate, self.resampling))
        ahead = BATCHES_AHEAD * self.batch_seconds
        self._clock = DeviceClock("cuda" if self.pinned else "cpu")
        self.feeders = Feeders(make, self.num_feeders, weigh=attrgetter("seconds"), ahead=ahead)

    def close(self) -> None:
        """End the feeders."""
        self.feeders.close()

    def __call__(
        self, segments: Sequence[Segment], advance: Callable[[float], None] = lambda seconds: None
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or why it has none; ``advance`` as of ``finish``."""
        return self.finish(self.begin(segments), advance)

    def begin(self, segments: Sequence[Segment]) -> BegunSegments:
        """Have feeders begin to decode segments.

        Some batches of audio are held, and in a spool all segments of each recording that has several of them.
        """
        batches = padded_batches([segment.duration for segment in segments], self.batch_seconds)
        once = SegmentsOnce[np.ndarray, Any](
            self.reader.roots, (segments[index] for batch in batches for index in batch)
        )
        feed = once.results = self.feeders.feed(once.recordings())
        return BegunSegments(segments, batches, once, feed)

    def finish(
        self,
        begun: BegunSegments,
        advance: Callable[[float], None] = lambda seconds: None,
        when_all_begun: Callable[[], None] = lambda: None,
    ) -> list[EmbeddedSegment | RejectRecord]:
        """Return the embedding of every segment, or why it has none.

        ``advance`` is called with the seconds of every batch that is done, and ``when_all_begun`` once all segments
        are given to feeders.
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
        """Return the embeddings of a batch; raise RejectRecord for a segment that is too long to fit in memory."""
        if not usable:
            return {}
        audio, num_samples = pad([samples for samples, _, _ in usable.values()], pinned=self.pinned)
        seconds = audio.numel() / self.encoder.sampling_rate
        is_long = len(usable) == 1 and seconds > self.batch_seconds
        with self.guard.batch(seconds, len(usable), is_long=is_long), self._clock.running():
            rows = self.encoder.embed(audio, num_samples).float()
        return {
            index: EmbeddedSegment(row, content, notes)
            for row, (index, (_, content, notes)) in zip(
                rows.numpy() if rows.device.type == "cpu" else rows, usable.items(), strict=True
            )
        }


def sample_voices(
    groups: Iterable[tuple[str, list[tuple[str, Any]]]], unit_id: str, size: int, total: int
) -> list[tuple[str, str]]:
    """Return names of groups, each with the embedding of one of its utterances, packed in text: for the report.

    Each unit adds its share to its commit record, so that a dataset of any size has about as many voices, in whole or
    half groups.

    Args:
        groups: names of groups, and the ids and embeddings (D,) of their utterances.
        unit_id: the unit of these groups, by which the sample is drawn.
        size: number of utterances of the unit.
        total: number of utterances of the dataset.
    """
    wanted = _WANTED_VOICES * size / max(1, total)
    found: list[tuple[str, str]] = []
    for name, members in sorted(groups, key=lambda group: _draw(unit_id, group[0])):
        chosen = sorted(members, key=lambda member: _draw(unit_id, member[0]))[:_VOICES_PER_GROUP]
        # Part of a group would say nothing of how its voices lie together: all of it, or by chance none.
        if wanted < len(chosen) and _draw(f"share of {unit_id}", name) / 2**64 >= wanted / len(chosen):
            break
        found += [(name, pack_voice(embedding)) for _, embedding in chosen]
        wanted -= len(chosen)
        if wanted <= 0:
            break
    return found


def _draw(unit_id: str, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{unit_id}\n{name}".encode("utf-8", "surrogatepass"))


def pack_voice(embedding: Any) -> str:
    """Return an embedding (D,), an array or a tensor, as text: in steps of 1/127 of its largest value."""
    values = np.asarray(embedding.cpu() if hasattr(embedding, "cpu") else embedding, np.float32)
    steps = np.rint(values * (127 / max(float(np.abs(values).max(initial=0.0)), 1e-9)))
    return base64.b64encode(steps.astype(np.int8).tobytes()).decode()


def unpack_voice(text: str) -> np.ndarray:
    """Return the embedding (D,) that ``pack_voice`` has made a text of, with length 1."""
    steps = np.frombuffer(base64.b64decode(text), np.int8).astype(np.float32)
    return steps / max(float(np.linalg.norm(steps)), 1e-9)
