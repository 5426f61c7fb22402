"""Audio items by their headers and by their samples: length, rate, silence and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sharmill.audio.files import AudioInfo, decode, probe_bytes
from sharmill.shar.items import Item

# A stretch is silent below -60 dB of full scale: quieter than the noise of a quiet room.
SILENCE_LEVEL: Final = 1e-3
SILENCE_SECONDS: Final = 0.025
# More silence than this in an item is worth a look.
MAX_SILENCE_SHARE: Final = 0.8
# A sample within one step of 16 bits of full scale. Of speech that is not clipped hardly any are.
CLIPPING_LEVEL: Final = 1 - 2 / 32768
MAX_CLIPPING_SHARE: Final = 1e-3

# That of FLAC, and the highest that sharmill takes from any header.
_MAX_RATE: Final = 655350


@dataclass(frozen=True, slots=True)
class Levels:
    """Length and rate of a decoded item, and its shares of silent stretches and of clipped samples."""

    num_samples: int
    sampling_rate: int
    silence: float
    clipping: float


def measure(item: Item) -> Levels:
    """Decode an item and return its levels.

    Raises:
        RejectRecord: it cannot be decoded, or has values that are not finite.
    """
    assert item.data is not None
    samples, rate = decode(item.data)
    magnitude = np.abs(samples)
    clipping = float(np.count_nonzero(magnitude >= CLIPPING_LEVEL) / len(samples))
    length = max(1, round(SILENCE_SECONDS * rate))
    whole = len(samples) // length * length
    # What is left of the last stretch counts only where there is no other.
    stretches = (samples[:whole] if whole else samples).reshape(-1, length if whole else len(samples))
    level = np.sqrt(np.mean(np.square(stretches, dtype=np.float64), axis=1))
    return Levels(len(samples), rate, float(np.mean(level < SILENCE_LEVEL)), clipping)


def level_problem(levels: Levels) -> tuple[str, str] | None:
    """Return the code and sentence of a warning, if an item deserves one."""
    if levels.silence > MAX_SILENCE_SHARE:
        return "silent_audio", f"{levels.silence:.0%} of it is silence"
    if levels.clipping > MAX_CLIPPING_SHARE:
        return "clipped_audio", f"{levels.clipping:.2%} of its samples are at full scale"
    return None


def probe_item(data: bytes) -> AudioInfo:
    """Return what a header says, as ``probe_bytes`` does, faster for what sharmill writes: FLAC and 16-bit WAV."""
    return _probe_flac(data) or _probe_wav(data) or probe_bytes(bytes(data))


def _probe_flac(data: bytes) -> AudioInfo | None:
    """Read STREAMINFO, the first block of any FLAC file; None where it is none, or does not tell the length."""
    head = bytes(data[:42])
    # Block 0 of 34 bytes; the bit above says whether it is the last.
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 0x7F or head[5:8] != b"\0\0\x22":
        return None
    packed = int.from_bytes(head[18:26], "big")
    sampling_rate, num_samples = packed >> 44, packed & ((1 << 36) - 1)
    if not 0 < sampling_rate <= _MAX_RATE or num_samples == 0:
        return None
    return AudioInfo(sampling_rate, num_samples, (packed >> 41 & 7) + 1, "flac")


def _probe_wav(data: bytes) -> AudioInfo | None:
    """Read a RIFF file of 16 bits as libsndfile writes it: samples right behind the format, and nothing behind."""
    head = bytes(data[:44])
    if len(head) < 44 or head[:4] + head[8:16] + head[36:40] != b"RIFFWAVEfmt data" or head[16:20] != b"\x10\0\0\0":
        return None
    kind, channels = int.from_bytes(head[20:22], "little"), int.from_bytes(head[22:24], "little")
    sampling_rate, frame = int.from_bytes(head[24:28], "little"), int.from_bytes(head[32:34], "little")
    bits, size = int.from_bytes(head[34:36], "little"), int.from_bytes(head[40:44], "little")
    # 16 bits and nothing behind the samples, as sharmill writes it; all else is for libsndfile.
    plain = (kind, bits, frame) == (1, 16, 2 * channels) and int.from_bytes(head[4:8], "little") == size + 36
    if (
        not plain
        or not channels
        or not 0 < sampling_rate <= _MAX_RATE
        or not 0 < size == len(data) - 44
        or size % frame
    ):
        return None
    return AudioInfo(sampling_rate, size // frame, channels, "wav")
