"""Reading of files of a run directory, which others may have written or replaced.

Only regular files of a bounded size are read, and what they hold is decoded to a known type; links are not followed.
Folders above them are checked by ``sharmill.engine.fence``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec
import numpy as np

from sharmill.errors import ConfigError
from sharmill.storage import open_regular

Decoded = TypeVar("Decoded")
# msgspec raises RecursionError for JSON that is nested too deeply.
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_MAX_BYTES: Final = 64 << 20


def open_stored(path: Path) -> BinaryIO:
    """Open a file of a run directory for reading.

    Raises:
        FileNotFoundError: it is not there.
        ConfigError: it is a link, or not a regular file.
    """
    try:
        return open_regular(path, follow_links=False)
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def read_stored(path: Path) -> bytes:
    """Return the content of a small file of a run directory; raises as ``open_stored``, and where it is too large."""
    with open_stored(path) as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _damaged(path, f"it is larger than {_MAX_BYTES >> 20} MiB")
    return data


def read_stored_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of a run directory with their ends; one that is too long comes in parts."""
    with open_stored(path) as stream:
        yield from iter(partial(stream.readline, _MAX_BYTES), b"")


def decode_stored(path: Path, data: bytes, kind: type[Decoded]) -> Decoded:
    """Decode JSON that a file of a run directory has.

    Raises:
        ConfigError: it is not what it should be.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        raise _damaged(path, str(error)) from error


def load_stored_array(path: Path) -> np.ndarray:
    """Return the array of a file of a run directory; one with pickled objects is refused.

    Raises:
        ConfigError: it is not an array.
    """
    with open_stored(path) as stream:
        try:
            return np.lib.format.read_array(stream, allow_pickle=False)
        except (ValueError, TypeError, LookupError, EOFError, SyntaxError, RecursionError, MemoryError) as error:
            raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged or not sharmill's: {what}; begin this stage anew with --restart, or restore the file",
        code="damaged_run_dir",
    )
