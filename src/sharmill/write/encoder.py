"""Audio of segments as it is stored: a copy where the file already is what is wanted, else decoded and encoded once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from sharmill.audio.encoding import check_encoder, encode
from sharmill.audio.resample import resample
from sharmill.audio.samples import to_float
from sharmill.audio.segments import FileCopy, Location, SegmentAudio, SegmentReader
from sharmill.audio.spool import Kept, Spool
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Segment
from sharmill.write.config import WriteConfig

_ORIGINAL = "original"
_FALLBACK_FORMAT = "flac"
_SPOOLED_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredAudio:
    """An audio file in memory: its bytes, the extension for its format, and what a decoder gives for it.

    ``sound`` has the measures of the segment's sound, packed, or is "" where they are not known.
    """

    data: bytes
    extension: str
    sampling_rate: int
    num_samples: int
    sound: str

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sampling_rate


class SegmentEncoder:
    """A maker of stored audio: each unique segment once, and kept only as long as it will be asked for again.

    When the first segment of a recording is asked for, all that ``uses`` has of it are encoded: so it is opened once
    and read in the order of offsets.
    """

    def __init__(self, config: WriteConfig, reader: SegmentReader, uses: Iterable[Segment]) -> None:
        self._config = config
        self._reader = reader
        self._uses_left = Counter(uses)
        self._kept: dict[Segment, tuple[Kept, StoredAudio] | RejectRecord] = {}
        self._spool = Spool(_SPOOLED_BYTES)
        self._together: dict[Hashable, list[Segment]] = {}
        for segment in self._uses_left:
            if not segment.whole_file:
                self._together.setdefault(segment.recording, []).append(segment)

    def __call__(self, segment: Segment) -> StoredAudio:
        """Return the stored audio of a segment; raise RejectRecord where the audio cannot be used."""
        if segment not in self._kept:
            self._make(segment)
        outcome = self._kept[segment]
        self._uses_left[segment] -= 1
        if self._uses_left[segment] <= 0:
            del self._kept[segment]
        if isinstance(outcome, RejectRecord):
            raise outcome
        kept, stored = outcome
        data = self._spool.get(kept)
        if segment not in self._kept:
            self._spool.forget(kept)
        return dataclasses.replace(stored, data=data)

    def _make(self, segment: Segment) -> None:
        """Make what is asked for, and with it all that ``uses`` has of its recording."""
        together = [segment] if segment.whole_file else self._together.pop(segment.recording, [segment])
        for index, found in self._reader.read_or_copy(together, self._may_copy):
            try:
                stored = self._store(found)
                self._kept[together[index]] = self._spool.put(stored.data), dataclasses.replace(stored, data=b"")
            except RejectRecord as reject:
                self._kept[together[index]] = reject

    def _store(self, found: SegmentAudio | FileCopy | RejectRecord) -> StoredAudio:
        if isinstance(found, RejectRecord):
            raise found
        if isinstance(found, FileCopy):
            extension = found.location.info.format
            return StoredAudio(found.data, extension, found.sampling_rate, found.num_samples, found.sound)
        return self._encode(found)

    def _may_copy(self, location: Location) -> bool:
        """Return True for a whole file that is mono and already has the wanted format and rate."""
        info, config = location.info, self._config
        return (
            location.is_whole_file
            and info.common
            and info.channels == 1
            and config.audio_format in (_ORIGINAL, info.format)
            and config.sampling_rate in (None, info.sampling_rate)
        )

    def _encode(self, audio: SegmentAudio) -> StoredAudio:
        samples, rate = audio.samples, audio.sampling_rate
        if self._config.sampling_rate not in (None, rate):
            samples = resample(to_float(samples), rate, self._config.sampling_rate)
            rate = self._config.sampling_rate
        extension: str = self._config.audio_format
        if extension == _ORIGINAL:
            info = audio.location.info
            extension = info.format if info.common and _can_encode(info.format, rate) else _FALLBACK_FORMAT
        try:
            check_encoder(extension, rate)
        except ConfigError as error:
            raise RejectRecord("unsupported_rate", str(error)) from error
        return StoredAudio(encode(samples, rate, extension), extension, rate, len(samples), audio.notes.sound)


def _can_encode(format: str, sampling_rate: int) -> bool:
    try:
        check_encoder(format, sampling_rate)
    except ConfigError:
        return False
    return True
