"""Records that one process appends to a file of its own while others read them (``.jsonl``)."""

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

import msgspec

from sharmill.files.atomic import fsync
from sharmill.files.disk import stopping_errors
from sharmill.files.stored import MAX_BYTES, NOT_JSON, open_stored

log = logging.getLogger(__name__)
Decoded = TypeVar("Decoded")


class RecordLog:
    """Appends records, a line of JSON each, to a ``.jsonl`` file of this process.

    Args:
        folder: where all processes have their files; it exists as long as the plan is the present one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def append(self, record: msgspec.Struct, *, synced: bool = False) -> None:
        """Append a record; when this returns, it is in the file, and with ``synced`` on disk.

        Raises:
            FatalError: it cannot be written.
        """
        is_new = self._path is None
        # After a failed write, the file may end in half a line, and another file is begun.
        path, self._path = self._path or self._folder / f"{uuid4().hex}.jsonl", None
        with stopping_errors(path), open_stored(path, append=True) as stream:
            stream.write(msgspec.json.encode(record) + b"\n")
            if synced:
                stream.flush()
                os.fsync(stream.fileno())
                if is_new:
                    fsync(self._folder)
        self._path = path


class Tail(Generic[Decoded]):
    """Reads the records that processes append to the ``.jsonl`` files of a folder, each byte once."""

    def __init__(self, folder: Path, kind: type[Decoded]) -> None:
        self._folder = folder
        self._decoder = msgspec.json.Decoder(kind)
        self._offsets: dict[str, int] = {}

    def records(self) -> Iterator[Decoded]:
        """Yield the records of complete lines that were added since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            # Opening makes NFS ask the server for the current size.
            with open_stored(path) as stream:
                stream.seek(self._offsets.get(path.name, 0))
                for line in iter(partial(stream.readline, MAX_BYTES), b""):
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path.name] = self._offsets.get(path.name, 0) + len(line)
                    try:
                        record = self._decoder.decode(line)
                    except NOT_JSON as error:
                        # A power failure may leave such lines; their work is done again.
                        log.warning("a line of %s is no record: %s", path, error)
                    else:
                        yield record
