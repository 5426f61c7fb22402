"""Audio and arrays in memory that lhotse loads like its own.

Audio is decoded when it is loaded. Audio that claims to be far longer than its size in bytes or its recording allows is
refused, since a FLAC file of a few kilobytes can hold hours of silence. ``sharmill.audio`` applies the same limits to
source recordings.
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

# The number of seconds by which audio may be longer than its recording states. lhotse tolerates less, and no tool
# writes more.
_SECONDS_TOO_LONG: Final = 1.0
STORAGE_TYPES: Final = {"npy": "memory_npy", "llc": "memory_lilcom"}
# A frame is left out if less than this share of it is requested, since such a small share is a rounding error.
_TOLERANCE: Final = 1e-6


class _EqualToLhotses:
    """Equality with objects of lhotse's own dataclass ``_kind`` that have the same content."""

    _kind: ClassVar[type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._kind):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self._kind))

    __hash__ = None  # type: ignore[assignment]


class SafeSource(_EqualToLhotses, AudioSource):
    """An audio source that checks its bytes in memory, or the file that it names, before lhotse decodes them.

    Attributes:
        claimed: the duration in seconds that the recording claims for the bytes; None if it claims none, or if the
            source is a copy made by ``dataclasses.replace``.
    """

    _kind = AudioSource
    claimed: float | None = None

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return the samples that lhotse decodes; raises the same error as ``check``."""
        self.check(duration)
        return super().load_audio(offset, duration, force_opus_sampling_rate)

    def check(self, wanted: float | None = None) -> None:
        """Raise AudioLoadingError if ``check_claims`` does, or if the source names a FIFO, device or folder."""
        if self.type == "file" and is_device(self.source):
            raise AudioLoadingError(f"{self.source!r} is not a regular file and is not opened")
        if isinstance(self.source, bytes):
            check_claims(self.source, self.claimed, wanted)


def check_claims(data: bytes, claimed: float | None, wanted: float | None = None) -> None:
    """Check the header of an audio file in memory before it is decoded.

    Args:
        claimed: the duration in seconds that the recording claims; None if it claims none.
        wanted: the duration in seconds that will be decoded; None for all.

    Raises:
        AudioLoadingError: there are too few bytes for the number of samples to be decoded, or the whole file is wanted
            and it is more than a second longer than ``claimed``.
    """
    # For WAV and MP3, the file size bounds the number of samples.
    if data.startswith((b"RIFF", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")):
        return
    found = flac_header(data)
    if found is None:
        try:
            with sf.SoundFile(io.BytesIO(data)) as sound:
                found = sound.frames, sound.channels, sound.samplerate
        except (sf.LibsndfileError, TypeError):  # soundfile raises TypeError for bytes that it treats as raw samples
            return  # lhotse reports the error
    num_samples, channels, rate = found
    if wanted is not None:
        num_samples = min(num_samples, math.ceil(max(0.0, wanted) * rate))
    if num_samples * channels > max(SAMPLES_IN_ANY_SIZE, len(data) * MAX_SAMPLES_PER_BYTE):
        raise AudioLoadingError(f"{len(data)} bytes are too few for {num_samples} samples of speech")
    if wanted is None and claimed is not None and num_samples / rate > claimed + _SECONDS_TOO_LONG:
        raise AudioLoadingError(f"the audio lasts {num_samples / rate:g} s, but its recording states {claimed:g} s")


@dataclass(eq=False)
class MemoryArray(_EqualToLhotses, Array):
    """An Array that is loaded without numpy's slow parsing of the header."""

    _kind = Array

    def load(self) -> np.ndarray:
        if self.storage_type != "memory_npy" or not isinstance(self.storage_key, bytes):
            return super().load()
        # Copy the array, because an array that shares memory with bytes is read-only.
        return array_from_bytes(self.storage_key, "an array in memory").copy(order="K")


@dataclass(eq=False)
class TimeLastArray(_EqualToLhotses, TemporalArray):
    """A TemporalArray with ``temporal_dim=-1`` whose ``load`` slices correctly along time."""

    _kind = TemporalArray

    def load(self, start: float | None = None, duration: float | None = None) -> np.ndarray:
        """Return the codes (codebooks, frames) of ``duration`` seconds from ``start`` on; by default up to the end.

        There are ``ceil(duration / frame_shift)`` frames, or fewer at the end of the array. A slice that starts within
        the last frame contains that frame.

        Raises:
            ValueError: ``start`` is before the beginning of the array.
        """
        array = self.array.load()
        offset = 0.0 if start is None else start - self.start
        if offset < -1e-5:
            raise ValueError(f"the array begins at {self.start} s, after the requested start {start} s")
        frames = offset / self.frame_shift
        first = math.floor(frames + 0.5)
        if first == array.shape[-1] and frames < first - _TOLERANCE:
            # ``start`` lies in the last frame but was rounded to the end of the array, as happens with the short
            # remainder of a cut that is divided into windows.
            first -= 1
        if duration is None:
            return array[..., first:]
        return array[..., first : first + math.ceil(duration / self.frame_shift - _TOLERANCE)]
