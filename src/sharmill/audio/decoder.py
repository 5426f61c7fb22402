"""The interface of decoders, the header that they return, and the limits that all of them apply."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sharmill.errors import refuse_record

MIN_SAMPLING_RATE: Final = 1000  # a lower rate cannot hold speech
MAX_SAMPLING_RATE: Final = 655350  # the highest rate of FLAC
# Maximum number of samples per byte in a frame of MPEG audio, ADPCM or GSM. A header that claims more is corrupt, and
# must not determine the size of an array.
MAX_SAMPLES_PER_BYTE: Final = 100
# FLAC stores silence in almost no space, so a file of any size may have this many samples (128 MiB as float32).
SAMPLES_IN_ANY_SIZE: Final = 1 << 25
FULL_SCALE: Final = 1 << 15


@dataclass(frozen=True)
class AudioInfo:
    """The header of an audio file.

    Args:
        sampling_rate: the sampling rate in Hz.
        num_samples: the number of samples per channel.
        channels: the number of channels.
        format: the format of the content: "flac", "wav", "mp3", "opus", "ogg" (Vorbis), "aiff", "aac", ...
        exact_seeks: True if a part decodes to the same samples wherever the decoder starts, on every kind of CPU.
        common: True if libsndfile, and thus any tool based on it, can read the whole file. Other files are never copied
            unchanged; only their samples are stored.
    """

    sampling_rate: int
    num_samples: int
    channels: int
    format: str
    exact_seeks: bool = field(default=True, compare=False)
    common: bool = field(default=True, compare=False)


class Decoder(ABC):
    """An open audio file and the position at which decoding continues."""

    info: AudioInfo

    def seek(self, position: int) -> None:  # noqa: B027 - not every decoder has exact seeks
        """Continue decoding at sample ``position``; allowed only if ``info.exact_seeks``."""

    @abstractmethod
    def read(self, num_samples: int) -> np.ndarray:
        """Return the next samples, (num_samples,) or (num_samples, channels); fewer at the end of the file.

        For a file with 16-bit samples, either all reads or none return int16. All other samples are float32.
        """

    def check_end(self) -> None:  # noqa: B027 - most decoders find all damage while decoding
        """Raise RejectRecord if the file is damaged or truncated in a way that decoding does not reveal."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the decoder; the ``AudioBytes`` stay open."""


def to_float(samples: np.ndarray) -> np.ndarray:
    """Return int16 samples of any shape as float32 in [-1, 1); floats are returned unchanged."""
    if samples.dtype != np.int16:
        return samples
    # Converting first and then multiplying in place is faster than one multiplication that also converts.
    floats = samples.astype(np.float32)
    floats *= np.float32(1 / FULL_SCALE)
    return floats


def check_finite(audio: np.ndarray, name: str) -> None:
    """Raise RejectRecord ``non_finite_audio`` if samples are NaN or infinite."""
    # If any sample is NaN, so are the minimum and maximum, and these are faster to compute than an array of booleans.
    is_finite = not len(audio) or (math.isfinite(audio.min()) and math.isfinite(audio.max()))
    refuse_record((not is_finite, "non_finite_audio", f"{name} has NaN or infinite samples"))
