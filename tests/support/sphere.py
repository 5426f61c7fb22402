"""SPHERE files (NIST) in memory, plain and compressed with shorten: an encoder of the little that tests need."""

from __future__ import annotations

from typing import Final

import numpy as np

_S16_BIG_ENDIAN: Final = 3
_DIFF1, _QUIT = 1, 4
_BLOCK: Final = 256
_RESIDUAL_BITS: Final = 9


def sphere(samples: np.ndarray, rate: int, *, shortened: bool = False, coding: str = "pcm", count: int | None = None):
    """A SPHERE file of int16 samples (n,) or (n, channels); ``count`` is what its header says instead of n."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    body = shorten(samples.reshape(-1, channels)) if shortened else samples.astype(">i2").tobytes()
    if shortened:
        coding += ",embedded-shorten-v2.00"
    lines = [
        "NIST_1A\n   1024",
        f"channel_count -i {channels}",
        f"sample_count -i {len(samples) if count is None else count}",
        f"sample_rate -i {rate}",
        "sample_n_bytes -i 2",
        "sample_byte_format -s2 10",
        "sample_sig_bits -i 16",
        f"sample_coding -s{len(coding)} {coding}",
        "end_head\n",
    ]
    return "\n".join(lines).encode().ljust(1024) + body


def shorten(samples: np.ndarray) -> bytes:
    """Compress int16 samples (n, channels) as version 2 of shorten, by the differences of neighbours."""
    bits: list[str] = []
    for value in (_S16_BIG_ENDIAN, samples.shape[1], _BLOCK, 0, 0, 0):
        bits.append(_number(value))
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK].astype(np.int64)
        before = samples[start - 1].astype(np.int64) if start else np.zeros(samples.shape[1], dtype=np.int64)
        if len(block) < _BLOCK:
            bits += [_rice(5, 2), _number(len(block))]
        for channel in range(samples.shape[1]):
            differences = np.diff(block[:, channel], prepend=before[channel])
            bits += [_rice(_DIFF1, 2), _rice(_RESIDUAL_BITS, 3)]
            bits += [_rice(2 * int(d) if d >= 0 else -2 * int(d) - 1, _RESIDUAL_BITS + 1) for d in differences]
    bits.append(_rice(_QUIT, 2))
    stream = "".join(bits)
    stream += "0" * (-len(stream) % 32)
    return b"ajkg\x02" + int(stream, 2).to_bytes(len(stream) // 8, "big")


def _rice(value: int, bits: int) -> str:
    low = f"{value & ((1 << bits) - 1):0{bits}b}" if bits else ""
    return "0" * (value >> bits) + "1" + low


def _number(value: int) -> str:
    bits = value.bit_length()
    return _rice(bits, 2) + _rice(value, bits)
