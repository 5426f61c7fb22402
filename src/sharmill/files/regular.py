"""Opening regular files without waiting for the writer of a FIFO, and optionally without following links."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

_NOT_REGULAR = "it is not a regular file"


class NotRegularError(ValueError):
    """Raised for a folder, FIFO, socket or device in place of a file."""


def open_regular(
    path: str | os.PathLike[str], *, follow_links: bool = True, append: bool = False, buffering: int = -1
) -> BinaryIO:
    """Open a regular file, without waiting for the writer of a FIFO.

    Args:
        append: open for appending, creating the file if needed; otherwise open for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the path is not a regular file, is a link that must not be followed, or is too long.
    """
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND if append else os.O_RDONLY
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except BlockingIOError:
            if not stat.S_ISREG(Path(path).stat(follow_symlinks=follow_links).st_mode):
                raise
            # Another process holds a lease on the file, or an NFS client holds a delegation; a blocking open waits
            # until it is released.
            descriptor = os.open(path, flags & ~os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link" if Path(path).is_symlink() else "its links form a circle") from error
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"it cannot be opened: {error.strerror}") from error
        # The path is a socket, a missing device, or a folder to be written to.
        if error.errno in (errno.ENXIO, errno.ENODEV, errno.EISDIR):
            raise NotRegularError(_NOT_REGULAR) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(_NOT_REGULAR)
    return cast("BinaryIO", os.fdopen(descriptor, "ab" if append else "rb", buffering))
