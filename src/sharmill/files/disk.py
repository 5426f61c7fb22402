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

# Errors that the next unit would meet as well.
STOPPING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# On NFS: another node has replaced the file, or the folder has a file that is removed but still open.
_MOVING_ERRNOS = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY})
# A file in the place of a folder, a folder in the place of a file, or a link or a FIFO in the place of either.
_IN_THE_WAY: Final = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})
_REMEDIES: Final = {
    **dict.fromkeys(_MOVING_ERRNOS, "another process was faster:"),
    **dict.fromkeys(STOPPING_ERRNOS, "see to the disk, then"),
    **dict.fromkeys(_IN_THE_WAY, "look at what is in the way there, move it away, and"),
}
# Remedies for a missing file, in a run directory and elsewhere.
RESTART_STAGE: Final = "put it back, or begin its stage again with --restart, and"
PUT_BACK: Final = "put it back, and"


@contextmanager
def stopping_errors(path: Path, errnos: frozenset[int] = STOPPING_ERRNOS, *, host: str = "") -> Iterator[None]:
    """Turn a full disk, a read-only folder and the like into a FatalError that names ``path``.

    If ``host`` names the only host that uses the disk, it is a DeviceError.
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
def disk_errors(folder: Path, if_missing: str = RESTART_STAGE) -> Iterator[None]:
    """Turn errors of a disk, in reading as in writing, into a FatalError: around a whole command.

    Args:
        folder: named if the error names no file.
        if_missing: the remedy for a missing file.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        remedy = if_missing if number == errno.ENOENT else _REMEDIES.get(number)
        if remedy is not None:
            place = error.filename2 or error.filename or f"a file of {folder}"
            raise FatalError(
                f"cannot read or write {place}: {os.strerror(number)}; {remedy} run the same command again",
                code="disk",
            ) from error
        raise
