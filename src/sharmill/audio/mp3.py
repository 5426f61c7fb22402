"""The number of samples in an MP3 file, counted frame by frame where no header states it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from sharmill.errors import RejectRecord

ReadBytes = Callable[..., bytes]
"""(start, size) -> the bytes of a file from ``start`` on; all that follow without ``size``."""

# Bit rates in kbit/s by index, and sampling rates, by the version bits of a frame header: MPEG 1, 2 and 2.5.
_MPEG1_KBPS: Final = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBPS: Final = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_TRAILERS: Final = (b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"ID3")


def count_samples(read: ReadBytes, name: str, estimate: int) -> int:
    """Return the samples in an MP3: libsndfile's number where a Xing or Info frame states it, else counted.

    Without such a frame libsndfile extrapolates from the size of the first: wrong by a frame or so at a
    constant bit rate, by any factor at a variable one.
    """
    head = read(0, 10)
    first = 0
    if head[:3] == b"ID3" and len(head) == 10:  # 28-bit size, and a footer if flagged
        size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        first = 10 + size + (10 if head[5] & 0x10 else 0)
    if re.search(rb"(?s)(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f]", read(first, 256)):
        return estimate
    counted = _count_frames(read(first).lstrip(b"\0"), name)
    if counted > estimate:  # where libsndfile would stop
        raise RejectRecord("unreadable_audio", f"{name}: MP3 of variable bit rate without a Xing frame")
    return counted


def _count_frames(data: bytes, name: str) -> int:
    """Count the samples per channel in the complete layer III frames of ``data``."""
    position = num_samples = 0
    while position + 4 <= len(data):
        size, samples = read_frame_header(data[position : position + 4])
        if size == 0:
            rest = data[position : position + 16]
            if rest.startswith(_TRAILERS) or not any(rest):
                break
            raise RejectRecord("unreadable_audio", f"{name}: no MPEG frame where one should begin")
        position += size
        num_samples += samples if position <= len(data) else 0
    return num_samples


def read_frame_header(header: bytes) -> tuple[int, int]:
    """Return bytes and samples per channel of the layer III frame with this 4-byte header; (0, 0) if it is none."""
    version, layer = (header[1] >> 3) & 3, (header[1] >> 1) & 3
    kbps, rate = header[2] >> 4, (header[2] >> 2) & 3
    if header[0] != 0xFF or header[1] < 0xE0 or version == 1 or layer != 1 or kbps in (0, 15) or rate == 3:
        return 0, 0
    samples, kbps_table = (1152, _MPEG1_KBPS) if version == 3 else (576, _MPEG2_KBPS)
    padding = (header[2] >> 1) & 1
    return samples // 8 * kbps_table[kbps - 1] * 1000 // _RATES[version][rate] + padding, samples
