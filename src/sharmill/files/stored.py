"""Files of run directories, which sharmill wrote and others may have replaced since.

Only regular files of limited size are read, their content is decoded to a known type, and links are not followed.
``sharmill.engine.fence`` checks the folders above them.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_fixed

from sharmill.errors import ConfigError
from sharmill.files.atomic import open_folder_atomic, write_new
from sharmill.files.regular import open_regular
from sharmill.files.trust import anybody_may_write_to, owned_by_other_user

Decoded = TypeVar("Decoded")

# msgspec raises RecursionError for deeply nested JSON.
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MAX_BYTES: Final = 64 << 20


def open_stored(path: Path, *, append: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a file of a run directory.

    Args:
        append: open for appending, creating the file if needed; otherwise open for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        ConfigError: the file is a link, is not a regular file, or belongs to an untrusted user; with ``append``, also
            if the file has a second hard link, since a file elsewhere would then change as well.
    """
    try:
        stream = open_regular(path, follow_links=False, append=append, buffering=buffering)
        problem = ""
        if append and os.fstat(stream.fileno()).st_nlink > 1:
            problem = "it has a hard link, which appending would change as well"
        elif anybody_may_write_to(path.parent) and owned_by_other_user(os.fstat(stream.fileno()), path.parent):
            problem = "it belongs to another user, and anybody may write to its folder"
        if problem:
            stream.close()
            raise ValueError(problem)
        return stream
    except ValueError as error:
        raise damaged_file(path, str(error)) from error


def damaged_file(path: Path, what: str) -> ConfigError:
    """Return the error for a file of a run directory whose content sharmill has not written."""
    return ConfigError(
        f"{path} is damaged or was not written by sharmill: {what}; restart this stage with --restart, or restore the "
        "file; if the file is in a cache, remove it",
        code="damaged_run_dir",
    )


# On NFS, another node may replace a file while it is read; opening it again opens the new one.
@retry(
    retry=retry_if_exception(lambda error: getattr(error, "errno", None) == errno.ESTALE),
    stop=stop_after_attempt(3),
    wait=wait_fixed(0.1),
    reraise=True,
)
def read_stored(path: Path) -> bytes:
    """Return the content of a small file of a run directory.

    Raises:
        FileNotFoundError: the file does not exist.
        ConfigError: as ``open_stored``; also if the file has more than ``MAX_BYTES``.
    """
    with open_stored(path) as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise damaged_file(path, f"it is larger than {MAX_BYTES >> 20} MiB")
    return data


def read_stored_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of a run directory with their line ends; overlong lines are split."""
    with open_stored(path) as stream:
        yield from iter(partial(stream.readline, MAX_BYTES), b"")


def decode_stored(path: Path, data: bytes, kind: type[Decoded]) -> Decoded:
    """Decode JSON from a file of a run directory.

    Raises:
        ConfigError: the JSON is invalid or has another type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        raise damaged_file(path, str(error)) from error


def load_record(path: Path, kind: type[Decoded]) -> Decoded:
    """Read and decode a small JSON file of a run directory; see ``read_stored`` and ``decode_stored`` for errors."""
    return decode_stored(path, read_stored(path), kind)


def read_record(path: Path, kind: type[Decoded]) -> Decoded | None:
    """Return the record of ``load_record``, or None if the file does not exist."""
    try:
        return load_record(path, kind)
    except FileNotFoundError:
        return None


def read_records(path: Path, kind: type[Decoded]) -> Iterator[Decoded]:
    """Yield the decoded lines of a JSON lines file of a run directory; raises the errors of ``load_record``."""
    return (decode_stored(path, line, kind) for line in read_stored_lines(path))


def create_once(folder: Path, data: bytes) -> bytes:
    """Create a folder with ``data`` unless it exists, and return the data of the folder.

    If several processes call this at once, one of them creates the folder, and all return its data.
    """
    with suppress(FileNotFoundError):
        return read_stored(folder / "data")
    try:
        with open_folder_atomic(folder) as temp:
            write_new(temp / "data", data)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    return read_stored(folder / "data")
