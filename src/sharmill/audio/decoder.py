"""What every decoder does: the header that it finds in an audio file, its samples, and their limits."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sharmill.errors import refuse_record

MIN_SAMPLING_RATE: Final = 1000  # below, no speech is left
MAX_SAMPLING_RATE: Final = 655350  # of FLAC
# No frame of MPEG audio, ADPCM or GSM holds more; beyond it a header is corrupt and must not size an array.
MAX_SAMPLES_PER_BYTE: Final = 100
# FLAC holds silence in next to nothing. More samples than these, 128 MiB of them, need bytes as well.
SAMPLES_IN_ANY_SIZE: Final = 1 << 25
FULL_SCALE: Final = 1 << 15


@dataclass(frozen=True)
class AudioInfo:
    """The header of an audio file.

    Args:
        sampling_rate: in Hz.
        num_samples: per channel.
        channels: number of channels.
        format: "flac", "wav", "mp3", "opus", "ogg" (Vorbis), "aiff", "aac", ...: by content.
        exact_seeks: a part decodes to the same samples wherever the decoder starts, on every kind of CPU.
        common: libsndfile reads it, and so does every tool that is made of it; of others only the samples are stored.
    """

    sampling_rate: int
    num_samples: int
    channels: int
    format: str
    exact_seeks: bool = field(default=True, compare=False)
    common: bool = field(default=True, compare=False)


class Decoder(ABC):
    """An audio file that is open, and decoded from some sample on."""

    info: AudioInfo

    def seek(self, position: int) -> None:  # noqa: B027 - not every decoder has exact seeks
        """Go on decoding at ``position``; only where ``info.exact_seeks``."""

    @abstractmethod
    def read(self, num_samples: int) -> np.ndarray:
        """Return the next samples (num_samples,) or (num_samples, channels), fewer at the end.

        They are float32, or int16 in all reads of a file that holds 16 bits.
        """

    def check_end(self) -> None:  # noqa: B027 - of most, all damage shows in the samples or their number
        """Raise RejectRecord where the file is damaged or cut off in a way that does not show in the samples."""

    @abstractmethod
    def close(self) -> None:
        """Release what the decoder holds; the bytes stay open."""


def to_float(samples: np.ndarray) -> np.ndarray:
    """Return samples of any shape as float32, without a change of value; floats are returned as they are."""
    if samples.dtype != np.int16:
        return samples
    # In less time than one multiplication that converts as it goes.
    floats = samples.astype(np.float32)
    floats *= np.float32(1 / FULL_SCALE)
    return floats


def check_finite(audio: np.ndarray, name: str) -> None:
    """Raise RejectRecord ``non_finite_audio`` where samples are NaN or infinite."""
    # The extremes are NaN where any sample is, and cost less than an array of answers.
    is_finite = not len(audio) or (math.isfinite(audio.min()) and math.isfinite(audio.max()))
    refuse_record((not is_finite, "non_finite_audio", f"{name} has NaN or infinite samples"))
