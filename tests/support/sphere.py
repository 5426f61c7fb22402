"""SPHERE files (NIST) in memory, plain and compressed with shorten: an encoder of the little that tests need."""

from __future__ import annotations

from typing import Final

import numpy as np

_S16_BIG_ENDIAN: Final = 3
_DIFF1, _QUIT = 1, 4
_BLOCK: Final = 256
_RESIDUAL_BITS: Final = 9


def sphere(samples: np.ndarray, rate: int, *, shortened: bool = False, count: int | None = None) -> bytes:
    """A SPHERE file of int16 samples (n,) or (n, channels); ``count`` is what its header says instead of n."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    body = shorten(samples.reshape(-1, channels)) if shortened else samples.astype(">i2").tobytes()
    coding = "pcm,embedded-shorten-v2.00" if shortened else "pcm"
    return sphere_header(coding, rate, channels, len(samples) if count is None else count) + body


def sphere_header(coding: str, rate: int, channels: int, count: int) -> bytes:
    """The header of a SPHERE file."""
    num_bytes = 1 if coding.startswith("ulaw") else 2
    lines = [
        "NIST_1A\n   1024",
        f"channel_count -i {channels}",
        f"sample_count -i {count}",
        f"sample_rate -i {rate}",
        f"sample_n_bytes -i {num_bytes}",
        f"sample_byte_format -s{num_bytes} {'10'[2 - num_bytes :]}",
        f"sample_sig_bits -i {8 * num_bytes}",
        f"sample_coding -s{len(coding)} {coding}",
        "end_head\n",
    ]
    return "\n".join(lines).encode().ljust(1024)


def shorten(samples: np.ndarray, kind: int = _S16_BIG_ENDIAN) -> bytes:
    """Compress stored values (n, channels) as version 2 of shorten, by the differences of neighbours."""
    bits: list[str] = []
    for value in (kind, samples.shape[1], _BLOCK, 0, 0, 0):
        bits.append(number(value))
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK].astype(np.int64)
        before = samples[start - 1].astype(np.int64) if start else np.zeros(samples.shape[1], dtype=np.int64)
        if len(block) < _BLOCK:
            bits += [rice(5, 2), number(len(block))]
        for channel in range(samples.shape[1]):
            differences = np.diff(block[:, channel], prepend=before[channel])
            bits += [rice(_DIFF1, 2), rice(_RESIDUAL_BITS, 3)]
            bits += [signed(int(d), _RESIDUAL_BITS) for d in differences]
    return shorten_stream(bits)


def shorten_stream(bits: list[str]) -> bytes:
    """A stream of shorten, version 2, of its numbers and blocks; the end mark is added."""
    stream = "".join(bits) + rice(_QUIT, 2)
    stream += "0" * (-len(stream) % 32)
    return b"ajkg\x02" + int(stream, 2).to_bytes(len(stream) // 8, "big")


def signed(value: int, bits: int) -> str:
    return rice(2 * value if value >= 0 else -2 * value - 1, bits + 1)


def rice(value: int, bits: int) -> str:
    low = f"{value & ((1 << bits) - 1):0{bits}b}" if bits else ""
    return "0" * (value >> bits) + "1" + low


def number(value: int) -> str:
    bits = value.bit_length()
    return rice(bits, 2) + rice(value, bits)
