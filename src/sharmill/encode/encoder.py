"""Encoding of blocks of segments with a codec in one rank."""

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.decoder import to_float
from sharmill.audio.files import open_bytes
from sharmill.audio.flac import decode_flac, flac_header
from sharmill.audio.resample import resample, resampled_length
from sharmill.audio.segments import find_peak
from sharmill.encode.codes import write_block
from sharmill.encode.config import EncodeConfig
from sharmill.encode.segments import seconds_of
from sharmill.engine.ahead import AheadProcessor
from sharmill.engine.delays import add_delay, spent_on
from sharmill.engine.feeders import BATCHES_AHEAD, Feed, Feeders
from sharmill.engine.stage import Advance
from sharmill.engine.unit import Output, Unit
from sharmill.errors import FatalError, RejectRecord, UnitFailed
from sharmill.files.staging import Staging
from sharmill.manifest import Reject
from sharmill.models import Codec
from sharmill.models.batches import PIECE_SECONDS, Batch, find_pieces, plan_batches
from sharmill.models.device import DeviceClock, fit_batch_seconds
from sharmill.models.memory import ELSEWHERE, MemoryGuard, require_room
from sharmill.shar.arrays import codes_dtype
from sharmill.shar.index import CodecRecord
from sharmill.shar.places import hash_segment
from sharmill.shar.tar import open_field

# Maximum number of segments named in a message.
_MOST_NAMED: Final = 3
# Number of segments of other units to encode in order to find out whether the unit or the device is at fault.
_NUM_PROBES: Final = 16
# Number of files that a reader keeps open. The segments of a unit are sorted by length, so reading alternates between a
# few files.
_OPEN_FILES: Final = 32
# Advice about segments that do not fit into memory with any batch size.
_TOO_LONG_ADVICE: Final = f"all other units continue, and {ELSEWHERE}"


class StoredSegment(NamedTuple):
    """Segment stored as an item of a dataset file: its location, hash and format."""

    path: Path
    offset: int
    size: int
    hash: tuple[int, int]
    num_samples: int
    sampling_rate: int

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}"

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sampling_rate


class StoredReader:
    """Reader that returns stored segments at the sampling rate of a codec.

    The audio is compared with the hash from the survey, since a codec would encode damaged audio without an error.
    Recently used files stay open.
    """

    def __init__(self, sampling_rate: int) -> None:
        self._sampling_rate = sampling_rate
        self._open = lru_cache(_OPEN_FILES)(partial(open_field, buffering=0))

    def __reduce__(self) -> tuple[type["StoredReader"], tuple[int]]:
        return StoredReader, (self._sampling_rate,)

    def __call__(self, segment: StoredSegment) -> Iterator[np.ndarray]:
        """Yield the samples as one array (samples,): float32, or int16 for 16-bit audio that is not resampled.

        Raises:
            UnitFailed: the file has changed, or its audio is unusable.
            DamagedShard: the file does not exist.
        """
        data = os.pread(self._open(segment.path).fileno(), segment.size, segment.offset)
        if hash_segment(data, segment.num_samples, segment.sampling_rate) != segment.hash:
            raise UnitFailed(
                f"{segment.path} has changed since it was written: delete it and run the stage write again",
                code="damaged_shard",
            )
        try:
            samples, rate = _decode(data)
            find_peak(samples)
        except RejectRecord as error:
            raise UnitFailed(f"the stored audio of {segment} is unusable: {error}", code="damaged_shard") from error
        promised = segment.num_samples, segment.sampling_rate
        if (len(samples), rate) != promised:
            raise UnitFailed(
                f"the stored audio of {segment} has {len(samples)} samples at {rate} Hz, not {promised}",
                code="damaged_shard",
            )
        yield samples if rate == self._sampling_rate else resample(to_float(samples), rate, self._sampling_rate)


def _decode(data: bytes) -> tuple[np.ndarray, int]:
    # The survey has checked that FLAC data contain a single stream, so a matching MD5 sum proves that the stream is
    # complete.
    if (decoded := decode_flac(data)) is not None and decoded.shape[1] == 1:
        _, _, rate = flac_header(data) or (0, 0, 0)
        return decoded[:, 0], rate
    with open_bytes(AudioBytes("audio data", data)) as recording:
        return recording.read_stored(), recording.info.sampling_rate


# State of a unit that has been started: its segments, their numbers of frames, its batches, and the feed of audio in
# the order of the batches.
_StartedUnit = tuple[list[StoredSegment], list[int], list[Batch], Feed[StoredSegment, np.ndarray]]


class EncodeProcessor(AheadProcessor[_StartedUnit]):
    """Processor that encodes blocks of segments with a codec, in batches of segments of similar length.

    Feeders decode the audio ahead of time. With feeders, the codec runs in a thread of its own, so that the next batch
    can be padded while the codec computes.

    Args:
        settings: the configuration of the stage.
        record: the record of the codec in the index of the dataset.
        segments: ``SEGMENT`` records of the whole dataset.
        files: paths of the audio files, indexed by shard and by audio field.
        device: device of the codec: ``cpu`` or ``cuda``. It affects batch sizes, and ``cuda`` uses pinned memory.
        device_kind: kind of the device, such as the name of the GPU.
        num_feeders: number of processes that decode and resample audio.
    """

    def __init__(
        self,
        settings: EncodeConfig,
        record: CodecRecord,
        codec: Codec,
        segments: np.ndarray,
        files: list[list[Path]],
        device: str,
        device_kind: str,
        num_feeders: int,
    ) -> None:
        self._reader = StoredReader(codec.sampling_rate)
        ahead = BATCHES_AHEAD * fit_batch_seconds(settings.batch_seconds, device)
        super().__init__(Feeders(self._reader, num_feeders, weigh=attrgetter("seconds"), ahead=ahead))
        self.device_kind = device_kind
        self._settings = settings
        self._record = record
        self._codec = codec
        self._segments = segments
        self._files = files
        self._device = device
        self._batch_seconds = seconds = settings.batch_seconds
        room = require_room(codec, device, seconds, "encode.batch_seconds")
        self._pieces = find_pieces(codec)
        # Duration in seconds of the longest segment that fits into the memory of the device.
        self._most_seconds = room if self._pieces is None else math.inf
        self._max_frames = fit_batch_seconds(seconds, device) * codec.sampling_rate / codec.samples_per_frame
        self._guard = MemoryGuard("the codec", "encode.batch_seconds")
        self._clock = DeviceClock(device)
        self._thread = ThreadPoolExecutor(1, "codec") if num_feeders else None

    def begin(self, unit: Unit) -> _StartedUnit:
        """Start decoding the audio of a unit, and return its state.

        Raises:
            UnitFailed: a segment does not fit into memory.
        """
        segments = self._segments[unit.params["start"] : unit.params["stop"]]
        seconds = seconds_of(segments["place"])
        number = int(np.count_nonzero(seconds > self._most_seconds))
        if number:
            longest = segments[int(seconds.argmax())]
            path = self._files[int(longest["shard"])][int(longest["field"])]
            raise UnitFailed(
                f"{number} of {len(segments)} segments are longer than the {self._most_seconds:.0f} s that fit "
                f"in the memory of the device: the longest ({seconds.max():.0f} s) is in {path} at byte "
                f"{longest['place']['offset']}; {_TOO_LONG_ADVICE}",
                code="out_of_memory",
            )
        items = self._find(segments)
        frames = list(map(self._count_frames, items))
        batches = self._plan_batches(frames)
        return items, frames, batches, self.feeders.feed(items[index] for batch in batches for index in batch.items)

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        segments, frames, batches, feed = self.take(unit)
        self._clock.restart()
        share = unit.cost / max(1, sum(frames))
        dtype = codes_dtype(self._codec.codebook_size)
        # Segments without codes keep an array with zero frames.
        codes: list[np.ndarray] = [np.empty((self._codec.num_codebooks, 0), dtype)] * len(frames)
        problems: dict[int, str] = {}
        with closing(self._encode_all(batches, segments, feed)) as encoded:
            for batch, rows in encoded:
                for index, found in zip(batch.items, rows, strict=True):
                    if isinstance(found, str):
                        problems[index] = found
                    else:
                        codes[index] = np.ascontiguousarray(found.astype(dtype))
                advance(sum(frames[index] for index in batch.items) * share)
        self._guard.unit_done()
        add_delay("model", self._clock.take())
        if len(problems) == unit.size:
            self._require_sound(unit, problems[0])
        seconds = [segment.seconds for segment in segments]
        padded = sum(batch.num_rows * batch.num_frames for batch in batches)
        rejects = [
            Reject(
                f"encode/{self._record.name}", "bad_codes", problem,
                {"segment": unit.params["start"] + index, "place": str(segments[index])},
            )
            for index, problem in sorted(problems.items())
        ]  # fmt: skip
        return Output(
            files=write_block(staging, unit.index, codes, self._codec.codebook_size),
            num_out=unit.size - len(rejects),
            rejects=rejects,
            stats={
                "seconds": float(np.delete(seconds, list(problems)).sum()),
                "encoded_seconds": float(np.sum(seconds)),
                "padded_seconds": padded * self._codec.samples_per_frame / self._codec.sampling_rate,
                "feeder_seconds": self.feeders.take_cpu_seconds(),
                "codec": msgspec.to_builtins(self._record),
            },
        )

    def _count_frames(self, segment: StoredSegment) -> int:
        rate, size = self._codec.sampling_rate, self._codec.samples_per_frame
        return -(-resampled_length(segment.num_samples, segment.sampling_rate, rate) // size)

    def _find(self, segments: np.ndarray) -> list[StoredSegment]:
        """Convert ``SEGMENT`` records to ``StoredSegment`` objects."""
        return [
            StoredSegment(self._files[shard][field], offset, size, tuple(found), num_samples, rate)
            for (found, offset, size, num_samples, rate), shard, field in segments.tolist()
        ]

    def _plan_batches(self, frames: Sequence[int]) -> list[Batch]:
        """Divide items with these numbers of frames into batches; an item that must be cut is a batch of its own."""
        cut = [index for index, number in enumerate(frames) if self._is_cut(number)]
        whole = [index for index, number in enumerate(frames) if not self._is_cut(number)]
        planned = plan_batches(
            [frames[index] for index in whole],
            self._settings.batch_seconds,
            self._codec,
            self._device,
            canonical=self._settings.canonical_shapes,
        )
        return [
            *(Batch([index], frames[index], 1) for index in cut),
            *(dataclasses.replace(batch, items=[whole[index] for index in batch.items]) for batch in planned),
        ]

    def _is_cut(self, num_frames: int) -> bool:
        return self._pieces is not None and num_frames > self._pieces.length

    def _require_sound(self, unit: Unit, problem: str) -> None:
        """Raise UnitFailed if this rank cannot encode segments of other units either: its device may be broken."""
        numbers = np.unique(np.linspace(0, len(self._segments) - 1, _NUM_PROBES, dtype=np.int64))
        probes = self._segments[numbers[(numbers < unit.params["start"]) | (numbers >= unit.params["stop"])]]
        for segment in self._find(probes[seconds_of(probes["place"]) <= self._most_seconds]):
            (samples,) = self._reader(segment)
            if not isinstance(self._encode_alone(segment, samples), str):
                return
        raise UnitFailed(
            f"none of the {unit.size} segments, nor any segment of other units, could be encoded: this device is "
            f"broken, or the codec is unusable; the first problem: {problem}",
            code="bad_codes",
        )

    def _encode_all(
        self, batches: Sequence[Batch], segments: Sequence[StoredSegment], feed: Feed[StoredSegment, np.ndarray]
    ) -> Generator[tuple[Batch, list[np.ndarray | str]], None, None]:
        """Yield each batch with the results of ``_finish`` for its segments.

        If the codec has a thread, the audio of the next batch is taken from the feed and padded while the codec
        computes.
        """
        begun: deque[tuple[Batch, list[np.ndarray], Callable[[], np.ndarray]]] = deque()
        try:
            for batch in batches:
                with spent_on("decoding"):
                    samples = [one for _ in batch.items for one in next(feed)]
                if feed.all_given:
                    self.begin_next()
                begun.append((batch, samples, self._start(batch, samples)))
                if self._thread is None or len(begun) > 1:
                    yield begun[0][0], self._finish_each(*begun.popleft(), segments)
            while begun:
                yield begun[0][0], self._finish_each(*begun.popleft(), segments)
        finally:
            # If the unit has failed, wait for its batches that the thread is still processing, since the next unit uses
            # the same clock and memory.
            for _, _, result in begun:
                with suppress(Exception):
                    result()

    def _finish_each(
        self,
        batch: Batch,
        samples: Sequence[np.ndarray],
        result: Callable[[], np.ndarray],
        segments: Sequence[StoredSegment],
    ) -> list[np.ndarray | str]:
        """Return the results of ``_finish``; retry each failed segment alone, as another segment may be the cause."""
        items = [segments[index] for index in batch.items]
        found = self._finish(batch, items, result)
        if len(items) == 1:
            return found
        return [
            self._encode_alone(item, own) if isinstance(one, str) else one
            for item, own, one in zip(items, samples, found, strict=True)
        ]

    def _encode_alone(self, segment: StoredSegment, samples: np.ndarray) -> np.ndarray | str:
        (batch,) = self._plan_batches([self._count_frames(segment)])
        (found,) = self._finish(batch, [segment], self._start(batch, [samples]))
        return found

    def _finish(
        self, batch: Batch, items: Sequence[StoredSegment], result: Callable[[], np.ndarray]
    ) -> list[np.ndarray | str]:
        """Return the codes (codebooks, frames) of each segment of a batch, or a sentence about its problem.

        Raises:
            UnitFailed: the batch does not fit into memory.
            FatalError: no batch has fitted into memory so far.
        """
        try:
            rows = result()
        except RejectRecord as reject:
            # Fail the unit instead of rejecting the segment, so that a device with more memory can encode it.
            raise UnitFailed(
                f"the segment {items[0]}: {reject.detail}; {_TOO_LONG_ADVICE}", code="out_of_memory"
            ) from reject
        except (FatalError, UnitFailed) as error:
            if error.code == "bad_codes":
                return [str(error)] * len(items)
            if isinstance(error, FatalError):
                raise
            named = ", ".join(map(str, items[:_MOST_NAMED]))
            more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
            raise UnitFailed(f"{error} (segments {named}{more})", code=error.code) from error
        # Rows beyond the items are silence.
        return [self._check(row, batch, self._count_frames(item)) for row, item in zip(rows, items, strict=False)]

    def _check(self, row: np.ndarray, batch: Batch, num_frames: int) -> np.ndarray | str:
        """Return the codes of the first ``num_frames`` frames of a row, or a sentence about what is wrong with them."""
        shape, size = (self._codec.num_codebooks, batch.num_frames), self._codec.codebook_size
        codes = row[:, :num_frames]
        if row.shape != shape:
            return f"the codec returned codes of shape {row.shape} instead of (codebooks, frames) = {shape}"
        # Both comparisons are false for NaN.
        if not (codes.min() >= 0 and codes.max() < size):
            return f"the codec returned indices {codes.min()} to {codes.max()}, outside its codebook of {size}"
        return codes

    def _start(self, batch: Batch, samples: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Pad a batch, start the codec in its thread if it has one, and return a function that returns the codes.

        The function raises RejectRecord for a single segment that is too long, and the errors of ``_finish``.
        """
        codec, pinned = self._codec, self._device == "cuda"
        pieces = self._pieces if self._is_cut(batch.num_frames) else None
        if pieces is not None:
            num_rows = pieces.rows(self._max_frames)
            seconds, is_least, is_long = num_rows * PIECE_SECONDS, num_rows == 1, False
            whole = to_float(samples[0])

            def encode() -> np.ndarray:
                return pieces.encode(codec, whole, self._max_frames, pinned=pinned)[None]
        else:
            audio, num_samples = batch.fill(samples, codec.samples_per_frame, pinned=pinned)
            num_rows, seconds, is_least = batch.num_rows, audio.numel() / codec.sampling_rate, False
            is_long = len(batch.items) == 1 and seconds > self._batch_seconds

            def encode() -> np.ndarray:
                return codec.encode(audio, num_samples).numpy()

        def run() -> np.ndarray:
            with self._guard.batch(seconds, num_rows, is_long=is_long, is_least=is_least), self._clock.running():
                return encode()

        return run if self._thread is None else self._thread.submit(run).result
