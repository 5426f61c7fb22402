"""The header of FLAC, and whether a file has more than it states."""

import io
from typing import Final

import soundfile as sf

_FLAC_BEGIN: Final = b"fLaC\0\0\0\x22"


def flac_header(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """Return samples, channels and rate of a FLAC by STREAMINFO, its first block; None for anything else."""
    head = bytes(data[:42])
    # A block of type 0 and 34 bytes; the bit above the type says whether it is the last.
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 127 or head[5:8] != b"\0\0\x22":
        return None
    # The header has 20 bits of rate, 3 of channels, 5 of depth, 36 of samples. libsndfile would take longer per item.
    bits = int.from_bytes(head[18:26], "big")
    # 0 samples is an unknown number of them, which libsndfile takes for all that there can be.
    return bits & (1 << 36) - 1 or 1 << 63, (bits >> 41 & 7) + 1, bits >> 44 or 1


def has_unstated_flac(data: bytes, num_samples: int) -> bool:
    """Return True if FLAC has more than the samples that it states, or another FLAC behind it."""
    if data.rfind(_FLAC_BEGIN) > 0:  # from the end, which takes a quarter of the time
        return True
    # If the header states no number, libsndfile finds the sample behind the last one, if there is any.
    unstated = data[:21] + bytes((data[21] & 0xF0,)) + bytes(4) + data[26:]
    try:
        with sf.SoundFile(io.BytesIO(unstated)) as sound:
            sound.seek(num_samples)
    except sf.LibsndfileError:
        return False
    return True
