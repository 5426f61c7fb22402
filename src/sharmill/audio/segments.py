"""Reading of a manifest's segments, and checks that their audio has not changed between stages.

Together with the samples of a segment, a stage gets notes about its file, such as size and checksum. The next stage
that reads the segment compares the file with these notes.
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

# -60 dB relative to full scale. Audio whose loudest sample is quieter contains no speech.
SILENT_PEAK: Final = 1e-3
# 24 dB above full scale. Speech exceeds full scale by less: by a few dB after lossy decoding, and by the excess gain in
# float recordings. Floats with the values of 16-bit (or larger) integers exceed this peak unless they are silent
# (SILENT_PEAK * 32768 = 33). Samples in integer formats never exceed 1.
_HIGHEST_PEAK: Final = 16.0
# Maximum size in bytes of pictures and notes, beyond the samples, in a file that is copied as a whole.
_MAX_FILE_BYTES: Final = 64 << 20
# Maximum size in bytes of data kept in memory: rows of Parquet files, and results for segments.
_SPOOLED_BYTES: Final = 64 << 20
# Size of a second of float32 samples at 16 kHz, the input of speaker encoders.
_BYTES_PER_SECOND: Final = 64_000
# Results are passed on in parts of about this size, so that hours of audio are never in memory at once.
_PART_BYTES: Final = 4 << 20

Made = TypeVar("Made")
# The data of a result: bytes or an array.
Data = TypeVar("Data")
# Indices of a recording's segments, each with the segment's result, or with the reject if it has no result.
Part: TypeAlias = list[tuple[int, tuple[Data, Made] | RejectRecord]]


@dataclass(frozen=True)
class SegmentPlace:
    """The place of a segment in a file: ``start`` and ``num_samples`` in samples at the file's own rate.

    ``size`` is the size of the recording in bytes, and ``modified`` the modification time of the file in nanoseconds.
    For a recording in a container, ``path`` and ``modified`` are those of the container.
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
    """The samples of a segment (samples,), float32 or int16, with their place and notes about the file."""

    samples: np.ndarray
    sampling_rate: int
    notes: AudioNotes
    location: SegmentPlace

    @property
    def content(self) -> int:
        """A hash of the sampling rate and the samples, which are rounded to 16 bits.

        Copies of the audio have the same hash, even in other files, in other lossless formats or at other positions.
        """
        rounded = self.samples
        if rounded.dtype != np.int16:
            rounded = np.clip(np.rint(to_float(rounded) * 32768), -32768, 32767).astype(np.int16)
        # A channel of a multi-channel array is not contiguous.
        return xxhash.xxh3_128_intdigest(np.ascontiguousarray(rounded).data, seed=self.sampling_rate)


@dataclass(frozen=True, slots=True)
class FileCopy:
    """The bytes of a file that consists of one segment, and the packed acoustic measures of the segment.

    ``sound`` is "" if an earlier stage decoded the file without measuring it.
    """

    data: bytes
    location: SegmentPlace
    sound: str


def copy_nothing(location: SegmentPlace) -> bool:
    """Return False, so that no file is copied as a whole."""
    return False


@dataclass(frozen=True)
class SegmentReader:
    """Reads segments below the audio roots of the sources, and rejects audio that is silent or was replaced.

    Args:
        roots: the audio roots of the sources.
        duration_tolerance: the allowed difference between the durations of audio and manifest, in seconds.
    """

    roots: AudioRoots
    duration_tolerance: float = math.inf

    def read(self, segment: Segment) -> SegmentAudio:
        """Decode a segment.

        Raises:
            RejectRecord: the audio is unusable or silent, or does not match ``segment.notes``.
        """
        ((_, found),) = self.read_or_copy([segment])
        if isinstance(found, RejectRecord):
            raise found
        assert isinstance(found, SegmentAudio)
        return replace(found, samples=to_float(found.samples))

    def read_or_copy(
        self,
        segments: Sequence[Segment],
        may_copy: Callable[[SegmentPlace], bool] = copy_nothing,
        data: bytes | None = None,
    ) -> Iterator[tuple[int, SegmentAudio | FileCopy | RejectRecord]]:
        """Read segments of one recording, which is opened once and decoded in the order of their offsets.

        Copied files are decoded too, unless an earlier stage decoded the same bytes, so that no damaged file gets into
        a shard.

        Args:
            segments: the segments of the recording.
            may_copy: returns True for the place of a whole file if its bytes are wanted instead of its samples.
            data: the bytes of the recording, if they were read before.

        Yields:
            The index of each segment with its samples, the copy of its file, or the reject that ``read`` would raise.
            Samples of 16-bit files are int16 unless channels are mixed.
        """
        in_order = sorted(range(len(segments)), key=lambda index: segments[index].offset)
        try:
            # A link may have changed since the stage prepare resolved it.
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
                        # Check before decoding, so that a replaced file needs no more memory than its record states.
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
        except RejectRecord as reject:  # the recording cannot be opened; faults of segments were yielded above
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
        """Reject audio that was replaced after the stage prepare, or whose duration differs from the record."""
        rate = location.info.sampling_rate
        seconds = location.num_samples / rate
        if segment.notes.size not in (-1, location.size):
            raise RejectRecord(
                "changed_audio",
                f"{location.path} has {location.size} bytes instead of {segment.notes.size} at the time of the stage "
                "prepare",
            )
        # Rounding both ends to samples may add up to one sample.
        if abs(seconds - segment.duration) > self.duration_tolerance + 1 / rate:
            raise RejectRecord(
                "duration_mismatch", f"the manifest states {segment.duration:g} s, but the audio has {seconds:g} s"
            )

    def _check(self, segment: Segment, location: SegmentPlace, samples: np.ndarray, found: str) -> SegmentAudio:
        if segment.notes.checksum not in ("", found):
            raise RejectRecord("changed_audio", f"{location.path} has changed since the stage match read it")
        self._check_length(segment, location)
        peak = find_peak(samples)
        if peak < SILENT_PEAK:
            level = f"has {20 * math.log10(peak):.0f} dB of full scale" if peak else "is zero"
            raise RejectRecord(
                "silent_audio", f"the loudest sample {level}, below {20 * math.log10(SILENT_PEAK):.0f} dB"
            )
        rate = location.info.sampling_rate
        sound = segment.notes.sound or measure_sound(to_float(samples), rate).pack()
        return SegmentAudio(samples, rate, AudioNotes(location.size, location.modified, found, sound), location)


@dataclass(frozen=True)
class RecordingSegments:
    """Segments of one recording that are read together.

    Attributes:
        segments: the segments.
        stored: the bytes of the recording, if it is a row of a Parquet file that was read before; otherwise None.
    """

    segments: list[Segment]
    stored: np.ndarray | None = None

    def __str__(self) -> str:
        return self.segments[0].audio_filepath

    @property
    def seconds(self) -> float:
        """Seconds of audio in all segments, or, if longer, of audio that takes as much memory as ``stored``."""
        of_row = 0.0 if self.stored is None else len(self.stored) / _BYTES_PER_SECOND
        return max(of_row, sum(segment.duration for segment in self.segments))


@dataclass(frozen=True)
class SegmentMaker(Generic[Data, Made]):
    """A function that turns the audio of segments into data with a description; a rank's feeder processes run it.

    Args:
        reader: reads the segments.
        make: returns the data and their description; may raise RejectRecord.
        may_copy: returns True for the place of a whole file if ``make`` wants its bytes instead of its samples.
    """

    reader: SegmentReader
    make: Callable[[SegmentAudio | FileCopy], tuple[Data, Made]]
    may_copy: Callable[[SegmentPlace], bool] = copy_nothing

    def __call__(self, together: RecordingSegments) -> Iterator[Part[Data, Made]]:
        """Yield the result or the reject of each segment, in parts of a few megabytes."""
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
    """Results for segments, each computed once and kept until its last use.

    Results are requested roughly in the order of ``uses``. They are kept in memory up to a limit, and beyond the limit
    in a temporary file (in TMPDIR) that disappears with the process. The first request for a segment computes the
    results for all segments of the same recording, which is opened once and read in the order of offsets.

    Args:
        roots: the audio roots of the sources.
        uses: the segments, each as often as it will be requested.

    Attributes:
        results: the results of a ``SegmentMaker`` for ``recordings``, in the same order; set by the caller.
    """

    results: Iterator[Iterable[Part[Data, Made]]]

    def __init__(self, roots: AudioRoots, uses: Iterable[Segment]) -> None:
        self._roots = roots
        self._uses_left = Counter(uses)
        # Results by segment: the place of the data in the spool, and the description. The data itself is kept instead
        # of its place if the segment is the only one of its recording and will be requested only once.
        self._kept: dict[Segment, tuple[tuple[int, int] | Data, Made] | RejectRecord] = {}
        self._spool = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES, prefix="sharmill-")  # noqa: SIM115
        self._together: dict[Hashable, list[Segment]] = {}
        for segment in self._uses_left:
            self._together.setdefault(_batch_key(segment), []).append(segment)
        self._order = iter(list(self._together.values()))
        self._rows = self._read_rows()

    def recordings(self) -> Iterator[RecordingSegments]:
        """Yield the segments of each recording, in the order of their first use."""
        for together in self._together.values():
            row = self._rows.get(together[0].recording)
            yield RecordingSegments(together, None if row is None else np.frombuffer(self._get(*row), np.uint8))

    def _read_rows(self) -> dict[Hashable, tuple[int, int]]:
        """Read the audio in rows of Parquet files, and return its place in the spool by recording.

        Rows are read in order, because reading one row requires its whole row group.
        """
        found: dict[Hashable, tuple[int, int]] = {}
        rows: dict[Any, tuple[Segment, Member]] = {
            one.recording: (one, one.member)
            for one in self._uses_left if one.member is not None and one.member.kind != "bytes"
        }  # fmt: skip
        for recording in sorted(rows):
            segment, member = rows[recording]
            # A fault is raised again when the segments are read.
            with suppress(RejectRecord, UnreadableRows):
                path = self._roots.locate(segment)
                if not open_rows(path).is_mapped:
                    found[recording] = self._put(read_audio(path, member))
        return found

    def get(self, segment: Segment) -> tuple[Data | bytes, Made]:
        """Return the result for a segment: its data and their description. An array may be returned as its bytes.

        Raises:
            RejectRecord: the audio of the segment cannot be used.
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
        """Append bytes to the spool, and return their place for ``_get``."""
        start = self._spool.seek(0, os.SEEK_END)
        return start, self._spool.write(data)

    def _get(self, start: int, size: int) -> bytes:
        self._spool.seek(start)
        return self._spool.read(size)


def find_peak(samples: np.ndarray) -> float:
    """Return the magnitude of the loudest sample in (samples,); full scale is 1.

    Raises:
        RejectRecord: ``over_full_scale`` if the magnitude is so far above 1 that the samples must have another scale.
    """
    low, high = to_float(np.array([samples.min(), samples.max()]))
    peak = max(float(high), -float(low))
    if peak > _HIGHEST_PEAK:
        raise RejectRecord(
            "over_full_scale",
            f"the loudest sample is {peak:,.0f} times full scale; if the file holds floats, set float_scale of the "
            "source to their full scale, such as 32768 for 16-bit values",
        )
    return peak


def _holds_floats(recording: Recording) -> bool:
    """Return True if libsndfile reads a recording and its samples are stored as floats."""
    with suppress(sf.LibsndfileError):
        return sf.info(recording.source.stream()).subtype in ("FLOAT", "DOUBLE")
    return False


def _batch_key(segment: Segment) -> Hashable:
    """Return a key that is equal for segments that are read together."""
    return segment if segment.whole_file else segment.recording


def _locate(segment: Segment, path: Path, info: AudioInfo) -> SegmentPlace:
    start, num_samples = 0, info.num_samples
    if not segment.whole_file:
        start, num_samples = segment_bounds(segment.offset, segment.duration, info.sampling_rate)
        # The check against the header allows a segment to end slightly after the end of its file.
        num_samples = min(num_samples, info.num_samples - start)
        if num_samples <= 0:
            raise RejectRecord("empty_audio", "the segment has no samples")
    status = path.stat()
    size = status.st_size if segment.member is None else segment.member.size
    return SegmentPlace(path, info, start, num_samples, size, status.st_mtime_ns)


def _checksum(segment: Segment, location: SegmentPlace, samples: np.ndarray, checksum_all: Callable[[], str]) -> str:
    """Return a checksum of the audio of a segment; ``checksum_all`` returns the checksum of the whole recording.

    The checksum of a whole file covers its bytes. The checksum of a part covers the samples, which are read anyway.
    However, the samples of MP3, Vorbis and Opus may differ in their last bits between kinds of CPU, so parts of such
    files get the checksum of the whole recording. That checksum is computed once per file, or taken from the notes if
    the file's size and modification time are unchanged.
    """
    notes = segment.notes
    if not location.is_whole_file:
        if location.info.exact_seeks:
            return checksum_bytes(to_float(samples).tobytes())
        if notes.checksum and (notes.size, notes.modified) == (location.size, location.modified):
            return notes.checksum
    return checksum_all()
