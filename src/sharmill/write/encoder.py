"""Audio of segments as it is stored: a copy where the file already is what is wanted, else decoded and encoded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sharmill.audio.encoding import check_encoder, encode
from sharmill.audio.files import probe_bytes
from sharmill.audio.resample import resample
from sharmill.audio.segments import Location, SegmentReader
from sharmill.config import WriteConfig
from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Segment

_ORIGINAL = "original"
_FALLBACK_FORMAT = "flac"


@dataclass(frozen=True, slots=True)
class StoredAudio:
    """An audio file in memory: its bytes, the extension for its format, and what a decoder gives for it."""

    data: bytes
    extension: str
    sampling_rate: int
    num_samples: int

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sampling_rate


class SegmentEncoder:
    """A maker of stored audio: each unique segment once, and kept only as long as it will be asked for again."""

    def __init__(self, config: WriteConfig, reader: SegmentReader, uses: Iterable[Segment]) -> None:
        self._config = config
        self._reader = reader
        self._uses_left = Counter(uses)
        self._kept: dict[Segment, StoredAudio | RejectRecord] = {}

    def __call__(self, segment: Segment) -> StoredAudio:
        """Return the stored audio of a segment; raise RejectRecord where the audio cannot be used."""
        outcome = self._kept.pop(segment, None) or self._attempt(segment)
        self._uses_left[segment] -= 1
        if self._uses_left[segment] > 0:
            self._kept[segment] = outcome
        if isinstance(outcome, RejectRecord):
            raise outcome
        return outcome

    def _attempt(self, segment: Segment) -> StoredAudio | RejectRecord:
        try:
            location = self._reader.locate(segment)
            if self._may_copy(location):
                data, audio = self._reader.read_file(segment, location)
                return StoredAudio(data, location.info.format, audio.sampling_rate, len(audio.samples))
            return self._encode(segment, location)
        except RejectRecord as reject:
            return reject

    def _may_copy(self, location: Location) -> bool:
        """Return True for a whole file that is mono and already has the wanted format and rate.

        It is decoded once all the same: one that breaks later would take its whole shard with it.
        """
        info, config = location.info, self._config
        return (
            location.is_whole_file
            and info.common
            and info.channels == 1
            and config.audio_format in (_ORIGINAL, info.format)
            and config.sampling_rate in (None, info.sampling_rate)
        )

    def _encode(self, segment: Segment, location: Location) -> StoredAudio:
        audio = self._reader.read(segment, location)
        samples, rate = audio.samples, audio.sampling_rate
        if self._config.sampling_rate is not None:
            samples = resample(samples, rate, self._config.sampling_rate)
            rate = self._config.sampling_rate
        extension: str = self._config.audio_format
        if extension == _ORIGINAL:
            info = location.info
            extension = info.format if info.common and _can_encode(info.format, rate) else _FALLBACK_FORMAT
        try:
            check_encoder(extension, rate)
        except ConfigError as error:
            raise RejectRecord("unsupported_rate", str(error)) from error
        data = encode(samples, rate, extension)
        stored = probe_bytes(data)
        return StoredAudio(data, extension, stored.sampling_rate, stored.num_samples)


def _can_encode(format: str, sampling_rate: int) -> bool:
    try:
        check_encoder(format, sampling_rate)
    except ConfigError:
        return False
    return True
