"""Audio of segments as it is stored in a dataset: copied, or decoded and encoded once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sharmill.audio.decoder import to_float
from sharmill.audio.encoding import count_clipped, encode, encoder_problem
from sharmill.audio.resample import resample
from sharmill.audio.segments import FileCopy, SegmentAudio, SegmentMaker, SegmentPlace, SegmentReader, SegmentsOnce
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment
from sharmill.write.config import WriteConfig

ORIGINAL: Final = "original"
_FALLBACK_FORMAT: Final = "flac"


@dataclass(frozen=True, slots=True)
class StoredAudio:
    """Properties of a stored audio file.

    Attributes:
        extension: file extension of the format.
        sampling_rate, num_samples: rate and length of the decoded audio.
        sound: packed measures of the sound; "" if unknown.
        num_clipped: number of samples that exceeded full scale and were clipped.
    """

    extension: str
    sampling_rate: int
    num_samples: int
    sound: str
    num_clipped: int = 0


def store_segments(
    config: WriteConfig, reader: SegmentReader, uses: Iterable[Segment]
) -> SegmentsOnce[bytes, StoredAudio]:
    """Return the audio of segments for storage: copied if the file has the right format, otherwise encoded."""

    def may_copy(location: SegmentPlace) -> bool:
        info = location.info
        return (
            location.is_whole_file
            and info.common
            and info.channels == 1
            and config.audio_format in (ORIGINAL, info.format)
            and config.sampling_rate in (None, info.sampling_rate)
        )

    def store(found: SegmentAudio | FileCopy) -> tuple[bytes, StoredAudio]:
        info = found.location.info
        if isinstance(found, FileCopy):
            return found.data, StoredAudio(info.format, info.sampling_rate, found.location.num_samples, found.sound)
        samples, rate = found.samples, found.sampling_rate
        if config.sampling_rate not in (None, rate):
            samples, rate = resample(to_float(samples), rate, config.sampling_rate), config.sampling_rate
        extension: str = config.audio_format
        if extension == ORIGINAL:
            extension = info.format if info.common and not encoder_problem(info.format, rate) else _FALLBACK_FORMAT
        if problem := encoder_problem(extension, rate):
            raise RejectRecord("unsupported_rate", problem)
        return encode(samples, rate, extension), StoredAudio(
            extension, rate, len(samples), found.notes.sound, count_clipped(samples)
        )

    once = SegmentsOnce[bytes, StoredAudio](reader.roots, uses)
    once.results = map(SegmentMaker(reader, store, may_copy), once.recordings())
    return once
