"""Ogg pages (RFC 3533): a fixed stream serial number, and a check that all pages of a file are there and intact.

Knows nothing about the codec inside the pages.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

_HEADER_BYTES: Final = 27
_SERIAL: Final = slice(14, 18)
_CHECKSUM: Final = slice(22, 26)
_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def page_checksum(page: bytes | bytearray) -> int:
    """Compute the CRC-32 of a page whose checksum field is zero: polynomial 0x04c11db7, not reflected, no inversions.

    That is zlib's CRC of the bit-reversed bytes, its two inversions undone: computed in C.
    """
    reflected = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reflected:032b}"[::-1], 2)


def with_serial(stream: bytes, serial: int) -> bytes:
    """Return ``stream`` with ``serial`` as the serial number of all its pages and the checksums made right again.

    Encoders draw the number at random, for multiplexing; in a file of one stream it makes equal audio differ.

    Raises:
        ValueError: ``stream`` is not an uninterrupted sequence of intact pages of one logical stream.
    """
    pages: list[bytes] = []
    position = 0
    old_serial = stream[_SERIAL]
    while position < len(stream):
        size = _page_bytes(stream, position)
        page = bytearray(stream[position : position + size])
        if size == 0 or len(page) < size:
            raise ValueError(f"no complete Ogg page at byte {position}")
        if page[_SERIAL] != old_serial:
            raise ValueError(f"the page at byte {position} belongs to another logical stream")
        if not _has_right_checksum(page):
            raise ValueError(f"the checksum of the page at byte {position} is wrong")
        page[_SERIAL] = struct.pack("<I", serial)
        page[_CHECKSUM] = bytes(4)
        page[_CHECKSUM] = struct.pack("<I", page_checksum(page))
        pages.append(bytes(page))
        position += size
    return b"".join(pages)


def is_intact(stream: bytes) -> bool:
    """Return True for pages with right checksums, end to end; something that is no Ogg may follow."""
    position = 0
    while size := _page_bytes(stream, position):
        if not _has_right_checksum(stream[position : position + size]):
            return False
        position += size
    return stream.find(b"OggS", position) < 0


def ends_inside_page(stream: bytes) -> bool:
    """Return True if the last page of ``stream`` is incomplete."""
    position = stream.rfind(b"OggS")
    if position < 0:
        return False
    size = _page_bytes(stream, position)
    return size == 0 or position + size > len(stream)


def _has_right_checksum(page: bytes | bytearray) -> bool:
    bare = page[: _CHECKSUM.start] + bytes(4) + page[_CHECKSUM.stop :]
    return page[_CHECKSUM] == struct.pack("<I", page_checksum(bare))


def _page_bytes(stream: bytes, position: int) -> int:
    """Return the size of the page that starts at ``position``, 0 where no whole page header is."""
    header = stream[position : position + _HEADER_BYTES]
    if len(header) < _HEADER_BYTES or header[:5] != b"OggS\0":
        return 0
    num_segments = header[26]
    first_segment = position + _HEADER_BYTES
    lacing = stream[first_segment : first_segment + num_segments]
    if len(lacing) < num_segments:
        return 0
    return _HEADER_BYTES + num_segments + sum(lacing)
