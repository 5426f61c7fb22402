"""Messages between two processes: objects through a pipe, with their arrays in anonymous files.

The pipe itself carries little data, so neither end blocks until dozens of messages are unread. The files are in memory,
but not in /dev/shm, which containers keep small. Large files are temporary files on disk (TMPDIR).
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

# Messages up to this size in bytes are sent through the pipe itself.
_MOST_IN_PIPE: Final = 4096
_MOST_IN_MEMORY: Final = 64 << 20
# Limits on the number of reused files and on the size of each; larger messages are stored on the disk. Sizes of reused
# files are multiples of the step.
_MOST_FILES: Final = 32
_MOST_KEPT: Final = 16 << 20
_KEPT_STEP: Final = 1 << 20
# Arrays start at multiples of this number of bytes, so that all elements are aligned.
_ALIGNMENT: Final = 64
# Number that marks a file that is not reused.
_NOT_REUSED: Final = -1

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class PipeEnd:
    """One end of a pipe.

    Received arrays are read-only views of files that both ends keep and reuse, since creating and mapping the pages of
    a new file takes longer than copying its content. When the last array of a message is gone, its file is free for
    another message.

    Args:
        in_use: memory shared by both ends, with one byte per reusable file, which is nonzero while the file is in use.
    """

    def __init__(self, pipe: Connection, in_use: memoryview) -> None:
        self.pipe = pipe
        # A second descriptor of the pipe, for sending and receiving files. It is opened now, in case this process has
        # too many open files later.
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        self._in_use = in_use
        self._written: list[tuple[int, int]] = []
        self._read: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}

    def close(self) -> None:
        """Close this end. Received arrays stay valid."""
        self.pipe.close()
        self._socket.close()
        while self._written:
            os.close(self._written.pop()[0])

    def send(
        self, message: Any, *, keep: bool = False, wait: Callable[[], object] = lambda: time.sleep(0.01)
    ) -> None:  # fmt: skip
        """Send an object.

        Args:
            keep: store the object's arrays in a reusable file; only one end may do so.
            wait: called repeatedly while too many files are in transit to processes of this user.

        Raises:
            OSError: the other process has ended, or no disk has room for the message.
            Exception: the object cannot be pickled; nothing was sent.
        """
        arrays: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, 5, buffer_callback=arrays.append)
        parts = [memoryview(pickled), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        if sum(sizes) <= _MOST_IN_PIPE:
            self.pipe.send_bytes(pickle.dumps((sizes, [bytes(part) for part in parts], _NOT_REUSED, False)))
            return
        file, number, is_new = self._find_file(_end(sizes), keep)
        try:
            for start, part in zip(_starts(sizes), parts, strict=True):
                while part.nbytes:
                    written = os.pwrite(file, part, start)
                    part, start = part[written:], start + written
        except BaseException:
            if number != _NOT_REUSED:
                self._forget_file(number)
            raise
        else:
            self.pipe.send_bytes(pickle.dumps((sizes, None, number, is_new)))
            if is_new:
                self._send_file(file, wait)
        finally:
            if number == _NOT_REUSED:
                os.close(file)

    def receive(self) -> Any:
        """Return the next object from the other end.

        Raises:
            EOFError, OSError: the other process has ended and sent nothing more, or this process has too many open
                files.
        """
        sizes, parts, number, is_new = pickle.loads(self.pipe.recv_bytes())
        if parts is None:
            mapped = self._map_file() if is_new else self._read[number]
            # All arrays of this message are views of a new array, which therefore lives exactly as long as they do.
            whole = np.frombuffer(memoryview(mapped), np.uint8)
            whole.flags.writeable = False
            if number != _NOT_REUSED:
                self._read[number] = mapped
                weakref.finalize(whole, self._in_use.__setitem__, number, 0).atexit = False
            parts = [whole[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]
        return pickle.loads(parts[0], buffers=parts[1:])

    def _find_file(self, size: int, keep: bool) -> tuple[int, int, bool]:
        """Return a file of at least ``size`` bytes, its number, and True if the other end does not have it yet."""
        number = _NOT_REUSED
        if keep and size <= _MOST_KEPT:
            number = self._in_use[:_MOST_FILES].tobytes().find(0)
        if number == _NOT_REUSED:
            return anonymous_file(size, on_disk=keep), _NOT_REUSED, True
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
        """Have the next use of this number create a new file, since the other end may not have the current one."""
        self._written[number] = self._written[number][0], 0
        self._in_use[number] = 0

    def _map_file(self) -> "ctypes.Array[ctypes.c_ubyte]":
        """Receive a file, and return its mapped content.

        The descriptor is closed after the mapping, because a process may have too many mapped files to keep all of them
        open.
        """
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
                # Retry if the limit on files in transit to processes of this user is reached; raise any other error.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                wait()


def anonymous_file(size: int, *, on_disk: bool = False) -> int:
    """Open an unnamed file of the given size, in memory or, if it is large or memory files are unavailable, on disk."""
    try:
        if on_disk or size > _MOST_IN_MEMORY:
            raise OSError
        file = os.memfd_create("sharmill", os.MFD_CLOEXEC)
    except OSError:  # some sandboxes do not support memory files
        with tempfile.TemporaryFile(prefix="sharmill-") as stream:
            file = os.dup(stream.fileno())
    os.truncate(file, size)
    return file


class RemoteTraceback(Exception):
    """The traceback of an error in another process, shown as the cause of the local error."""


def portable(error: Exception) -> tuple[Exception, str]:
    """Return a picklable exception, which is ``error`` itself if possible, and the traceback of ``error``."""
    trace = "\n" + "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  many exceptions cannot be recreated from their arguments
        return RuntimeError(f"{type(error).__name__}: {error}"), trace
    return error, trace


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the start positions of parts with these sizes in a file."""
    return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1])]


def _end(sizes: Sequence[int]) -> int:
    return _starts(sizes)[-1] + sizes[-1]
