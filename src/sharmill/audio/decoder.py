"""Audio files: their bytes, their headers, what every decoder does, and decoding and encoding through libsndfile.

libsndfile knows WAV, FLAC, MP3, Ogg and others, by content. Beside it what it does not tell: the number of samples of
an MP3 without a header that states it, and damaged or lost pages of Ogg (RFC 3533). ``ffmpeg.py`` decodes the rest.
"""

import io
import math
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import numpy as np
import soundfile as sf
import xxhash

from sharmill.audio.extent import (
    OGG_BEGIN,
    OGG_SERIAL,
    STREAMED_BYTES,
    count_mpeg_samples,
    is_plain_ogg,
)
from sharmill.errors import RejectRecord, refuse, refuse_record

MIN_SAMPLING_RATE: Final = 1000  # below, no speech is left
MAX_SAMPLING_RATE: Final = 655350  # of FLAC
# No frame of MPEG audio, ADPCM or GSM holds more; beyond it a header is corrupt and must not size an array.
MAX_SAMPLES_PER_BYTE: Final = 100
# FLAC holds silence in next to nothing. More samples than these, 128 MiB of them, need bytes as well.
SAMPLES_IN_ANY_SIZE: Final = 1 << 25
_BLOCK_BYTES: Final = 1 << 20
_FULL_SCALE: Final = 1 << 15

# Our names where they are not libsndfile's format in lower case.
_OTHER_NAMES: Final = {"OPUS": "opus", "WAVEX": "wav"}

# Subtypes without memory between samples: a seek lands on the same values as a decode from the start.
_MEMORYLESS: Final = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_UNKNOWN_LENGTH: Final = (1 << 63) - 1  # libsndfile's SF_COUNT_MAX
# libsndfile shortens a chunk that goes beyond the end of the file, and says so only in its log.
_SHORTENED_CHUNK: Final = re.compile(
    r"^\s*(?:data|SSND|Data Size|Riff size|riff)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE
)
# The size of the header of an Ogg page, without its table of segments.
_HEADER_BYTES: Final = 27
_CHECKSUM: Final = slice(22, 26)
_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

_FLAC_BEGIN: Final = b"fLaC\0\0\0\x22"

# Our name -> libsndfile's format and subtype, and the sampling rates that can be written (None: any).
_ENCODINGS: Final[dict[str, tuple[str, str, tuple[int, ...] | None]]] = {
    "flac": ("FLAC", "PCM_16", None),
    "wav": ("WAV", "PCM_16", None),
    "mp3": ("MP3", "MPEG_LAYER_III", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("OGG", "OPUS", (8000, 12000, 16000, 24000, 48000)),
}
ENCODERS: Final[tuple[str, ...]] = tuple(_ENCODINGS)
_OGG_SERIAL: Final = 1
_FLAC_MAX_ANY_RATE: Final = 65535  # beyond, only multiples of 10 Hz


@dataclass(frozen=True)
class AudioInfo:
    """The header of an audio file.

    Args:
        sampling_rate: in Hz.
        num_samples: per channel.
        channels: number of channels.
        format: "flac", "wav", "mp3", "opus", "ogg" (Vorbis), "aiff", "aac", ...: by content.
        exact_seeks: a part decodes to the same samples wherever the decoder starts, on every kind of CPU.
        common: libsndfile reads it, and so does every tool that is made of it; of others only the samples are stored.
    """

    sampling_rate: int
    num_samples: int
    channels: int
    format: str
    exact_seeks: bool = field(default=True, compare=False)
    common: bool = field(default=True, compare=False)


def flac_header(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """Return samples, channels and rate of a FLAC by STREAMINFO, its first block; None for anything else."""
    head = bytes(data[:42])
    # A block of type 0 and 34 bytes; the bit above the type says whether it is the last.
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 127 or head[5:8] != b"\0\0\x22":
        return None
    # The header has 20 bits of rate, 3 of channels, 5 of depth, 36 of samples. libsndfile would take longer per item.
    bits = int.from_bytes(head[18:26], "big")
    # 0 samples is an unknown number of them, which libsndfile takes for all that there can be.
    return bits & (1 << 36) - 1 or 1 << 63, (bits >> 41 & 7) + 1, bits >> 44 or 1


class AudioBytes:
    """The bytes of an audio file: all of a file or a range of them, or data in memory.

    Args:
        name: what errors call it.
        data: an open file without a buffer, or bytes.
        start: of the range in the data.
        size: bytes of the range; by default all of the data.
        head: bytes in front of the range, in place of a header that is wrong.
    """

    def __init__(
        self,
        name: str,
        data: BinaryIO | bytes | memoryview,
        start: int = 0,
        size: int | None = None,
        head: bytes = b"",
    ) -> None:
        self.name = name
        self._data = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else data
        self._start = start
        self._head = head
        # Only a whole file has a descriptor, since the decoder moves its position.
        self.descriptor = None if isinstance(self._data, bytes) or size is not None else self._data.fileno()
        if size is None:
            size = len(self._data) if isinstance(self._data, bytes) else os.fstat(self._data.fileno()).st_size
        self.size = len(head) + size

    def with_head(self, head: bytes, start: int, stop: int) -> "AudioBytes":
        """Return the bytes from ``start`` to ``stop`` behind ``head``."""
        return AudioBytes(self.name, self._data, self._start + start, stop - start, head)

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes from ``start`` on, apart from the position of any decoder; fewer at the end."""
        size = min(self.size - start if size is None else size, self.size - start)
        if size <= 0:
            return b""
        first = self._head[start : start + size]
        position, size = self._start + max(0, start - len(self._head)), size - len(first)
        if isinstance(self._data, bytes):
            return first + self._data[position : position + size]
        descriptor = self._data.fileno()
        data = os.pread(descriptor, size, position)
        while 0 < len(data) < size:  # a read of more than 2 GiB comes in parts
            more = os.pread(descriptor, size - len(data), position + len(data))
            if not more:
                break
            data += more
        return first + data if first else data

    @property
    def identity(self) -> Hashable:
        """Equal for the same bytes: of a file its number, size and time of change, of data a checksum."""
        if isinstance(self._data, bytes):
            return self.checksum()
        status = os.fstat(self._data.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, self._start, self.size, self._head

    def checksum(self) -> str:
        """Return the checksum of all bytes, as ``files.checksums.checksum``."""
        digest = xxhash.xxh3_64()
        for start in range(0, self.size, _BLOCK_BYTES):
            digest.update(self.read(start, _BLOCK_BYTES))
        return digest.hexdigest()

    def stream(self) -> BinaryIO:
        """Return a file object with a position of its own."""
        return io.BytesIO(self.read()) if isinstance(self._data, bytes) else io.BufferedReader(_Stream(self), 1 << 16)


class _Stream(io.RawIOBase):
    """A file object over ``AudioBytes``."""

    def __init__(self, source: AudioBytes) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._source.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class Decoder(ABC):
    """An audio file that is open, and decoded from some sample on."""

    info: AudioInfo

    def seek(self, position: int) -> None:  # noqa: B027 - not every decoder has exact seeks
        """Go on decoding at ``position``; only where ``info.exact_seeks``."""

    @abstractmethod
    def read(self, num_samples: int) -> np.ndarray:
        """Return the next samples (num_samples,) or (num_samples, channels), fewer at the end.

        They are float32, or int16 in all reads of a file that holds 16 bits.
        """

    def check_end(self) -> None:  # noqa: B027 - of most, all damage shows in the samples or their number
        """Raise RejectRecord where the file is damaged or cut off in a way that does not show in the samples."""

    @abstractmethod
    def close(self) -> None:
        """Release what the decoder holds; the bytes stay open."""


def to_float(samples: np.ndarray) -> np.ndarray:
    """Return samples of any shape as float32, without a change of value; floats are returned as they are."""
    if samples.dtype != np.int16:
        return samples
    # In less time than one multiplication that converts as it goes.
    floats = samples.astype(np.float32)
    floats *= np.float32(1 / _FULL_SCALE)
    return floats


def _to_int16(samples: np.ndarray) -> np.ndarray:
    """Return floats clipped and rounded to 16 bits as libsndfile does for FLAC, in less time than it takes itself."""
    scaled = np.clip(samples, -1.0, 1.0, dtype=np.float32)
    scaled *= np.float32(_FULL_SCALE)
    np.rint(scaled, out=scaled)
    return np.minimum(scaled, _FULL_SCALE - 1, out=scaled).astype(np.int16)


def check_finite(audio: np.ndarray, name: str) -> None:
    """Raise RejectRecord ``non_finite_audio`` where samples are NaN or infinite."""
    # The extremes are NaN where any sample is, and cost less than an array of answers.
    is_finite = not len(audio) or (math.isfinite(audio.min()) and math.isfinite(audio.max()))
    refuse_record((not is_finite, "non_finite_audio", f"{name} has NaN or infinite samples"))


class SndfileDecoder(Decoder):
    """An audio file that libsndfile has opened.

    Raises:
        RejectRecord: unreadable_audio (libsndfile cannot open it), duration_mismatch (it holds more than it states).
    """

    def __init__(self, source: AudioBytes) -> None:
        self._source = source
        # Not the path: libsndfile takes anything called .raw, .vox, .gsm or .au for audio.
        descriptor = source.descriptor
        if descriptor is not None:
            os.lseek(descriptor, 0, os.SEEK_SET)  # where another decoder has left it
        with _rejecting(source.name):
            sound = _ForwardSound(source.stream() if descriptor is None else descriptor, closefd=False)
        # Once: soundfile looks each up in its tables.
        num_samples, kind, subtype = sound.frames, sound.format, sound.subtype
        exact = kind == "FLAC" or subtype in _MEMORYLESS
        # A demuxer of FFmpeg that reads all of the audio, where libsndfile reads a part of it.
        self.demuxer = ""
        # Places of the streams that lie one behind the other, of which libsndfile reads the first.
        self.starts: list[int] = []
        if num_samples == _UNKNOWN_LENGTH or subtype in ("MPEG_LAYER_I", "MPEG_LAYER_II"):
            num_samples, self.demuxer = 0, "flac" if kind == "FLAC" else "mp3"
        elif subtype.startswith("MPEG"):
            num_samples, self.starts = count_mpeg_samples(source.read, source.size, source.name, sound.frames)
            self.demuxer = "mp3" if num_samples > sound.frames or len(self.starts) > 1 else ""
        elif kind == "OGG" and not is_plain_ogg(source.read, source.size, sound.samplerate):
            self.demuxer = "ogg"
        # libsndfile takes several times as long for floats of them.
        self._dtype = "int16" if subtype == "PCM_16" else "float32"
        # Ogg states its length in its last page, so that it cannot be wrong by much.
        is_bounded = not exact and kind not in ("OGG", "FLAC")
        is_possible = not is_bounded or num_samples <= source.size * MAX_SAMPLES_PER_BYTE
        detail = f"{source.name}: {source.size} bytes cannot hold {num_samples} samples"
        refuse_record((not is_possible, "unreadable_audio", detail))
        format = _OTHER_NAMES.get(subtype) or _OTHER_NAMES.get(kind) or kind.lower()
        self.info = AudioInfo(sound.samplerate, num_samples, sound.channels, format, exact)
        self._sound = sound
        self._sought = False

    def seek(self, position: int) -> None:
        with _rejecting(self._source.name):
            self._sound.seek(position)
        self._sought = True

    def read(self, num_samples: int) -> np.ndarray:
        if not self._sought and sf.SoundFile.seekable(self._sound):  # GSM in WAV is not
            # MP3 decodes to other last bits without it, and soundfile.read does it. It decodes: not for a header alone.
            self.seek(0)
        with _rejecting(self._source.name):
            return self._sound.read(num_samples, dtype=self._dtype)

    def check_end(self) -> None:
        """Raise RejectRecord for what libsndfile passes over: an early end, lost pages in Ogg, more than is stated."""
        name = self._source.name
        if self._sound.format == "OGG":
            stream = self._source.read()
            last = stream.rfind(b"OggS")
            size = _page_bytes(stream, last)
            cut_off = last >= 0 and (size == 0 or last + size > len(stream))
            has_several = stream.find(OGG_BEGIN, 1) >= 0
            is_damaged = not cut_off and not is_intact(stream)
            refuse_record(
                (has_several, "unreadable_audio", f"{name} has several Ogg streams under one serial number"),
                (is_damaged, "unreadable_audio", f"{name}: a page of the Ogg stream is damaged"),
            )
        elif self._sound.format == "FLAC":
            cut_off = False  # shows in decoding
            is_longer = _has_unstated_flac(self._source.read(), self.info.num_samples)
            refuse_record((is_longer, "duration_mismatch", f"{name} holds more audio than its header states"))
        else:
            sizes = (map(int, pair) for pair in _SHORTENED_CHUNK.findall(self._sound.extra_info))
            cut_off = any(found < declared < STREAMED_BYTES for declared, found in sizes)
        refuse_record((cut_off, "duration_mismatch", f"{name} ends before its header says"))

    def close(self) -> None:
        self._sound.close()


def _has_unstated_flac(data: bytes, num_samples: int) -> bool:
    """Return True if FLAC has more than the samples that it states, or another FLAC behind it."""
    if data.rfind(_FLAC_BEGIN) > 0:  # from the end, which takes a quarter of the time
        return True
    # If the header states no number, libsndfile finds the sample behind the last one, if there is any.
    unstated = data[:21] + bytes((data[21] & 0xF0,)) + bytes(4) + data[26:]
    try:
        with sf.SoundFile(io.BytesIO(unstated)) as sound:
            sound.seek(num_samples)
    except sf.LibsndfileError:
        return False
    return True


class _ForwardSound(sf.SoundFile):
    """A SoundFile whose reads follow each other without seeks between them, after which MP3 decodes to other values."""

    def seekable(self) -> bool:
        return False


@contextmanager
def _rejecting(name: str) -> Iterator[None]:
    try:
        yield
    except sf.LibsndfileError as error:
        # Not str(error), which may hold the address of an object.
        reason = error.error_string
        if reason.startswith(("Unspecified internal error", "File does not exist")):  # as libsndfile has it of MP3
            reason = "it is damaged, so that libsndfile cannot decode it"
        raise RejectRecord("unreadable_audio", f"{name}: {reason}") from None


def with_serial(stream: bytes, serial: int) -> bytes:
    """Return Ogg that libsndfile has written with ``serial`` as the serial number of all pages.

    Encoders draw the number at random, for multiplexing; in a file of one stream it makes equal audio differ.
    """
    pages = [bytearray(page) for page in _iterate_pages(stream)]
    for page in pages:
        page[OGG_SERIAL] = struct.pack("<I", serial)
        page[_CHECKSUM] = _checksum_of(page)
    assert sum(map(len, pages)) == len(stream), "libsndfile writes whole pages"
    return b"".join(pages)


def is_intact(stream: bytes) -> bool:
    """Return True for pages with right checksums, end to end; something that is no Ogg may follow."""
    end = 0
    for page in _iterate_pages(stream):
        if page[_CHECKSUM] != _checksum_of(page):
            return False
        end += len(page)
    return stream.find(b"OggS", end) < 0


def _iterate_pages(stream: bytes) -> Iterator[bytes]:
    """Yield the pages that follow each other from the begin of a stream on; the last one may be incomplete."""
    position = 0
    while size := _page_bytes(stream, position):
        yield stream[position : position + size]
        position += size


def _checksum_of(page: bytes | bytearray) -> bytes:
    """Return the CRC-32 of a page, its own field being zero: polynomial 0x04c11db7, not reflected, no inversions.

    That is zlib's CRC of the bit-reversed bytes, its two inversions undone: computed in C.
    """
    bare = page[: _CHECKSUM.start] + bytes(4) + page[_CHECKSUM.stop :]
    reflected = zlib.crc32(bare.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return struct.pack("<I", int(f"{reflected:032b}"[::-1], 2))


def _page_bytes(stream: bytes, position: int) -> int:
    """Return the size of the page that starts at ``position``, 0 where no whole page header is."""
    header = stream[position : position + _HEADER_BYTES]
    if len(header) < _HEADER_BYTES or header[:5] != b"OggS\0":
        return 0
    num_segments = header[26]
    first_segment = position + _HEADER_BYTES
    lacing = stream[first_segment : first_segment + num_segments]
    return 0 if len(lacing) < num_segments else _HEADER_BYTES + num_segments + sum(lacing)


def encoder_problem(format: str, sampling_rate: int) -> str:
    """Return why ``encode`` cannot write a format at a rate, and what to set instead; "" where it can."""
    if format not in _ENCODINGS:
        return f"audio format {format!r} cannot be written; choose one of {', '.join(ENCODERS)}"
    rates, cannot = _ENCODINGS[format][2], f"{format} cannot hold audio at {sampling_rate} Hz: set sampling_rate"
    if rates is not None and sampling_rate not in rates:
        return f"{cannot} to one of {', '.join(map(str, rates))}, or audio_format to flac"
    if format == "flac" and sampling_rate > _FLAC_MAX_ANY_RATE and sampling_rate % 10:
        return f"{cannot}, or audio_format to wav"
    return ""


def check_encoder(format: str, sampling_rate: int) -> None:
    """Raise ConfigError, before any work, unless ``encode`` can write this format at this rate."""
    problem = encoder_problem(format, sampling_rate)
    refuse((problem, problem))


def count_clipped(audio: np.ndarray) -> int:
    """Return how many samples of ``audio`` (samples,) are beyond full scale, so that ``encode`` clips them."""
    # The extremes tell that there are none, as mostly, in less time than a look at all samples.
    has_any = audio.dtype != np.int16 and max(audio.max(initial=0), -audio.min(initial=0)) > 1
    return int(np.count_nonzero(np.abs(audio) > 1)) if has_any else 0


def encode(audio: np.ndarray, sampling_rate: int, format: str, compression: float | None = None) -> bytes:
    """Encode mono ``audio`` (samples,) as one of ``ENCODERS``: int16, or floats, which are clipped to [-1, 1].

    Same samples, same bytes, in every process and at every time (one build of libsndfile, one kind of CPU).
    flac and wav hold 16 bits: what was decoded from 16 bits comes back exactly, and int16 gives the bytes that the
    same values as floats give. All four keep rate and number
    of samples as ``probe_bytes`` and ``decode_bytes`` report them: mp3 by the delays in its Info frame, opus by
    pre-skip and last granule position. Their bit rates are libsndfile's: variable, for speech at 16, 24 and 48 kHz
    about 43, 55 and 68 kbit/s (mp3) and 28, 37 and 62 kbit/s (opus).
    Other readers may find more samples (mp3) or 48 kHz (opus). ``compression``, from 0 to 1, is libsndfile's level.

    Raises:
        ConfigError: unknown format, or a sampling rate that it cannot hold.
        RejectRecord: empty_audio, non_finite_audio.
        ValueError: ``audio`` is not one-dimensional.
    """
    check_encoder(format, sampling_rate)
    if audio.ndim != 1:
        raise ValueError(f"expected audio of shape (samples,), got {audio.shape}")
    refuse_record((len(audio) == 0, "empty_audio", "there are no samples to encode"))
    container, subtype, _ = _ENCODINGS[format]
    if audio.dtype == np.int16:
        stored = audio if subtype == "PCM_16" else to_float(audio)
    else:
        check_finite(audio, "audio to encode")
        # libsndfile clips for the 16-bit formats only; MP3 and Opus would keep the overshoot.
        stored = _to_int16(audio) if format == "flac" else np.clip(np.asarray(audio, dtype=np.float32), -1.0, 1.0)
    buffer = io.BytesIO()
    sf.write(buffer, stored, sampling_rate, format=container, subtype=subtype, compression_level=compression)
    data = buffer.getvalue()
    return with_serial(data, _OGG_SERIAL) if container == "OGG" else data
