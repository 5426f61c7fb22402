"""Pictures of a piece of audio: the waveform as an SVG path, the log-mel spectrogram as a PNG."""

from __future__ import annotations

import base64
import struct
import zlib
from functools import lru_cache
from typing import Final

import numpy as np

_WINDOW: Final = 0.032
_HOP: Final = 0.010
_NUM_MELS: Final = 64
_PICTURE_WIDTH: Final = 200
_WAVE_COLUMNS: Final = 100
# Dark to bright, the same in both themes.
_PALETTE: Final = ((13, 17, 43), (59, 31, 107), (140, 41, 99), (221, 81, 58), (252, 165, 53), (252, 244, 190))


def spectrogram(samples: np.ndarray, sampling_rate: int) -> np.ndarray:
    """Return the power of audio (samples,) by frame and frequency (frames, bins), at least one frame."""
    size, hop = max(2, round(_WINDOW * sampling_rate)), max(1, round(_HOP * sampling_rate))
    padded = np.pad(samples.astype(np.float32), (0, max(0, size - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
    window = np.hanning(size).astype(np.float32)
    return np.abs(np.fft.rfft(frames * window, axis=1)).astype(np.float32) ** 2 / float(window.sum()) ** 2


def wave_path(samples: np.ndarray) -> str:
    """Return the outline of audio (samples,) as a path in a box of 100 by 20, scaled to its peak.

    >>> wave_path(np.array([0.0, 1.0]))
    'M0 10V10M1 10V0'
    """
    parts = np.array_split(samples, min(_WAVE_COLUMNS, max(1, len(samples))))
    peak = max(float(np.abs(samples).max(initial=0.0)), 1e-9)
    scale = _WAVE_COLUMNS / len(parts) if len(parts) > 2 else 1
    return "".join(
        f"M{number * scale:.3g} {10 - 10 * min(0.0, float(part.min())) / peak:.3g}"
        f"V{10 - 10 * max(0.0, float(part.max())) / peak:.3g}"
        for number, part in enumerate(parts)
    )


def mel_picture(power: np.ndarray, sampling_rate: int) -> str:
    """Return the log-mel spectrogram of audio as a ``data:`` address of a PNG, low frequencies below."""
    columns = np.array_split(power, min(_PICTURE_WIDTH, len(power)))
    mels = np.stack([part.mean(axis=0) for part in columns]) @ _mel_filters(power.shape[1], sampling_rate).T
    levels = 10 * np.log10(np.maximum(mels, 1e-12))
    top = float(levels.max())
    shades = np.clip((levels - (top - 70.0)) / 70.0, 0.0, 1.0)
    # Sixteen shades are enough to look at, and a third of the bytes of all.
    pixels = (np.rint(shades * 15) * 17).astype(np.uint8).T[::-1]
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"


@lru_cache(maxsize=8)
def _mel_filters(num_bins: int, sampling_rate: int) -> np.ndarray:
    """Return triangular filters (mels, bins) up to half the rate, on the mel scale of HTK."""
    top = 2595 * np.log10(1 + sampling_rate / 2 / 700)
    centers = 700 * (10 ** (np.linspace(0, top, _NUM_MELS + 2) / 2595) - 1)
    bins = np.linspace(0, sampling_rate / 2, num_bins)
    low, center, high = (centers[shift : shift + _NUM_MELS, None] for shift in range(3))
    filters = np.maximum(0, np.minimum((bins - low) / (center - low), (high - bins) / (high - center)))
    # A narrow filter may lie between two bins.
    nearest = np.abs(bins[None] - center).argmin(axis=1)
    filters[np.arange(_NUM_MELS), nearest] = np.maximum(filters[np.arange(_NUM_MELS), nearest], 0.5)
    return filters.astype(np.float32)


def _png(pixels: np.ndarray) -> bytes:
    """Return a PNG of shades (height, width) uint8, coloured by the palette."""
    height, width = pixels.shape
    steps = np.linspace(0, len(_PALETTE) - 1, 256)
    colors = [np.interp(steps, range(len(_PALETTE)), channel) for channel in zip(*_PALETTE, strict=True)]
    palette = np.stack(colors, axis=1).astype(np.uint8).tobytes()
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
