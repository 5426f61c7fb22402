"""Errors of disks, turned into errors that say what to do.

Only writing can meet ``WRITE_ERRNOS``: if a stage reads and writes, its other errors may concern one input file.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sharmill.errors import DeviceError, FatalError

# Errors that the next unit would meet as well: going on would only fail every unit in turn.
STOPPING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
# Those that only writing can meet: where a stage reads and writes, the others may concern one input file.
WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# On NFS, of a file that another node has replaced, and of a folder with a file in it that is removed but still open.
_MOVING_ERRNOS = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY})
# A file in the place of a folder, a folder in that of a file, or a link or a FIFO in that of either.
_IN_THE_WAY: Final = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})


@contextmanager
def stopping_errors(path: Path, errnos: frozenset[int] = STOPPING_ERRNOS, *, host: str = "") -> Iterator[None]:
    """Turn a full disk, a read-only folder and the like into a FatalError that names ``path``.

    Where the disk is that of one host alone, which is named then, it is a DeviceError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in errnos:
            message = (
                f"cannot write {path}{f' on {host}' if host else ''}: {os.strerror(error.errno)}; "
                "make room or permit writing there, then run the same command again"
            )
            if host:
                raise DeviceError(message, place=host, code="disk") from error
            raise FatalError(message, code="disk") from error
        raise


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what a failing disk does to anything else, reading included, into a FatalError: around a whole command."""
    try:
        yield
    except OSError as error:
        if error.errno in STOPPING_ERRNOS | _MOVING_ERRNOS | _IN_THE_WAY | {errno.ENOENT}:
            place = error.filename2 or error.filename or f"a file of {folder}"
            remedy = "see to the disk, then" if error.errno in STOPPING_ERRNOS else "another process was faster:"
            if error.errno in _IN_THE_WAY:
                remedy = "look at what is in the way there, move it away, and"
            elif error.errno == errno.ENOENT:
                remedy = "put it back, or, in a run directory, begin its stage anew with --restart, and"
            raise FatalError(
                f"cannot read or write {place}: {os.strerror(error.errno)}; {remedy} run the same command again",
                code="disk",
            ) from error
        raise
