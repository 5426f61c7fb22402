"""Audio and arrays in memory, which lhotse loads as its own.

Audio is decoded where it is loaded, and only as far as its bytes and its record go: a FLAC of some kilobytes can hold
hours of silence. The limits are those of ``sharmill.audio``, which decodes the recordings that a dataset is made of.
"""

import io
import math
from dataclasses import dataclass, fields
from typing import ClassVar, Final

import numpy as np
import soundfile as sf
from lhotse import AudioSource
from lhotse.array import Array, TemporalArray
from lhotse.audio import AudioLoadingError

from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, SAMPLES_IN_ANY_SIZE
from sharmill.audio.flac import flac_header
from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.reading.safety import is_device

# lhotse allows less; what is longer than this was not written by a tool.
_SECONDS_TOO_LONG: Final = 1.0
STORAGE_TYPES: Final = {"npy": "memory_npy", "llc": "memory_lilcom"}
# A frame of which less than this share is asked for is left out: times are sums of floats.
_TOLERANCE: Final = 1e-6


class _EqualToLhotses:
    """Equality with an object of lhotse's own, of the dataclass ``_kind``, that has the same content."""

    _kind: ClassVar[type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._kind):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self._kind))

    __hash__ = None  # type: ignore[assignment]


class SafeSource(_EqualToLhotses, AudioSource):
    """An audio source that looks at its bytes in memory, or at the file of its name, before lhotse decodes them.

    Attributes:
        claimed: the seconds that the recording says of bytes; None where they say nothing about them, or the source is
            a copy made by ``dataclasses.replace``.
    """

    _kind = AudioSource
    claimed: float | None = None

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return the samples that lhotse decodes; raises as ``check``."""
        self.check(duration)
        return super().load_audio(offset, duration, force_opus_sampling_rate)

    def check(self, wanted: float | None = None) -> None:
        """Raise AudioLoadingError as ``check_claims`` does, and where there is no plain file of the name."""
        if self.type == "file" and is_device(self.source):
            raise AudioLoadingError(f"{self.source!r} is no plain file, and is not opened")
        if isinstance(self.source, bytes):
            check_claims(self.source, self.claimed, wanted)


def check_claims(data: bytes, claimed: float | None, wanted: float | None = None) -> None:
    """Look at the header of an audio file in memory, before it is decoded.

    Args:
        claimed: the seconds that its recording says.
        wanted: the seconds that are to be decoded; None is all.

    Raises:
        AudioLoadingError: there are too few bytes for the samples that would be decoded, or all are wanted and they are
            more than ``claimed``.
    """
    # For WAV and MP3, the file size bounds the number of samples.
    if data.startswith((b"RIFF", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")):
        return
    found = flac_header(data)
    if found is None:
        try:
            with sf.SoundFile(io.BytesIO(data)) as sound:
                found = sound.frames, sound.channels, sound.samplerate
        except (sf.LibsndfileError, TypeError):  # TypeError: soundfile's, of what it takes for raw samples
            return  # lhotse says so
    num_samples, channels, rate = found
    if wanted is not None:
        num_samples = min(num_samples, math.ceil(max(0.0, wanted) * rate))
    if num_samples * channels > max(SAMPLES_IN_ANY_SIZE, len(data) * MAX_SAMPLES_PER_BYTE):
        raise AudioLoadingError(f"{len(data)} bytes are too few for {num_samples} samples of speech")
    if wanted is None and claimed is not None and num_samples / rate > claimed + _SECONDS_TOO_LONG:
        raise AudioLoadingError(f"the audio has {num_samples / rate:g} s, its recording says {claimed:g} s")


@dataclass(eq=False)
class MemoryArray(_EqualToLhotses, Array):
    """An Array that is loaded without numpy's costly look at its header."""

    _kind = Array

    def load(self) -> np.ndarray:
        if self.storage_type != "memory_npy" or not isinstance(self.storage_key, bytes):
            return super().load()
        # A copy, since what lies in bytes cannot be written to.
        return array_from_bytes(self.storage_key, "an array in memory").copy(order="K")


@dataclass(eq=False)
class TimeLastArray(_EqualToLhotses, TemporalArray):
    """A TemporalArray with ``temporal_dim=-1`` that loads the right part of itself."""

    _kind = TemporalArray

    def load(self, start: float | None = None, duration: float | None = None) -> np.ndarray:
        """Return the codes (codebooks, frames) of ``duration`` seconds from ``start`` on; by default all.

        There are ``ceil(duration / frame_shift)`` frames, or as many as are left. What begins in the last frame has it.

        Raises:
            ValueError: ``start`` lies before the array.
        """
        array = self.array.load()
        offset = 0.0 if start is None else start - self.start
        if offset < -1e-5:
            raise ValueError(f"the array begins at {self.start} s, after {start} s")
        frames = offset / self.frame_shift
        first = math.floor(frames + 0.5)
        if first == array.shape[-1] and frames < first - _TOLERANCE:
            # The nearest beginning is behind the last frame, as for the short rest that windows leave.
            first -= 1
        if duration is None:
            return array[..., first:]
        return array[..., first : first + math.ceil(duration / self.frame_shift - _TOLERANCE)]
