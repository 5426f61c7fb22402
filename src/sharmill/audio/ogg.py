"""Checks of Ogg files (RFC 3533) that libsndfile does not make: damaged or lost pages, and additional streams."""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Final

from sharmill.audio.extent import Read

# The header of a page up to the number of segments; the table of segments follows.
_PAGE: Final = re.compile(rb"(?s)OggS\0.{21}(.)")
_CHECKSUM: Final = slice(22, 26)
_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
# The beginning of the first page of a stream: version 0 and the flag of a first page.
OGG_BEGIN: Final = b"OggS\0\2"
_SERIAL: Final = slice(14, 18)
_MAX_PAGE_BYTES: Final = 1 << 16
_OPUS_RATE: Final = re.compile(rb"(?s)OpusHead.{4}(.{4})")
_FULL_OPUS_RATE: Final = 48000
_FIRST_BYTES: Final = 512


def is_plain_ogg(read: Read, size: int, sampling_rate: int) -> bool:
    """Return True if libsndfile, which reports ``sampling_rate``, reads all of an Ogg file at the right rate.

    libsndfile reads only the first stream. A second stream is found by comparing the serial numbers of the first and
    last pages. If both streams have the same number, it is not found, because that would require reading all pages.
    Opus does not decode at every input rate, and libsndfile replaces an unsupported rate with the next supported one.
    """
    head, tail = read(0, _FIRST_BYTES), read(max(0, size - _MAX_PAGE_BYTES), _MAX_PAGE_BYTES)
    opus = _OPUS_RATE.search(head)
    if opus and sampling_rate not in (_FULL_OPUS_RATE, int.from_bytes(opus[1], "little")):
        return False
    last = tail.rfind(b"OggS")
    # If the file is truncated within the header of its last page, the serial number there is incomplete.
    return head.rfind(OGG_BEGIN) == 0 and last >= 0 and head[_SERIAL].startswith(tail[last:][_SERIAL])


def with_serial(stream: bytes, serial: int) -> bytes:
    """Return an Ogg file that libsndfile has written, with the serial number replaced in all pages.

    Encoders draw this number at random for multiplexing, so equal audio would otherwise be encoded to different files.
    """
    pages = [bytearray(page) for page in _iterate_pages(stream)]
    for page in pages:
        page[_SERIAL] = struct.pack("<I", serial)
        page[_CHECKSUM] = _checksum_of(page)
    assert sum(map(len, pages)) == len(stream), "libsndfile writes whole pages"
    return b"".join(pages)


def is_intact(stream: bytes) -> bool:
    """Return True if all pages are contiguous and have correct checksums; other data may follow them."""
    pages = list(_iterate_pages(stream))
    are_right = all(page[_CHECKSUM] == _checksum_of(page) for page in pages)
    return are_right and stream.find(b"OggS", sum(map(len, pages))) < 0


def _iterate_pages(stream: bytes) -> Iterator[bytes]:
    """Yield the contiguous pages from the start of a stream; the last one may be incomplete."""
    position = 0
    while size := page_bytes(stream, position):
        yield stream[position : position + size]
        position += size


def _checksum_of(page: bytes | bytearray) -> bytes:
    """Return the CRC-32 of a page with its checksum field set to zero.

    Ogg uses the polynomial 0x04c11db7 without reflection or inversion. Reverse the bits of each byte, compute zlib's
    fast CRC, undo its two inversions, and reverse the bits of the result.
    """
    bare = page[: _CHECKSUM.start] + bytes(4) + page[_CHECKSUM.stop :]
    reflected = zlib.crc32(bare.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return struct.pack("<I", int(f"{reflected:032b}"[::-1], 2))


def page_bytes(stream: bytes, position: int) -> int:
    """Return the size in bytes of the page at ``position``; 0 if there is no complete page header."""
    header = _PAGE.match(stream, position)
    if header is None:
        return 0
    num_segments = header[1][0]
    lacing = stream[header.end() : header.end() + num_segments]
    return 0 if len(lacing) < num_segments else len(header[0]) + num_segments + sum(lacing)
