"""Ogg (RFC 3533): what libsndfile does not tell of it, which is damaged or lost pages and streams behind the first."""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Final

from sharmill.audio.extent import Read

# The header of a page, without its table of segments, whose number it ends with.
_PAGE: Final = re.compile(rb"(?s)OggS\0.{21}(.)")
_CHECKSUM: Final = slice(22, 26)
_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
# A first page of an Ogg stream: version 0, and its flag.
OGG_BEGIN: Final = b"OggS\0\2"
_SERIAL: Final = slice(14, 18)
_MOST_PAGE_BYTES: Final = 1 << 16
_OPUS_RATE: Final = re.compile(rb"(?s)OpusHead.{4}(.{4})")
_FULL_OPUS_RATE: Final = 48000
_FIRST_BYTES: Final = 512


def is_plain_ogg(read: Read, size: int, sampling_rate: int) -> bool:
    """Return True if libsndfile, which states ``sampling_rate``, reads all of an Ogg file at the right rate.

    It reads one stream, which shows in the serial numbers of the first and last pages; streams of one serial number
    that lie one behind the other show in a look at all pages only. It takes an input rate of Opus at which Opus does
    not decode for the next one.
    """
    head, tail = read(0, _FIRST_BYTES), read(max(0, size - _MOST_PAGE_BYTES), _MOST_PAGE_BYTES)
    opus = _OPUS_RATE.search(head)
    if opus and sampling_rate not in (_FULL_OPUS_RATE, int.from_bytes(opus[1], "little")):
        return False
    last = tail.rfind(b"OggS")
    # A file that is cut off within the header of its last page has no serial number there.
    return head.rfind(OGG_BEGIN) == 0 and last >= 0 and head[_SERIAL].startswith(tail[last:][_SERIAL])


def with_serial(stream: bytes, serial: int) -> bytes:
    """Return Ogg that libsndfile has written with ``serial`` as the serial number of all pages.

    Encoders draw the number at random, for multiplexing; in a file of one stream it makes equal audio differ.
    """
    pages = [bytearray(page) for page in _iterate_pages(stream)]
    for page in pages:
        page[_SERIAL] = struct.pack("<I", serial)
        page[_CHECKSUM] = _checksum_of(page)
    assert sum(map(len, pages)) == len(stream), "libsndfile writes whole pages"
    return b"".join(pages)


def is_intact(stream: bytes) -> bool:
    """Return True for pages with right checksums, end to end; something that is no Ogg may follow."""
    pages = list(_iterate_pages(stream))
    are_right = all(page[_CHECKSUM] == _checksum_of(page) for page in pages)
    return are_right and stream.find(b"OggS", sum(map(len, pages))) < 0


def _iterate_pages(stream: bytes) -> Iterator[bytes]:
    """Yield the pages that follow each other from the begin of a stream on; the last one may be incomplete."""
    position = 0
    while size := page_bytes(stream, position):
        yield stream[position : position + size]
        position += size


def _checksum_of(page: bytes | bytearray) -> bytes:
    """Return the CRC-32 of a page, its own field being zero: polynomial 0x04c11db7, not reflected, no inversions.

    That is zlib's CRC of the bit-reversed bytes, its two inversions undone: computed in C.
    """
    bare = page[: _CHECKSUM.start] + bytes(4) + page[_CHECKSUM.stop :]
    reflected = zlib.crc32(bare.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return struct.pack("<I", int(f"{reflected:032b}"[::-1], 2))


def page_bytes(stream: bytes, position: int) -> int:
    """Return the size of the page that starts at ``position``, 0 where no whole page header is."""
    header = _PAGE.match(stream, position)
    if header is None:
        return 0
    num_segments = header[1][0]
    lacing = stream[header.end() : header.end() + num_segments]
    return 0 if len(lacing) < num_segments else len(header[0]) + num_segments + sum(lacing)
