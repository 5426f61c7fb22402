"""Checks that the header of an audio file covers all audio in the file.

libsndfile trusts headers. For each container that libsndfile reads, this module compares the header with the rest of
the file, and reads the audio only if necessary. Tags, padding and metadata chunks after the audio do not count as
audio.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Final

from sharmill.errors import RejectRecord, refuse_record

Read = Callable[[int, int], bytes]

# A stated size of at least this many bytes means that the true size is unknown: a program that writes to a pipe states
# 0xFFFFFFFF (ffmpeg) or 0x7FFFF000 (sox).
STREAMED_BYTES: Final = 0x7FFF0000
_BLOCK_BYTES: Final = 1 << 20
_TAGS: Final = (b"ID3", b"TAG", b"APET", b"LYRI")
_ID3: Final = (b"ID3\2", b"ID3\3", b"ID3\4")
_ID3_SHIFTS: Final = (21, 14, 7, 0)
# Magic bytes -> position of the first chunk, struct format of a chunk header, and name of the chunk with the samples.
_CHUNKS: Final = {
    b"RIFF": (12, "<4sI", b"data"),
    b"RF64": (12, "<4sI", b"data"),
    b"RIFX": (12, ">4sI", b"data"),
    b"FORM": (12, ">4sI", b"SSND"),
    b"caff": (8, ">4sQ", b"data"),
    b".snd": (0, ">4sI", b""),
}
_CHUNK_NAME: Final = re.compile(rb"[ -~]{4}")
_UNKNOWN_BYTES: Final = 0xFFFFFFFF
_MAX_STATED_BYTES: Final = 1 << 48  # a larger number is -1 from a writer that did not know the size
# A chunk of at most this many bytes contains no samples: an SSND chunk begins with two numbers, and a data chunk of CAF
# with one.
_EMPTY_BYTES: Final = 8
_GARBAGE_BYTES: Final = 512
# Metadata chunks that may follow the samples, and that some tools write incompletely.
_METADATA: Final = (b"LIST", b"id3 ", b"ID3 ")
# An MP3 tag frame whose flags say that it states the numbers of frames and of bytes.
_XING: Final = re.compile(rb"(?s)(?:Xing|Info)...[\x03\x07\x0b\x0f].{4}(.{4})")
_TAG_FRAME: Final = re.compile(rb"Xing|Info|VBRI")
# Bit rates of layer III in kbit/s by index, for MPEG 1 (True) and other versions (False); sampling rates in Hz by
# version bits.
_FRAME_HEADER: Final = 4
_KBPS: Final = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}


def skip_tags(read: Read, position: int) -> int:
    """Return the position after the tags (ID3, APE, Lyrics3) and zeros at ``position``; it may exceed the file size."""
    while head := read(position, 32):
        if head.startswith(_ID3) and len(head) > 9:  # the size has 28 bits; a flag announces a footer
            size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], _ID3_SHIFTS, strict=True))
            position += 10 + size + (head[5] & 0x10 and 10)
        elif head.startswith(b"APETAGEX"):
            position += 32 + int.from_bytes(head[12:16], "little")
        elif head.startswith(b"LYRICSBEGIN"):
            position += max(0, read(position, _BLOCK_BYTES).find(b"LYRICS200")) + 9
        elif head.startswith(b"TAG"):
            position += 128
        elif head.startswith(b"\0"):
            zeros = read(position, _BLOCK_BYTES)
            position += len(zeros) - len(zeros.lstrip(b"\0"))
        else:
            break
    return position


def check_chunks(read: Read, size: int, name: str) -> tuple[bytes, int, int]:
    """Return how libsndfile can read all samples of a chunked file or AU file whose header states too few.

    Returns:
        A new header that makes libsndfile read all samples, and the positions in the file where the samples to put
        after this header begin and end. The header is empty if the file can be read as it is or has another format.

    Raises:
        RejectRecord: duration_mismatch, if anything but chunks and tags follows the samples.
    """
    magic = read(0, 4)
    if magic not in _CHUNKS:
        return b"", 0, 0
    first, form, samples = _CHUNKS[magic]
    found = (chunk for chunk in _chunks(read, size, first, form) if chunk[0] == samples)
    _, start, stated = next(found, (b"", size, 0))
    if magic == b".snd":
        start, stated = struct.unpack(">II", read(4, 8).ljust(8))
    elif magic == b"RF64" and stated == _UNKNOWN_BYTES:
        stated = int.from_bytes(read(28, 8), "little")
    end = start + stated
    # The few bytes after the samples cannot be speech.
    if stated < _MAX_STATED_BYTES and size - end <= min(_GARBAGE_BYTES, stated // 100):
        return b"", 0, 0
    is_unknown = stated <= _EMPTY_BYTES or stated >= STREAMED_BYTES
    # A 32-bit size wraps around at 4 GiB, so try every possible end, the largest first.
    ends = (end + (turns << 32) for turns in range((size - end) >> 32, -1, -1))
    stop = next((stop for stop in ends if _is_free_of_audio(read, size, stop, form, samples)), 0)
    if stop == end:
        return b"", 0, 0
    detail = f"{name} has {size - end:,} bytes after the audio that its header states"
    refuse_record((not stop and not is_unknown, "duration_mismatch", detail))
    stop = stop or size
    return _endless_head(magic, read(0, start), stop - start), start, stop


def _endless_head(magic: bytes, head: bytes, num_bytes: int) -> bytes:
    """Return the bytes before the samples, with sizes that make libsndfile read up to the end of the file."""
    if magic == b".snd":
        return head[:8] + b"\xff" * 4 + head[12:]
    if magic == b"caff":
        return head[:-8] + struct.pack(">Q", num_bytes)
    return struct.pack(_CHUNKS[magic][1], magic.replace(b"RF64", b"RIFF"), 8) + head[8:-4] + bytes(4)


def _is_free_of_audio(read: Read, size: int, end: int, form: str, samples: bytes) -> bool:
    """Return True if only tags, padding and chunks without samples follow ``end``."""
    for chunk, start, length in _chunks(read, size, end, form):
        if chunk == samples or chunk in _CHUNKS:
            return False
        if start + length > size:
            return chunk in _METADATA
    return True


def _chunks(read: Read, size: int, position: int, form: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, first byte and size of each chunk from ``position`` on; skip tags between chunks."""
    header = struct.calcsize(form)
    while position + header <= size:
        chunk, length = struct.unpack(form, read(position, header))
        if not _CHUNK_NAME.fullmatch(chunk) or chunk.startswith(_TAGS):
            position, before = skip_tags(read, position), position
            if position != before:
                continue
        position += header + length
        yield chunk, position - length, length


def count_mpeg_samples(read: Read, size: int, name: str, estimate: int) -> tuple[int, list[int]]:
    """Return the number of samples in an MP3, and the positions at which its concatenated streams begin.

    If a Xing or Info frame covers the whole file, the number is libsndfile's ``estimate``, and the list of positions is
    empty. Otherwise the frames are counted. Without such a frame, libsndfile extrapolates from the size of the first
    frame, which is wrong by about one frame at a constant bit rate, and by any factor at a variable bit rate. If the
    result exceeds ``estimate``, libsndfile reads only a part of the file.
    """
    first = skip_tags(read, 0)
    found = _XING.search(read(first, 256))
    if found and skip_tags(read, first + int.from_bytes(found[1], "big")) + _FRAME_HEADER > size:
        return estimate, []
    data, position, counted, last, starts = read(0, size), first, 0, b"", []
    while position + _FRAME_HEADER <= size:
        num_bytes, samples, kind = _read_frame_header(data[position : position + _FRAME_HEADER])
        if num_bytes == 0:
            position, before = skip_tags(read, position), position
            if position != before:
                continue
            if found:  # the bytes are not a frame; FFmpeg skips them
                break
            raise RejectRecord("unreadable_audio", f"{name}: no MPEG frame where one should begin")
        if kind != last or _TAG_FRAME.search(data, position + 13, position + 40):
            starts.append(position)
        position, last = position + num_bytes, kind
        counted += samples if position <= size else 0  # an incomplete last frame does not count
    return (max(counted, estimate + 1) if found else counted), starts


def _read_frame_header(header: bytes) -> tuple[int, int, bytes]:
    """Return the size in bytes, the samples per channel and the kind of a layer III frame, given its 4-byte header.

    The kind (MPEG version, sampling rate, and whether the audio is mono) must not change within a stream. The size is 0
    if the bytes are not such a header.
    """
    version, layer = (header[1] >> 3) & 3, (header[1] >> 1) & 3
    kbps, rate = header[2] >> 4, (header[2] >> 2) & 3
    if header[0] != 0xFF or header[1] < 0xE0 or version == 1 or layer != 1 or kbps in (0, 15) or rate == 3:
        return 0, 0, b""
    samples = 1152 if version == 3 else 576
    size = samples // 8 * _KBPS[version == 3][kbps - 1] * 1000 // _RATES[version][rate] + ((header[2] >> 1) & 1)
    return size, samples, bytes((version, rate, header[3] >> 6 == 3))
