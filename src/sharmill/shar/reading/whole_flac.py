"""A proof that nothing lies in a FLAC but its metadata and its frames, without decoding it.

dr_flac passes over bytes that belong to no frame, and libFLAC refuses them. Where the proof fails the file need not be
damaged: it is left to libFLAC.
"""

from __future__ import annotations

from typing import Final

import miniaudio
import numpy as np

from sharmill.shar.reading.memory_audio import flac_header

_STREAMINFO_BYTES: Final = 34
_SEEK_POINT_BYTES: Final = 18
_PADDING, _SEEK_TABLE, _VORBIS_COMMENT = 1, 3, 4
_MAX_BLOCKS: Final = 8
_MAX_COMMENTS: Final = 64
_DEPTHS: Final = (8, 16, 24)
# More have numbers that Python does not encode: UTF-8 of surrogates.
_MAX_FRAMES: Final = 0xD800
# So few are folded as one number of Python.
_FEW_BYTES: Final = 1024
# Of a stream with blocks of one size, whose frames are numbered.
_SYNC: Final = b"\xff\xf8"


def is_whole_flac(data: bytes) -> bool:
    """Return true if all is proven: usual metadata, then every frame in its order, without a byte between."""
    first = _first_frame(data)
    return first is not None and _has_all_frames(data, first) and _is_multiple(np.frombuffer(data, np.uint8)[first:])


def _first_frame(data: bytes) -> int | None:
    """Return where the metadata ends; None if it is not of the usual kinds."""
    if flac_header(data) is None or int.from_bytes(data[5:8], "big") != _STREAMINFO_BYTES:
        return None
    if (int.from_bytes(data[20:22], "big") >> 4 & 31) + 1 not in _DEPTHS or not int.from_bytes(data[18:21], "big") >> 4:
        return None
    position, is_last = 8 + _STREAMINFO_BYTES, data[4] >= 128
    for _ in range(_MAX_BLOCKS):
        if is_last or position + 4 > len(data):
            break
        is_last, kind = data[position] >= 128, data[position] & 127
        start = position + 4
        position = start + int.from_bytes(data[position + 1 : start], "big")
        usual = (
            kind == _PADDING
            or (kind == _SEEK_TABLE and (position - start) % _SEEK_POINT_BYTES == 0)
            or (kind == _VORBIS_COMMENT and _are_comments(data[start:position]))
        )
        if not usual:
            return None
    return position if is_last and position < len(data) else None


def _are_comments(block: bytes) -> bool:
    position = 4 + int.from_bytes(block[:4], "little")
    count = int.from_bytes(block[position : position + 4], "little")
    position += 4
    if count > _MAX_COMMENTS:
        return False
    for _ in range(count):
        position += 4 + int.from_bytes(block[position : position + 4], "little")
    return position == len(block)


def _has_all_frames(data: bytes, first: int) -> bool:
    """Return true if the header of each frame is there, in order."""
    num_samples, channels, _ = flac_header(data) or (0, 0, 0)
    block_size, largest = int.from_bytes(data[8:10], "big"), int.from_bytes(data[10:12], "big")
    least_bytes = int.from_bytes(data[12:15], "big")
    if not 16 <= block_size == largest or not data.startswith(_SYNC, first):
        return False
    # Longer ones are found in less time. The fourth byte of stereo tells how the two channels are coded.
    full = data[first : first + (3 if channels == 2 else 4)]
    before, position = 0, first
    for number in range(-(-num_samples // block_size)):
        size = min(block_size, num_samples - number * block_size)
        found = _find_frame(data, position, full if size == block_size else _SYNC, number, size)
        if found < 0 or (found != first if number == 0 else _may_end_early(data, before, found)):
            return False
        before, position = found, found + max(least_bytes, len(_SYNC))
    return True


def _find_frame(data: bytes, position: int, begins: bytes, number: int, num_samples: int) -> int:
    """Return where a frame of this number and size begins; -1 if nowhere."""
    if number >= _MAX_FRAMES:
        return -1
    coded = chr(number).encode()
    if len(begins) == 4:
        begins += coded
    while (position := data.find(begins, position)) >= 0:
        after = position + 4 + len(coded)
        size = _block_size(data[position + 2] >> 4, data[after : after + 2]) if after <= len(data) else 0
        if size == num_samples and data.startswith(coded, position + 4):
            return position
        position += 1
    return -1


def _may_end_early(data: bytes, start: int, end: int) -> bool:
    """Return true if zeros follow a frame, which change no check sum: it can be decoded without the last of them."""
    if data[end - 1]:
        return False
    # STREAMINFO as the only metadata, with an unknown number of samples.
    header = data[:4] + b"\x80" + data[5:21] + bytes([data[21] & 0xF0]) + bytes(20)
    try:
        alone = miniaudio.flac_read_s16(header + data[start : end - 1])
    except miniaudio.DecodeError:
        return False
    return len(alone.samples) > 0


def _block_size(code: int, after: bytes) -> int:
    if code in (6, 7):
        return int.from_bytes(after[: code - 5], "big") + 1
    if code == 1:
        return 192
    return 576 << (code - 2) if code < 6 and code else 256 << (code - 8) if code >= 8 else 0


def _is_multiple(values: np.ndarray) -> bool:
    """Return true if bytes are a multiple of the polynomial x^15 + x + 1, as any number of whole frames is.

    A frame ends with its CRC-16, of the polynomial (x + 1)(x^15 + x + 1), which makes it a multiple. Bytes between two
    frames that are none show, except for one in 32,768. For m a power of two, x^15m is x^m + 1: so half of the bytes
    are folded onto the other half at once, and this takes a small part of the time of a table of bytes.
    """
    while len(values) > _FEW_BYTES:
        step = 1 << ((len(values) - 1) // 15).bit_length() - 1
        high = values[: -15 * step]
        folded = np.zeros(max(15 * step, len(high) + step), np.uint8)
        folded[-15 * step :] = values[-15 * step :]
        folded[-len(high) :] ^= high
        folded[-len(high) - step : -step] ^= high
        values = folded
    rest = int.from_bytes(values.tobytes(), "big")
    step = 8 * _FEW_BYTES
    while step := step >> 1:
        while high_bits := rest >> 15 * step:
            rest = (rest & (1 << 15 * step) - 1) ^ high_bits ^ high_bits << step
    return rest == 0
