"""Reading of a manifest's segments, and the check that their audio still is what it was.

A stage that reads a segment gets, beside the samples, notes about the file as it was read. The next stage that reads
the segment compares with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from sharmill.audio.containers import gather_rows, open_member
from sharmill.audio.decoder import AudioInfo
from sharmill.audio.files import Recording, decode_bytes, open_recording
from sharmill.audio.resample import segment_bounds
from sharmill.audio.roots import AudioRoots
from sharmill.audio.samples import to_float
from sharmill.audio.sound import measure_sound
from sharmill.errors import RejectRecord
from sharmill.files.storage import checksum_bytes
from sharmill.manifest import AudioNotes, Member, Segment

# -60 dB of full scale: audio whose loudest sample is below has no speech in it.
SILENT_PEAK: Final = 1e-3
# A file that is copied as a whole may have pictures and notes of this size beside its samples.
_MAX_FILE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Location:
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
    member: Member | None = None

    @property
    def is_whole_file(self) -> bool:
        return self.start == 0 and self.num_samples == self.info.num_samples


@dataclass(frozen=True, slots=True)
class SegmentAudio:
    """The samples of a segment (samples,), float32 or int16, where they lie, and notes about the file as read."""

    samples: np.ndarray
    sampling_rate: int
    notes: AudioNotes
    location: Location

    @property
    def content(self) -> int:
        """A hash of rate and samples at 16 bits: equal for copies under other names, formats and positions."""
        rounded = np.clip(np.rint(to_float(self.samples) * 32768), -32768, 32767).astype(np.int16)
        return xxhash.xxh3_128_intdigest(rounded, seed=self.sampling_rate)


@dataclass(frozen=True, slots=True)
class FileCopy:
    """The bytes of a file that is a segment, what a decoder gives for them, and the measures of its sound, packed.

    ``sound`` is "" where an earlier stage has decoded the file and has not measured it.
    """

    data: bytes
    sampling_rate: int
    num_samples: int
    location: Location
    sound: str


@dataclass(frozen=True)
class SegmentReader:
    """A reader of segments below the audio roots of the sources; it rejects audio that is silent or was replaced.

    Args:
        roots: the audio roots of the sources.
        duration_tolerance: how far audio and manifest may be apart, in seconds.
    """

    roots: AudioRoots
    duration_tolerance: float = math.inf

    def gather(self, segments: Iterable[Segment]) -> AbstractContextManager[None]:
        """Return a context in which segments may be read in any order, each group of rows that has some read once."""
        found = []
        for segment in segments:
            if segment.member is not None:
                # Reading it raises it again.
                with suppress(RejectRecord):
                    found.append((self.roots.locate(segment), segment.member))
        return gather_rows(found)

    def read(self, segment: Segment) -> SegmentAudio:
        """Decode a segment.

        Raises:
            RejectRecord: the audio cannot be used, is silent, or is not what ``segment.notes`` say.
        """
        ((_, audio),) = self.read_recording([segment])
        if isinstance(audio, RejectRecord):
            raise audio
        return audio

    def read_recording(self, segments: Sequence[Segment]) -> Iterator[tuple[int, SegmentAudio | RejectRecord]]:
        """Read segments of one recording, in the order of their offsets; it is opened once and decoded forward.

        Yields the index of each segment with what ``read`` returns for it, or with the reject that ``read`` raises.
        """
        for index, found in self.read_or_copy(segments, lambda location: False):
            assert not isinstance(found, FileCopy)
            if isinstance(found, SegmentAudio):
                found = replace(found, samples=to_float(found.samples))
            yield index, found

    def read_or_copy(
        self, segments: Sequence[Segment], may_copy: Callable[[Location], bool]
    ) -> Iterator[tuple[int, SegmentAudio | FileCopy | RejectRecord]]:
        """Read segments of one recording as ``read_recording``; of whole files that ``may_copy`` chooses, the bytes.

        Samples of files that hold 16 bits are int16, unless channels are mixed.

        Bytes are decoded once all the same, unless they are those that an earlier stage has decoded: a file that breaks
        later would take its whole shard with it.
        """
        in_order = sorted(range(len(segments)), key=lambda index: segments[index].offset)
        try:
            # A link may have changed since the stage prepare saw it.
            path, member = self.roots.locate(segments[0]), segments[0].member
            opened = open_recording(path) if member is None else open_member(path, member, segments[0].audio_filepath)
            with opened as recording:
                checksum_once = cache(lambda: _checksum_of(recording))
                for index in in_order:
                    try:
                        location = _locate(segments[index], path, recording.info)
                        self._check_claims(segments[index], location)
                        if may_copy(location):
                            yield index, self._copy(segments[index], location, recording)
                        else:
                            yield index, self._read_part(segments[index], location, recording, checksum_once)
                    except RejectRecord as reject:
                        yield index, reject
        except RejectRecord as reject:  # it cannot be opened; what is wrong with a segment was yielded
            yield from ((index, reject) for index in in_order)

    def _read_part(
        self, segment: Segment, location: Location, recording: Recording, checksum_once: Callable[[], str]
    ) -> SegmentAudio:
        start, count = (0, None) if location.is_whole_file else (location.start, location.num_samples)
        samples = recording.read_stored(start, count, segment.channel)
        found = _checksum(segment, location, samples, checksum_once)
        return self._check(segment, location, samples, recording.info.sampling_rate, found)

    def _copy(self, segment: Segment, location: Location, recording: Recording) -> FileCopy:
        if location.size > _MAX_FILE_BYTES + 8 * location.num_samples * location.info.channels:
            detail = f"{location.size} bytes are too many for {location.num_samples} samples"
            raise RejectRecord("unreadable_audio", f"{location.path}: {detail}")
        data = recording.source.read()
        found = checksum_bytes(data)
        rate, num_samples, sound = location.info.sampling_rate, location.num_samples, segment.notes.sound
        if found == segment.notes.checksum:
            self._check_size(segment, location)
            self._check_duration(segment, num_samples, rate)
        else:
            samples, rate = decode_bytes(data)
            checked = self._check(segment, location, samples, rate, found)
            num_samples, sound = len(checked.samples), checked.notes.sound
        return FileCopy(data, rate, num_samples, location, sound)

    def _check_claims(self, segment: Segment, location: Location) -> None:
        """Reject audio that has more samples than its record says, or was replaced, before it is decoded."""
        if location.num_samples / location.info.sampling_rate > segment.duration:
            self._check_size(segment, location)
            self._check_duration(segment, location.num_samples, location.info.sampling_rate)

    def _check_size(self, segment: Segment, location: Location) -> None:
        if segment.notes.size not in (-1, location.size):
            raise RejectRecord(
                "changed_audio",
                f"{location.path} has {location.size} bytes, and had {segment.notes.size} when the stage prepare "
                "looked at it",
            )

    def _check_duration(self, segment: Segment, num_samples: int, rate: int) -> None:
        seconds = num_samples / rate
        # A segment is rounded to samples at both ends.
        if abs(seconds - segment.duration) > self.duration_tolerance + 1 / rate:
            raise RejectRecord(
                "duration_mismatch", f"the manifest says {segment.duration:g} s, the audio has {seconds:g} s"
            )

    def _check(self, segment: Segment, location: Location, samples: np.ndarray, rate: int, found: str) -> SegmentAudio:
        self._check_size(segment, location)
        if segment.notes.checksum not in ("", found):
            raise RejectRecord("changed_audio", f"{location.path} is not what it was when the stage match read it")
        self._check_duration(segment, len(samples), rate)
        low, high = to_float(np.array([samples.min(), samples.max()]))
        peak = max(float(high), -float(low))
        if peak < SILENT_PEAK:
            level = f"is {20 * math.log10(peak):.0f} dB of full scale" if peak else "is zero"
            raise RejectRecord(
                "silent_audio", f"the loudest sample {level}, below {20 * math.log10(SILENT_PEAK):.0f} dB"
            )
        sound = segment.notes.sound or measure_sound(to_float(samples), rate).pack()
        return SegmentAudio(samples, rate, AudioNotes(location.size, location.modified, found, sound), location)


def _locate(segment: Segment, path: Path, info: AudioInfo) -> Location:
    member = segment.member
    start, num_samples = 0, info.num_samples
    if not segment.whole_file:
        start, num_samples = segment_bounds(segment.offset, segment.duration, info.sampling_rate)
        # The header check allows a segment to end a little after its file; there are no samples there.
        num_samples = min(num_samples, info.num_samples - start)
        if num_samples <= 0:
            raise RejectRecord("empty_audio", "the segment has no samples")
    status = path.stat()
    size = status.st_size if member is None else member.size
    return Location(path, info, start, num_samples, size, status.st_mtime_ns, member)


def _checksum(segment: Segment, location: Location, samples: np.ndarray, checksum_all: Callable[[], str]) -> str:
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


def _checksum_of(recording: Recording) -> str:
    """Return the checksum of the bytes of a recording, as ``checksum``."""
    digest = xxhash.xxh3_64()
    for block in recording.source.blocks():
        digest.update(block)
    return digest.hexdigest()
