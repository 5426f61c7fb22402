"""Bytes that are made in one order and used in another: kept in memory up to a bound, beyond it in a temporary file."""

from __future__ import annotations

import os
import tempfile
from threading import Lock
from typing import IO, NamedTuple


class Kept(NamedTuple):
    """A place in a spool: the bytes themselves, or where they are in its file."""

    data: bytes | None
    start: int
    size: int


class Spool:
    """Bytes kept until they are taken out; several threads may use it.

    Its file lies in the folder for temporary files (TMPDIR) without a name, and goes with the process.

    Args:
        max_bytes: kept in memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = Lock()

    def put(self, data: bytes) -> Kept:
        """Keep bytes; returns what ``get`` and ``forget`` want for them."""
        with self._lock:
            if len(data) <= self._left:
                self._left -= len(data)
                return Kept(data, 0, len(data))
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sharmill-")  # noqa: SIM115 - open as long as this
            start, self._end = self._end, self._end + len(data)
            descriptor = self._file.fileno()
        view = memoryview(data)
        while view:  # a write of more than 2 GiB goes in parts
            view = view[os.pwrite(descriptor, view, start + len(data) - len(view)) :]
        return Kept(None, start, len(data))

    def get(self, kept: Kept) -> bytes:
        """Return bytes that were kept."""
        if kept.data is not None:
            return kept.data
        assert self._file is not None
        data = os.pread(self._file.fileno(), kept.size, kept.start)
        assert len(data) == kept.size, "the file of a spool is its own"
        return data

    def forget(self, kept: Kept) -> None:
        """Make room in memory for as many bytes; the file only grows."""
        if kept.data is not None:
            with self._lock:
                self._left += kept.size
