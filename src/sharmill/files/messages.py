"""Messages between two processes: objects through a pipe, and the arrays in them through anonymous files.

The pipe itself holds little, so that neither end waits for the other to read before some dozen messages are in it. The
files lie in memory, and not in /dev/shm, which containers keep small; a large one is a temporary file (TMPDIR).
"""

import ctypes
import errno
import mmap
import os
import pickle
import socket
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

# A message of no more bytes is in the pipe.
_MOST_IN_PIPE: Final = 4096
_MOST_IN_MEMORY: Final = 64 << 20
# No more files are kept, and no larger one, for the next message; what is beyond that goes to the disk. Their sizes are
# multiples of the last number.
_MOST_FILES: Final = 32
_MOST_KEPT: Final = 16 << 20
_KEPT_STEP: Final = 1 << 20
# Arrays begin at multiples of this, so that any element is at an address of its size.
_ALIGNMENT: Final = 64
# Number of a file that is not kept.
_ONCE: Final = -1

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class Line:
    """One end of a pipe.

    What arrives are views of files that both ends keep, since the kernel takes longer to make and to map the pages of a
    new one than to copy what is in it. An array may not be written to. When the last of a message is gone, its file is
    free for another message.

    Args:
        in_use: memory that both ends share, a byte for each of the files from there to here: it is not 0 as long as the
            file is in use.
    """

    def __init__(self, pipe: Connection, in_use: memoryview) -> None:
        self.pipe = pipe
        # A second descriptor, so that a file can be sent and taken whatever else this process opens.
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        self._in_use = in_use
        self._written: list[tuple[int, int]] = []
        self._read: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}

    def close(self) -> None:
        """Close this end. Arrays that have arrived stay what they are."""
        self.pipe.close()
        self._socket.close()
        while self._written:
            os.close(self._written.pop()[0])

    def send(
        self, message: Any, *, keep: bool = False, wait: Callable[[], object] = lambda: time.sleep(0.01)
    ) -> None:  # fmt: skip
        """Send an object.

        Args:
            keep: put its arrays into a file that is kept; only one end may do so.
            wait: is called, again and again, as long as too many files are on their way to processes of this user.

        Raises:
            OSError: the other process has ended, or the message fits on no disk.
            Exception: the object cannot be pickled; nothing was sent.
        """
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, 5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        if sum(sizes) <= _MOST_IN_PIPE:
            self.pipe.send_bytes(pickle.dumps((sizes, [bytes(part) for part in parts], _ONCE, False)))
            return
        file, number, is_new = self._find_file(_end(sizes), keep)
        try:
            for start, part in zip(_starts(sizes), parts, strict=True):
                while part.nbytes:
                    written = os.pwrite(file, part, start)
                    part, start = part[written:], start + written
        except BaseException:
            if number != _ONCE:
                self._forget_file(number)
            raise
        else:
            self.pipe.send_bytes(pickle.dumps((sizes, None, number, is_new)))
            if is_new:
                self._send_file(file, wait)
        finally:
            if number == _ONCE:
                os.close(file)

    def receive(self) -> Any:
        """Return the next object from the other end.

        Raises:
            EOFError, OSError: there is none, and the process has ended; or this one has too many files open.
        """
        sizes, parts, number, is_new = pickle.loads(self.pipe.recv_bytes())
        if parts is None:
            mapped = self._map_file() if is_new else self._read[number]
            # A new array each time, which all others of this message are views of: it lives as long as they do.
            whole = np.frombuffer(memoryview(mapped), np.uint8)
            whole.flags.writeable = False
            if number != _ONCE:
                self._read[number] = mapped
                weakref.finalize(whole, self._in_use.__setitem__, number, 0).atexit = False
            parts = [whole[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]
        return pickle.loads(parts[0], buffers=parts[1:])

    def _find_file(self, size: int, keep: bool) -> tuple[int, int, bool]:
        """Return a file of a size at least, its number, and whether the other end does not have it."""
        number = _ONCE
        if keep and size <= _MOST_KEPT:
            number = self._in_use[:_MOST_FILES].tobytes().find(0)
        if number == _ONCE:
            return anonymous_file(size, on_disk=keep), _ONCE, True
        is_new = number >= len(self._written) or self._written[number][1] < size
        if is_new:
            size = -(-size // _KEPT_STEP) * _KEPT_STEP
            file = anonymous_file(size)
            if number < len(self._written):
                os.close(self._written[number][0])
            self._written[number : number + 1] = [(file, size)]
        self._in_use[number] = 1
        return self._written[number][0], number, is_new

    def _forget_file(self, number: int) -> None:
        """Make a new file at the next use of the number of one that the other end may not have."""
        self._written[number] = self._written[number][0], 0
        self._in_use[number] = 0

    def _map_file(self) -> "ctypes.Array[ctypes.c_ubyte]":
        """Return the bytes of a file that comes. They need no descriptor, of which there would be too many."""
        try:
            (file,) = reduction.recvfds(self._socket, 1)
        except RuntimeError as error:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
        try:
            size = os.fstat(file).st_size
            address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED | mmap.MAP_POPULATE, file, 0)
            if address in (None, _MAP_FAILED):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(file)
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        return memory

    def _send_file(self, file: int, wait: Callable[[], object]) -> None:
        while True:
            try:
                reduction.sendfds(self._socket, [file])
                return
            except OSError as error:
                # As many as a process may have open are on their way to processes of this user.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                wait()


def anonymous_file(size: int, *, on_disk: bool = False) -> int:
    """Open a file without a name, of a size: in memory, or of a large one, or where there can be none, on the disk."""
    try:
        if on_disk or size > _MOST_IN_MEMORY:
            raise OSError
        file = os.memfd_create("sharmill", os.MFD_CLOEXEC)
    except OSError:  # some sandboxes have no such files
        with tempfile.TemporaryFile(prefix="sharmill-") as stream:
            file = os.dup(stream.fileno())
    os.truncate(file, size)
    return file


class RemoteTraceback(Exception):
    """The traceback of an error in another process, shown as the cause of the error here."""


def portable(error: Exception) -> tuple[Exception, str]:
    """Return an exception that can be pickled, which it is itself if it can be, and its traceback."""
    trace = "\n" + "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  many exceptions cannot be made again from their arguments
        return RuntimeError(f"{type(error).__name__}: {error}"), trace
    return error, trace


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where parts of these sizes begin in a file."""
    return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1])]


def _end(sizes: Sequence[int]) -> int:
    return _starts(sizes)[-1] + sizes[-1]
