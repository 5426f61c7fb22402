"""The extent of a recording: whether the header of a file states all of the audio that the file holds.

libsndfile believes headers. For each container that it reads, its header is compared with the file, without reading the
audio if that is possible. Tags, padding and chunks of metadata behind the audio are no audio.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Final

from sharmill.errors import RejectRecord, refuse_record

Read = Callable[[int, int], bytes]

# Writers to a pipe leave 0xFFFFFFFF (ffmpeg) or 0x7FFFF000 (sox) for a size that they cannot know.
STREAMED_BYTES: Final = 0x7FFF0000
_BLOCK_BYTES: Final = 1 << 20
_TAGS: Final = (b"ID3", b"TAG", b"APET", b"LYRI")
_ID3: Final = (b"ID3\2", b"ID3\3", b"ID3\4")
_ID3_SHIFTS: Final = (21, 14, 7, 0)
# Magic bytes -> the first chunk, the form of a chunk's header, and the name of the chunk of samples.
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
_MOST_BYTES: Final = 1 << 48  # beyond, it is the -1 of a writer that cannot know it
# Bytes of a chunk of samples that has none: SSND has two numbers, data in CAF one.
_EMPTY_BYTES: Final = 8
_GARBAGE_BYTES: Final = 512
# Chunks behind the samples that tools leave cut off.
_METADATA: Final = (b"LIST", b"id3 ", b"ID3 ")
# With the flags of a number of frames and one of bytes.
_XING: Final = re.compile(rb"(?s)(?:Xing|Info)...[\x03\x07\x0b\x0f].{4}(.{4})")
_TAG_FRAME: Final = re.compile(rb"Xing|Info|VBRI")
# Bit rates of layer III in kbit/s by index, for other versions and for MPEG 1; sampling rates by the version bits.
_FRAME_HEADER: Final = 4
_KBPS: Final = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}


def skip_tags(read: Read, position: int) -> int:
    """Return the place behind the tags (ID3, APE, Lyrics3) and zeros that begin at a place, perhaps beyond the file."""
    while head := read(position, 32):
        if head.startswith(_ID3) and len(head) > 9:  # 28 bits of size, and a footer if flagged
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
    """Return how all samples of a file made of chunks, or an AU, are read if the header states less.

    Returns:
        A head by which libsndfile reads up to the end, and first and last byte of the samples to put behind it. The
        head is empty if the file is read as it is, and for all other formats.

    Raises:
        RejectRecord: duration_mismatch, if something else than chunks and tags follows the samples.
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
    # So little is no speech, whatever it is.
    if stated < _MOST_BYTES and size - end <= min(_GARBAGE_BYTES, stated // 100):
        return b"", 0, 0
    is_unknown = stated <= _EMPTY_BYTES or stated >= STREAMED_BYTES
    # Sizes of 32 bits begin at 0 again beyond 4 GiB.
    ends = (end + (turns << 32) for turns in range((size - end) >> 32, -1, -1))
    stop = next((stop for stop in ends if _is_no_audio(read, size, stop, form, samples)), 0)
    if stop == end:
        return b"", 0, 0
    detail = f"{name} has {size - end:,} bytes behind the audio that its header states"
    refuse_record((not stop and not is_unknown, "duration_mismatch", detail))
    stop = stop or size
    return _endless_head(magic, read(0, start), stop - start), start, stop


def _endless_head(magic: bytes, head: bytes, num_bytes: int) -> bytes:
    """Return what is in front of the samples, with sizes for which libsndfile reads up to the end of the file."""
    if magic == b".snd":
        return head[:8] + b"\xff" * 4 + head[12:]
    if magic == b"caff":
        return head[:-8] + struct.pack(">Q", num_bytes)
    return struct.pack(_CHUNKS[magic][1], magic.replace(b"RF64", b"RIFF"), 8) + head[8:-4] + bytes(4)


def _is_no_audio(read: Read, size: int, end: int, form: str, samples: bytes) -> bool:
    """Return True if nothing but tags, padding and other chunks than that of the samples follows from a place on."""
    for chunk, start, length in _chunks(read, size, end, form):
        if chunk == samples or chunk in _CHUNKS:
            return False
        if start + length > size:
            return chunk in _METADATA
    return True


def _chunks(read: Read, size: int, position: int, form: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, first byte and number of bytes of the chunks that follow from a place on; tags are passed over."""
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
    """Return the samples in an MP3, and the places at which streams begin if several lie one behind the other.

    The number is libsndfile's if a Xing or Info frame states it for all of the file, else counted. Without such a frame
    libsndfile extrapolates from the size of the first: wrong by a frame or so at a constant bit rate, by any factor at
    a variable one. A number above its own means that it reads a part only.
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
            if found:  # something else, which FFmpeg passes over
                break
            raise RejectRecord("unreadable_audio", f"{name}: no MPEG frame where one should begin")
        if kind != last or _TAG_FRAME.search(data, position + 13, position + 40):
            starts.append(position)
        position, last = position + num_bytes, kind
        counted += samples if position <= size else 0  # the last frame may be incomplete
    return (max(counted, estimate + 1) if found else counted), starts


def _read_frame_header(header: bytes) -> tuple[int, int, bytes]:
    """Return bytes, samples per channel and kind of the layer III frame with this 4-byte header; 0 bytes if it is none.

    Kind are version, rate and mono or not: all that must not change.
    """
    version, layer = (header[1] >> 3) & 3, (header[1] >> 1) & 3
    kbps, rate = header[2] >> 4, (header[2] >> 2) & 3
    if header[0] != 0xFF or header[1] < 0xE0 or version == 1 or layer != 1 or kbps in (0, 15) or rate == 3:
        return 0, 0, b""
    samples = 1152 if version == 3 else 576
    size = samples // 8 * _KBPS[version == 3][kbps - 1] * 1000 // _RATES[version][rate] + ((header[2] >> 1) & 1)
    return size, samples, bytes((version, rate, header[3] >> 6 == 3))
