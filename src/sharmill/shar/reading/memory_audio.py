"""Audio of a dataset in memory, which is decoded where it is loaded, and only as far as its bytes and its record go.

A FLAC of some kilobytes can hold hours of silence. The limits are those of ``sharmill.audio``, which decodes the
recordings that a dataset is made of.
"""

from __future__ import annotations

import io
import math
from dataclasses import fields
from typing import Any, Final

import numpy as np
import soundfile as sf
from lhotse import AudioSource
from lhotse.audio import AudioLoadingError

from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, SAMPLES_IN_ANY_SIZE

# lhotse allows less; what is longer than this was not written by a tool.
_SECONDS_TOO_LONG: Final = 1.0
# Of these the bytes limit the samples.
_BOUNDED: Final = (b"RIFF", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


class MemorySource(AudioSource):
    """An audio source in memory that looks at what its bytes claim before lhotse decodes them; equal to lhotse's own.

    Attributes:
        claimed: the seconds that the recording says; None where they say nothing about the bytes, or the source is a
            copy made by ``dataclasses.replace``.
    """

    claimed: float | None = None

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return the samples that lhotse decodes; raises as ``check``."""
        self.check(duration)
        return super().load_audio(offset, duration, force_opus_sampling_rate)

    def check(self, wanted: float | None = None) -> None:
        """Raise AudioLoadingError as ``check_claims`` does."""
        if isinstance(self.source, bytes):
            check_claims(self.source, self.claimed, wanted)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other, AudioSource)

    __hash__ = None  # type: ignore[assignment]


def same_fields(one: object, other: object, kind: type) -> bool:
    """Compare an object with another one of lhotse's dataclass ``kind``."""
    if not isinstance(other, kind):
        return NotImplemented
    return all(getattr(one, field.name) == getattr(other, field.name) for field in fields(kind))


def memory_source(channels: list[int], data: bytes, seconds: Any) -> MemorySource:
    """Make the source of a recording that says it has so many seconds, whatever it says; None: it says nothing."""
    made = object.__new__(MemorySource)
    claimed = seconds if seconds is None or type(seconds) in (int, float) else 0.0
    made.__dict__.update({"type": "memory", "channels": channels, "source": data, "video": None, "claimed": claimed})
    return made


def check_claims(data: bytes, claimed: float | None, wanted: float | None = None) -> None:
    """Look at the header of an audio file in memory, before it is decoded.

    Args:
        claimed: the seconds that its recording says.
        wanted: the seconds that are to be decoded; None is all.

    Raises:
        AudioLoadingError: there are too few bytes for the samples that would be decoded, or all are wanted and they are
            more than ``claimed``.
    """
    if data.startswith(_BOUNDED):
        return
    found = flac_header(data) or _header(data)
    if found is None:  # lhotse says so
        return
    num_samples, channels, rate = found
    if wanted is not None:
        num_samples = min(num_samples, math.ceil(max(0.0, wanted) * rate))
    if num_samples * channels > max(SAMPLES_IN_ANY_SIZE, len(data) * MAX_SAMPLES_PER_BYTE):
        raise AudioLoadingError(f"{len(data)} bytes are too few for {num_samples} samples of speech")
    if wanted is None and claimed is not None and num_samples / rate > claimed + _SECONDS_TOO_LONG:
        raise AudioLoadingError(f"the audio has {num_samples / rate:g} s, its recording says {claimed:g} s")


def flac_header(data: bytes) -> tuple[int, int, int] | None:
    """Return samples, channels and rate of a FLAC that begins with them, as all do that libsndfile reads."""
    if not data.startswith(b"fLaC") or len(data) < 26 or data[4] & 127:
        return None
    # Without libsndfile, since this is done for each item: 20 bits of rate, 3 of channels, 5 of depth, 36 of samples.
    bits = int.from_bytes(data[18:26], "big")
    # 0 samples is an unknown number of them, which libsndfile takes for all that there can be.
    return bits & (1 << 36) - 1 or 1 << 63, (bits >> 41 & 7) + 1, bits >> 44 or 1


def _header(data: bytes) -> tuple[int, int, int] | None:
    try:
        with sf.SoundFile(io.BytesIO(data)) as sound:
            return sound.frames, sound.channels, sound.samplerate
    except (sf.LibsndfileError, TypeError):  # TypeError: soundfile's, of what it takes for raw samples
        return None
