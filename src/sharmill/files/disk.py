"""Disk errors, translated into errors that name a remedy.

Only writing raises ``WRITE_ERRNOS``. In a stage that reads and writes, any other error may concern just one input file.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sharmill.errors import DeviceError, FatalError

# Errors that would also occur in the next unit.
STOPPING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# Errors on NFS after another node replaced the file, or for a folder that contains a removed file that is still open.
_MOVING_ERRNOS = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY})
# Errors for a file in place of a folder, a folder in place of a file, or a link or FIFO in place of either.
_IN_THE_WAY: Final = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})
_REMEDIES: Final = {
    **dict.fromkeys(_MOVING_ERRNOS, "another process changed it at the same time;"),
    **dict.fromkeys(STOPPING_ERRNOS, "check free space, permissions and the disk there, then"),
    **dict.fromkeys(_IN_THE_WAY, "move away whatever is in the way there, then"),
}
# Remedies for a missing file: in a run directory, and elsewhere.
RESTART_STAGE: Final = "restore it, or restart its stage with --restart, then"
PUT_BACK: Final = "restore it, then"


@contextmanager
def stopping_errors(path: Path, errnos: frozenset[int] = STOPPING_ERRNOS, *, host: str = "") -> Iterator[None]:
    """Turn errors such as a full disk or a read-only folder into a FatalError that names ``path``.

    If ``host`` is set, only that host uses the disk, and the error is a DeviceError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in errnos:
            message = (
                f"cannot write {path}{f' on {host}' if host else ''}: {os.strerror(error.errno)}; "
                "free space or allow writing there, then run the same command again"
            )
            if host:
                raise DeviceError(message, place=host, code="disk") from error
            raise FatalError(message, code="disk") from error
        raise


@contextmanager
def disk_errors(folder: Path, if_missing: str = RESTART_STAGE) -> Iterator[None]:
    """Turn disk errors from reading and writing into a FatalError; wraps a whole command.

    Args:
        folder: folder that the message names if the error names no file.
        if_missing: remedy for a missing file.
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
