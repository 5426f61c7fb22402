"""Byte sources for decoders: a file, a range of a file, or data in memory."""

import io
import os
from collections.abc import Hashable
from typing import BinaryIO, Final

import xxhash

_BLOCK_BYTES: Final = 1 << 20


class AudioBytes:
    """The bytes of an audio file: a whole file, a range of one, or data in memory.

    Args:
        name: the name to use in error messages.
        data: an open unbuffered file, or bytes.
        start: the first byte of the range.
        size: the number of bytes in the range; by default all of the data.
        head: bytes to put before the range, replacing a wrong header.
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
        # Decoders get a descriptor only for a whole file, since they would read beyond the limits of a range.
        self.descriptor = None if isinstance(self._data, bytes) or size is not None else self._data.fileno()
        if size is None:
            size = len(self._data) if isinstance(self._data, bytes) else os.fstat(self._data.fileno()).st_size
        self.size = len(head) + size

    def with_head(self, head: bytes, start: int, stop: int) -> "AudioBytes":
        """Return a source that consists of ``head`` followed by this source's bytes from ``start`` to ``stop``."""
        return AudioBytes(self.name, self._data, self._start + start, stop - start, head)

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        """Return up to ``size`` bytes from ``start``, without moving the position of any decoder."""
        size = min(self.size - start if size is None else size, self.size - start)
        if size <= 0:
            return b""
        first = self._head[start : start + size]
        position, size = self._start + max(0, start - len(self._head)), size - len(first)
        if isinstance(self._data, bytes):
            return first + self._data[position : position + size]
        descriptor = self._data.fileno()
        data = os.pread(descriptor, size, position)
        while 0 < len(data) < size:  # the system splits reads of more than 2 GiB
            more = os.pread(descriptor, size - len(data), position + len(data))
            if not more:
                break
            data += more
        return first + data if first else data

    @property
    def identity(self) -> Hashable:
        """A key for the content: inode, size and modification time of a file, or a checksum of data in memory."""
        if isinstance(self._data, bytes):
            return self.checksum()
        status = os.fstat(self._data.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, self._start, self.size, self._head

    def checksum(self) -> str:
        """Return the checksum of all bytes, as ``files.checksums.checksum`` computes it."""
        digest = xxhash.xxh3_64()
        for start in range(0, self.size, _BLOCK_BYTES):
            digest.update(self.read(start, _BLOCK_BYTES))
        return digest.hexdigest()

    def stream(self) -> BinaryIO:
        """Return a file object with its own position."""
        return io.BytesIO(self.read()) if isinstance(self._data, bytes) else io.BufferedReader(_Stream(self), 1 << 16)


class _Stream(io.RawIOBase):
    """A raw file object that reads ``AudioBytes``."""

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
