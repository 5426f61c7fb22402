"""Records that one process appends to its own file while others read them (``.jsonl``)."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from sharmill.files.atomic import fsync
from sharmill.files.disk import stopping_errors
from sharmill.files.stored import MAX_BYTES, NOT_JSON, open_stored

log = logging.getLogger(__name__)
Decoded = TypeVar("Decoded")


class RecordLog:
    """Appends records as JSON lines to a file that no other process writes to.

    Args:
        path: path of the file; its folder exists as long as the plan is current.
        is_torn: True if the file may end with a partial line from a killed process.

    Attributes:
        size: size of the file in bytes after the last write of this process.
    """

    def __init__(self, path: Path, *, is_torn: bool = False) -> None:
        self.path = path
        self.size = 0
        self._is_torn = is_torn

    def append(self, record: msgspec.Struct, *, synced: bool = False) -> None:
        """Append a record. When this returns, the record is in the file and, with ``synced``, durably on disk.

        Raises:
            FatalError: the record cannot be written.
        """
        # Start on a new line if a failed write or a killed process may have left a partial line.
        line = (b"\n" if self._is_torn else b"") + msgspec.json.encode(record) + b"\n"
        self._is_torn = True
        with stopping_errors(self.path), open_stored(self.path, append=True) as stream:
            stream.write(line)
            if synced:
                stream.flush()
                os.fsync(stream.fileno())
                if not self.size:
                    fsync(self.path.parent)
            self.size = stream.tell()
        self._is_torn = False


class Tail(Generic[Decoded]):
    """Reads the records that processes append to the ``.jsonl`` files of a folder; each byte is read once.

    Args:
        kind: type of the records, or a union of types.
    """

    def __init__(self, folder: Path, kind: Any) -> None:
        self._folder = folder
        self._decoder: msgspec.json.Decoder[Decoded] = msgspec.json.Decoder(kind)
        self._offsets: dict[str, int] = {}

    def offset(self, name: str) -> int:
        """Return the number of bytes that have been read from a file."""
        return self._offsets.get(name, 0)

    def records(self, names: Iterable[str] | None = None) -> Iterator[Decoded]:
        """Yield the records in complete lines that were added since the last call.

        Args:
            names: names of the files to read; by default, all files.
        """
        if names is None:
            names = sorted(path.name for path in self._folder.glob("*.jsonl"))
        for name in names:
            # The name of a new file may be visible before the file itself.
            with suppress(FileNotFoundError):
                yield from self._read(self._folder / name)

    def _read(self, path: Path) -> Iterator[Decoded]:
        # Opening the file makes NFS ask the server for its current size.
        with open_stored(path) as stream:
            stream.seek(self.offset(path.name))
            for line in iter(partial(stream.readline, MAX_BYTES), b""):
                if not line.endswith(b"\n"):
                    break
                self._offsets[path.name] = self.offset(path.name) + len(line)
                if line == b"\n":
                    continue
                try:
                    record = self._decoder.decode(line)
                except NOT_JSON as error:
                    # A power failure may leave such lines; the work is then repeated.
                    log.warning("skipping an invalid line of %s: %s", path, error)
                else:
                    yield record
