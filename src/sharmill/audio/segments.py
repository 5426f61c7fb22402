"""Reading of a manifest's segments, and the check that their audio still is what it was.

A stage that reads a segment gets, beside the samples, notes about the file as it was read. The next stage that reads
the segment compares with them.
"""

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import soundfile as sf
import xxhash

from sharmill.audio.arrow import UnreadableRows, open_rows, read_audio
from sharmill.audio.audio_bytes import AudioBytes
from sharmill.audio.decoder import AudioInfo, to_float
from sharmill.audio.files import Recording, decode_bytes, open_bytes, open_recording
from sharmill.audio.resample import segment_bounds
from sharmill.audio.roots import AudioRoots
from sharmill.audio.sound import measure_sound
from sharmill.errors import RejectRecord
from sharmill.files.checksums import checksum_bytes
from sharmill.manifest import AudioNotes, Member, Segment

# -60 dB of full scale: audio whose loudest sample is below has no speech in it.
SILENT_PEAK: Final = 1e-3
# 24 dB above full scale. Speech overshoots by less: decoders of lossy formats by a few dB, float recordings by as much
# as their gain was too high. Floats with the values of 16-bit integers are beyond it unless they are silent
# (SILENT_PEAK * 32768 = 33), and those of more bits all the more. Integer formats never exceed 1.
_HIGHEST_PEAK: Final = 16.0
# A file that is copied as a whole may have pictures and notes of this size beside its samples.
_MAX_FILE_BYTES: Final = 64 << 20
# In memory, of rows of parquet files and of what is made of segments.
_SPOOLED_BYTES: Final = 64 << 20
# Samples of a speaker encoder.
_BYTES_PER_SECOND: Final = 64_000
# A recording of hours is never in memory as a whole.
_PART_BYTES: Final = 4 << 20

Made = TypeVar("Made")
# Bytes, or an array.
Data = TypeVar("Data")
# Numbers of segments of a recording, each with what is made of it, or why there is nothing.
Part: TypeAlias = list[tuple[int, tuple[Data, Made] | RejectRecord]]


@dataclass(frozen=True)
class SegmentPlace:
    """A segment as samples of a file: ``start`` and ``num_samples`` at the file's own rate.

    ``size`` and ``modified`` are those of the file: bytes, and nanoseconds. Of a recording in a container ``path`` and
    ``modified`` are the container's.
    """

    path: Path
    info: AudioInfo
    start: int
    num_samples: int
    size: int
    modified: int

    @property
    def is_whole_file(self) -> bool:
        return self.start == 0 and self.num_samples == self.info.num_samples


@dataclass(frozen=True, slots=True)
class SegmentAudio:
    """The samples of a segment (samples,), float32 or int16, where they lie, and notes about the file as read."""

    samples: np.ndarray
    sampling_rate: int
    notes: AudioNotes
    location: SegmentPlace

    @property
    def content(self) -> int:
        """A hash of rate and samples at 16 bits: equal for copies under other names, formats and positions."""
        rounded = self.samples
        if rounded.dtype != np.int16:
            rounded = np.clip(np.rint(to_float(rounded) * 32768), -32768, 32767).astype(np.int16)
        # One channel of several is not contiguous.
        return xxhash.xxh3_128_intdigest(np.ascontiguousarray(rounded).data, seed=self.sampling_rate)


@dataclass(frozen=True, slots=True)
class FileCopy:
    """The bytes of a file that is a segment, and the measures of its sound, packed.

    ``sound`` is "" where an earlier stage has decoded the file and has not measured it.
    """

    data: bytes
    location: SegmentPlace
    sound: str


def never(location: SegmentPlace) -> bool:
    """Return False: no whole file is to be copied."""
    return False


@dataclass(frozen=True)
class SegmentReader:
    """A reader of segments below the audio roots of the sources; it rejects audio that is silent or was replaced.

    Args:
        roots: the audio roots of the sources.
        duration_tolerance: how far audio and manifest may be apart, in seconds.
    """

    roots: AudioRoots
    duration_tolerance: float = math.inf

    def read(self, segment: Segment) -> SegmentAudio:
        """Decode a segment.

        Raises:
            RejectRecord: the audio cannot be used, is silent, or is not what ``segment.notes`` say.
        """
        ((_, found),) = self.read_or_copy([segment])
        if isinstance(found, RejectRecord):
            raise found
        assert isinstance(found, SegmentAudio)
        return replace(found, samples=to_float(found.samples))

    def read_or_copy(
        self,
        segments: Sequence[Segment],
        may_copy: Callable[[SegmentPlace], bool] = never,
        data: bytes | None = None,
    ) -> Iterator[tuple[int, SegmentAudio | FileCopy | RejectRecord]]:
        """Read segments of one recording, in the order of their offsets; it is opened once and decoded forward.

        ``data`` are its bytes, where they were read before.

        Yields the index of each segment with its samples, with the bytes of a whole file that ``may_copy`` chooses, or
        with the reject that ``read`` raises. Samples of files that hold 16 bits are int16, unless channels are mixed.

        Bytes are decoded once all the same, unless they are those that an earlier stage has decoded: a file that breaks
        later would take its whole shard with it.
        """
        in_order = sorted(range(len(segments)), key=lambda index: segments[index].offset)
        try:
            # A link may have changed since the stage prepare saw it.
            path, member = self.roots.locate(segments[0]), segments[0].member
            name = segments[0].audio_filepath
            with (
                open_recording(path, member, name) if data is None else open_bytes(AudioBytes(name, data))
            ) as recording:
                checksum_once = cache(recording.source.checksum)
                scale = self.roots.roots[segments[0].root].float_scale
                is_scaled = scale != 1 and _holds_floats(recording)
                for index in in_order:
                    try:
                        location = _locate(segments[index], path, recording.info)
                        # Before it is decoded, so that a foreign file takes no more memory than its record says.
                        if location.num_samples / location.info.sampling_rate > segments[index].duration:
                            self._check_length(segments[index], location)
                        if not is_scaled and may_copy(location):
                            yield index, self._copy(segments[index], location, recording)
                        else:
                            count = None if location.is_whole_file else location.num_samples
                            samples = recording.read_stored(location.start, count, segments[index].channel)
                            samples = samples / np.float32(scale) if is_scaled else samples
                            found = _checksum(segments[index], location, samples, checksum_once)
                            yield index, self._check(segments[index], location, samples, found)
                    except RejectRecord as reject:
                        yield index, reject
        except RejectRecord as reject:  # it cannot be opened; what is wrong with a segment was yielded
            yield from ((index, reject) for index in in_order)

    def _copy(self, segment: Segment, location: SegmentPlace, recording: Recording) -> FileCopy:
        if location.size > _MAX_FILE_BYTES + 8 * location.num_samples * location.info.channels:
            raise RejectRecord(
                "unreadable_audio",
                f"{location.path}: {location.size} bytes are too many for {location.num_samples} samples",
            )
        data = recording.source.read()
        found = checksum_bytes(data)
        if found == segment.notes.checksum:
            self._check_length(segment, location)
            return FileCopy(data, location, segment.notes.sound)
        samples, _ = decode_bytes(data)
        return FileCopy(data, location, self._check(segment, location, samples, found).notes.sound)

    def _check_length(self, segment: Segment, location: SegmentPlace) -> None:
        """Reject audio that was replaced since its record was checked, or is longer or shorter than that says."""
        rate = location.info.sampling_rate
        seconds = location.num_samples / rate
        if segment.notes.size not in (-1, location.size):
            raise RejectRecord(
                "changed_audio",
                f"{location.path} has {location.size} bytes, and had {segment.notes.size} when the stage prepare "
                "looked at it",
            )
        # A segment is rounded to samples at both ends.
        if abs(seconds - segment.duration) > self.duration_tolerance + 1 / rate:
            raise RejectRecord(
                "duration_mismatch", f"the manifest says {segment.duration:g} s, the audio has {seconds:g} s"
            )

    def _check(self, segment: Segment, location: SegmentPlace, samples: np.ndarray, found: str) -> SegmentAudio:
        if segment.notes.checksum not in ("", found):
            raise RejectRecord("changed_audio", f"{location.path} is not what it was when the stage match read it")
        self._check_length(segment, location)
        peak = find_peak(samples)
        if peak < SILENT_PEAK:
            level = f"is {20 * math.log10(peak):.0f} dB of full scale" if peak else "is zero"
            raise RejectRecord(
                "silent_audio", f"the loudest sample {level}, below {20 * math.log10(SILENT_PEAK):.0f} dB"
            )
        rate = location.info.sampling_rate
        sound = segment.notes.sound or measure_sound(to_float(samples), rate).pack()
        return SegmentAudio(samples, rate, AudioNotes(location.size, location.modified, found, sound), location)


@dataclass(frozen=True)
class Together:
    """Segments of one recording that are read together, and its bytes where it is a row that was read before."""

    segments: list[Segment]
    stored: np.ndarray | None = None

    def __str__(self) -> str:
        return self.segments[0].audio_filepath

    @property
    def seconds(self) -> float:
        """The seconds of the segments, or those of audio that takes as much memory as the row."""
        of_row = 0.0 if self.stored is None else len(self.stored) / _BYTES_PER_SECOND
        return max(of_row, sum(segment.duration for segment in self.segments))


@dataclass(frozen=True)
class SegmentMaker(Generic[Data, Made]):
    """A function that makes data, and their description, of the audio of segments; feeders can call it.

    Args:
        make: may raise RejectRecord.
        may_copy: chooses the whole files of which ``make`` is to get the bytes.
    """

    reader: SegmentReader
    make: Callable[[SegmentAudio | FileCopy], tuple[Data, Made]]
    may_copy: Callable[[SegmentPlace], bool] = never

    def __call__(self, together: Together) -> Iterator[Part[Data, Made]]:
        """Yield what is made of each of the segments, or why its audio cannot be used, in parts of some megabytes."""
        part: Part[Data, Made] = []
        size = 0
        stored = None if together.stored is None else together.stored.tobytes()
        for index, found in self.reader.read_or_copy(together.segments, self.may_copy, stored):
            try:
                part.append((index, found if isinstance(found, RejectRecord) else self.make(found)))
            except RejectRecord as reject:
                part.append((index, reject))
            if isinstance(made := part[-1][1], tuple):
                size += memoryview(made[0]).nbytes  # type: ignore[arg-type]
            if size > _PART_BYTES:
                yield part
                part, size = [], 0
        yield part


class SegmentsOnce(Generic[Data, Made]):
    """Data made of the audio of segments, which are asked for about in the order of their uses.

    Each unique segment is made once, and kept as long as it will be asked for again: in memory up to a bound, beyond it
    in a temporary file (TMPDIR), which goes with the process. When the first segment of a recording is asked for, all
    of that recording are made: it is opened once and read in the order of offsets.

    Args:
        roots: the audio roots of the sources.
        uses: the segments, each as often as it will be asked for.

    Attributes:
        results: what a ``SegmentMaker`` makes of each of ``recordings``, in their order: to be set.
    """

    results: Iterator[Iterable[Part[Data, Made]]]

    def __init__(self, roots: AudioRoots, uses: Iterable[Segment]) -> None:
        self._roots = roots
        self._uses_left = Counter(uses)
        # A result that is made alone and will be asked for once is not kept in the spool.
        self._kept: dict[Segment, tuple[tuple[int, int] | Data, Made] | RejectRecord] = {}
        self._spool = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES, prefix="sharmill-")  # noqa: SIM115
        self._together: dict[Hashable, list[Segment]] = {}
        for segment in self._uses_left:
            self._together.setdefault(_made_with(segment), []).append(segment)
        self._order = iter(list(self._together.values()))
        self._rows = self._read_rows()

    def recordings(self) -> Iterator[Together]:
        """Yield the recordings in the order of their first use."""
        for together in self._together.values():
            row = self._rows.get(together[0].recording)
            yield Together(together, None if row is None else np.frombuffer(self._get(*row), np.uint8))

    def _read_rows(self) -> dict[Hashable, tuple[int, int]]:
        """Read the audio in rows of parquet files in their order: a whole row group is read to have one row of it."""
        found: dict[Hashable, tuple[int, int]] = {}
        rows: dict[Any, tuple[Segment, Member]] = {
            one.recording: (one, one.member)
            for one in self._uses_left if one.member is not None and one.member.kind != "bytes"
        }  # fmt: skip
        for recording in sorted(rows):
            segment, member = rows[recording]
            # Reading it raises it again.
            with suppress(RejectRecord, UnreadableRows):
                path = self._roots.locate(segment)
                if not open_rows(path).is_mapped:
                    found[recording] = self._put(read_audio(path, member))
        return found

    def get(self, segment: Segment) -> tuple[Data | bytes, Made]:
        """Return what is made of a segment; an array may come as its bytes.

        Raises:
            RejectRecord: its audio cannot be used.
        """
        while segment not in self._kept:
            self._keep(next(self._order), next(self.results))
        found = self._kept[segment]
        self._uses_left[segment] -= 1
        if not self._uses_left[segment]:
            del self._kept[segment]
        if isinstance(found, RejectRecord):
            raise found
        kept, made = found
        return self._get(*kept) if isinstance(kept, tuple) else kept, made

    def _keep(self, together: list[Segment], parts: Iterable[Part[Data, Made]]) -> None:
        is_alone = len(together) == 1 and self._uses_left[together[0]] == 1
        for part in parts:
            for index, found in part:
                if not (is_alone or isinstance(found, RejectRecord)):
                    data, made = found
                    self._kept[together[index]] = self._put(data), made
                else:
                    self._kept[together[index]] = found

    def _put(self, data: Any) -> tuple[int, int]:
        """Keep bytes, and return where they are: what ``_get`` wants."""
        start = self._spool.seek(0, os.SEEK_END)
        return start, self._spool.write(data)

    def _get(self, start: int, size: int) -> bytes:
        self._spool.seek(start)
        return self._spool.read(size)


def find_peak(samples: np.ndarray) -> float:
    """Return the magnitude of the loudest of samples (samples,), full scale being 1.

    Raises:
        RejectRecord: ``over_full_scale`` if it is far more than 1, so that the samples are at another scale.
    """
    low, high = to_float(np.array([samples.min(), samples.max()]))
    peak = max(float(high), -float(low))
    if peak > _HIGHEST_PEAK:
        raise RejectRecord(
            "over_full_scale",
            f"the loudest sample is {peak:,.0f} times full scale; if the file holds floats, set float_scale of the "
            "source to what is full scale in it, such as 32768 for values of 16 bits",
        )
    return peak


def _holds_floats(recording: Recording) -> bool:
    """Return True if libsndfile finds floats in a recording, and no integers or compressed audio."""
    with suppress(sf.LibsndfileError):
        return sf.info(recording.source.stream()).subtype in ("FLOAT", "DOUBLE")
    return False


def _made_with(segment: Segment) -> Hashable:
    """Return a key that is equal for segments that are made together."""
    return segment if segment.whole_file else segment.recording


def _locate(segment: Segment, path: Path, info: AudioInfo) -> SegmentPlace:
    start, num_samples = 0, info.num_samples
    if not segment.whole_file:
        start, num_samples = segment_bounds(segment.offset, segment.duration, info.sampling_rate)
        # The header check allows a segment to end a little after its file; there are no samples there.
        num_samples = min(num_samples, info.num_samples - start)
        if num_samples <= 0:
            raise RejectRecord("empty_audio", "the segment has no samples")
    status = path.stat()
    size = status.st_size if segment.member is None else segment.member.size
    return SegmentPlace(path, info, start, num_samples, size, status.st_mtime_ns)


def _checksum(segment: Segment, location: SegmentPlace, samples: np.ndarray, checksum_all: Callable[[], str]) -> str:
    """Return the checksum of what a segment was read from; ``checksum_all`` returns that of all bytes of the recording.

    Of a whole file its bytes; of a part the samples, which cost nothing more to read. But samples of MP3, Vorbis and
    Opus may differ in their last bits between kinds of CPU: of a part of such a file all its bytes, once per file, and
    not again where size and time are those that were noted with the checksum.
    """
    notes = segment.notes
    if not location.is_whole_file:
        if location.info.exact_seeks:
            return checksum_bytes(to_float(samples).tobytes())
        if notes.checksum and (notes.size, notes.modified) == (location.size, location.modified):
            return notes.checksum
    return checksum_all()
