"""Audio files as decoders see them: the bytes, the header, and the methods that every decoder has."""

from __future__ import annotations

import io
import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Protocol

import numpy as np

from sharmill.files.storage import checksum_bytes

MIN_SAMPLING_RATE: Final = 1000  # below, no speech is left
MAX_SAMPLING_RATE: Final = 655350  # of FLAC
# No frame of MPEG audio, ADPCM or GSM holds more; beyond it a header is corrupt and must not size an array.
MAX_SAMPLES_PER_BYTE: Final = 100
# FLAC holds silence in next to nothing. More samples than these, 128 MiB of them, need bytes as well.
SAMPLES_IN_ANY_SIZE: Final = 1 << 25


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


class AudioBytes:
    """The bytes of an audio file: all of a file or a range of them, or data in memory.

    Args:
        name: what errors call it.
        data: an open file without a buffer, or bytes.
        start: of the range in the file.
        size: bytes of the range; by default all of the file.
    """

    def __init__(self, name: str, data: BinaryIO | bytes | memoryview, start: int = 0, size: int | None = None) -> None:
        self.name = name
        self._data = bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else data
        self._start = start
        self.is_whole_file = not isinstance(self._data, bytes) and size is None
        if size is None:
            size = len(self._data) if isinstance(self._data, bytes) else os.fstat(self._data.fileno()).st_size
        self.size = size

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes from ``start`` on, apart from the position of any decoder; fewer at the end."""
        size = min(self.size - start if size is None else size, self.size - start)
        if size <= 0:
            return b""
        if isinstance(self._data, bytes):
            return self._data[start : start + size]
        descriptor, position = self._data.fileno(), self._start + start
        data = os.pread(descriptor, size, position)
        while 0 < len(data) < size:  # a read of more than 2 GiB comes in parts
            more = os.pread(descriptor, size - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    @property
    def identity(self) -> Hashable:
        """Equal for the same bytes: of a file its number, size and time of change, of data a checksum."""
        if isinstance(self._data, bytes):
            return checksum_bytes(self._data)
        status = os.fstat(self._data.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, self._start, self.size

    def blocks(self, size: int = 1 << 20) -> Iterator[bytes]:
        """Yield all bytes, in blocks."""
        for start in range(0, self.size, size):
            yield self.read(start, size)

    @property
    def descriptor(self) -> int | None:
        """The descriptor of a whole file, whose position is the decoder's to move."""
        return self._data.fileno() if self.is_whole_file and not isinstance(self._data, bytes) else None

    def stream(self) -> BinaryIO:
        """Return a file object with a position of its own."""
        return io.BytesIO(self._data) if isinstance(self._data, bytes) else io.BufferedReader(_Stream(self), 1 << 16)


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

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._source.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class Decoder(Protocol):
    """An audio file that is open, and decoded from some sample on."""

    info: AudioInfo

    def seek(self, position: int) -> None:
        """Go on decoding at ``position``; only where ``info.exact_seeks``."""

    def read(self, num_samples: int) -> np.ndarray:
        """Return the next samples (num_samples,) or (num_samples, channels), fewer at the end.

        They are float32, or int16 in all reads of a file that holds 16 bits.
        """

    def check_end(self) -> None:
        """Raise RejectRecord where the file is damaged or cut off in a way that does not show in the samples."""

    def close(self) -> None:
        """Release what the decoder holds; the bytes stay open."""
