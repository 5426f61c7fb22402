"""Files that several processes share: atomic writes, units that are published as a whole, records, and their reading.

What is written is written aside first, synced and renamed, so that no reader sees a partial file. A rank writes the
files of a unit in a folder of its own, and renames them when all are there. Ranks rename their progress records by
themselves, without fsync, since they are only looked at; the demo publishes its corpus in the same way.

Of a run directory only regular files of a bounded size are read, and what they hold is decoded to a known type; links
are not followed. Folders above them are checked by ``sharmill.engine.fence``.

On NFS it takes up to a minute until this node sees what another has written: a client keeps names, listings and
attributes for a while (acregmin, acdirmin), and meanwhile takes what is new for absent. So a name that is missing does
not mean that the file is not there, where another process is known to have made it: ``Patience`` waits for it, at most
for ``executor.seconds_until_seen``. What a process has seen once, or made, it goes on seeing. The server decides at
once whether a name may be made, whatever this node sees.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Final, Generic, TypeVar, cast
from uuid import uuid4

import msgspec
import numpy as np
import xxhash
from tenacity import Retrying, retry, retry_if_exception, stop_after_attempt, wait_exponential, wait_fixed

from sharmill.errors import ConfigError, DeviceError, FatalError, refuse
from sharmill.files.host import is_gone, this_kernel

log = logging.getLogger(__name__)

Decoded = TypeVar("Decoded")
Result = TypeVar("Result")

# msgspec raises RecursionError for JSON that is nested too deeply.
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# So does numpy for a file that is no array.
_NOT_AN_ARRAY: Final = (ValueError, TypeError, LookupError, EOFError, SyntaxError, RecursionError, MemoryError)
_MAX_BYTES: Final = 64 << 20
# Of an array that is read as a whole: a part of a stage, or the bounds of blocks.
_MAX_ARRAY_BYTES: Final = 1 << 30
_NOT_REGULAR = "it is not a regular file"
STAGING_NAME = ".sharmill-staging"
_SCRATCH_PREFIX = "sharmill-"
# Answers about files that another node has made or replaced, and that this one does not see as they are.
_LATE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
# What ``path_aside`` calls a file until it is published.
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{32}\.tmp")
# Errors that the next unit would meet as well: going on would only fail every unit in turn.
STOPPING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
# On NFS, of a file that another node has replaced, and of a folder with a file in it that is removed but still open.
_MOVING_ERRNOS = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY})
# A file in the place of a folder, a folder in that of a file, or a link or a FIFO in that of either.
_IN_THE_WAY: Final = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})
# Those that only writing can meet: where a stage reads and writes, the others may concern one input file.
WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# Of hard links: another file system, one without them, a file of somebody else's, or one that has all it may have.
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


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


class NotRegularError(ValueError):
    """A folder, a FIFO, a socket or a device in the place of a file."""


def open_regular(
    path: str | os.PathLike[str], *, follow_links: bool = True, append: bool = False, buffering: int = -1
) -> BinaryIO:
    """Open a regular file, without waiting for a writer where it is a FIFO instead.

    Args:
        append: open it for writing at its end, and make it where it is not there; else it is read.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not a regular file, or a link that is not to be followed, or its name cannot be one.
    """
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND if append else os.O_RDONLY
    try:
        try:
            descriptor = os.open(path, flags, 0o666)
        except BlockingIOError:
            if not stat.S_ISREG(Path(path).stat(follow_symlinks=follow_links).st_mode):
                raise
            # Another process has a lease of it, or an NFS client a delegation: it is given back to one that waits.
            descriptor = os.open(path, flags & ~os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link" if Path(path).is_symlink() else "links lead in a circle") from error
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"it cannot be opened: {error.strerror}") from error
        # A socket, a device that is not there, or a folder that is to be written to.
        if error.errno in (errno.ENXIO, errno.ENODEV, errno.EISDIR):
            raise NotRegularError(_NOT_REGULAR) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(_NOT_REGULAR)
    return cast("BinaryIO", os.fdopen(descriptor, "ab" if append else "rb", buffering))


def open_stored(path: Path, *, append: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a file of a run directory: one that sharmill wrote, and that others may have replaced since.

    Args:
        append: open it for writing at its end, and make it where it is not there; else it is read.

    Raises:
        FileNotFoundError: it is not there.
        ConfigError: it is a link, not a regular file, or a stranger's; where it is to be written to, also if it has a
            second name (a hard link), which may be that of a file elsewhere.
    """
    try:
        stream = open_regular(path, follow_links=False, append=append, buffering=buffering)
        status = os.fstat(stream.fileno())
        problem = "it belongs to another user, and anybody may write to its folder"
        if append and status.st_nlink > 1:
            problem = "it has a second name (a hard link), and what is appended would be in both"
        elif not is_strangers(status, path.parent):
            return stream
        stream.close()
        raise ValueError(problem)
    except ValueError as error:
        raise damaged_file(path, str(error)) from error


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing, under a name that this process alone writes to.

    What has that name is removed first: it may be a link, or a second name of another file, and nothing is written
    through it.
    """
    try:
        return path.open("xb")
    except FileExistsError:
        path.unlink()
        return path.open("xb")


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, as ``open_new`` opens it."""
    with open_new(path) as stream:
        stream.write(data)


def damaged_file(path: Path, what: str) -> ConfigError:
    """Return the error of a file of a run directory that does not hold what sharmill writes there."""
    return ConfigError(
        f"{path} is damaged or not sharmill's: {what}; begin this stage anew with --restart, or restore the file; in a "
        "cache of copies, remove it",
        code="damaged_run_dir",
    )


def is_strangers(status: os.stat_result, folder: Path) -> bool:
    """Return True if a thing in a folder belongs to another user whom nobody has let in: anybody may write there.

    Who may write to a folder by its group is trusted, so that several users can work on one run. So is the owner of a
    file that was there when others could write, but not of a folder in one of this user's: links may come into it.
    """
    if status.st_uid in (os.geteuid(), 0):
        return False
    above = folder.stat()
    is_let_in = above.st_uid != os.geteuid() or bool(above.st_mode & stat.S_IWGRP) or not stat.S_ISDIR(status.st_mode)
    return status.st_uid != above.st_uid and (bool(above.st_mode & stat.S_IWOTH) or not is_let_in)


def checksum(path: Path) -> str:
    """xxh3-64 of the bytes of a regular file, in hexadecimal; raises as ``open_regular``."""
    with open_regular(path, buffering=0) as stream:
        return checksum_stream(stream)


def checksum_stream(stream: BinaryIO) -> str:
    """xxh3-64 of what is left of a stream, in hexadecimal."""
    return hashlib.file_digest(cast("Any", stream), xxhash.xxh3_64).hexdigest()


def checksum_bytes(data: bytes) -> str:
    """xxh3-64 of ``data``, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def hash_text(text: str) -> int:
    """xxh3-64 of a text, which may have halves of characters (surrogates) as JSON may."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def fsync(path: Path) -> None:
    """Make the contents of a closed file, or the renames inside a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_aside(path: Path) -> Path:
    """Return the path at which to write what will be published as ``path``: beside it, under a name of its own."""
    return path.with_name(f".{path.name}.{uuid4().hex}.tmp")


@contextmanager
def open_atomic(path: Path, *, parents: bool = True) -> Iterator[BinaryIO]:
    """Open a file beside ``path`` for writing and publish it under that name if no error is raised.

    ``parents`` makes the folder where it is missing.
    """
    with stopping_errors(path):
        if parents:
            _make_folder(path.parent)
        aside = path_aside(path)
        try:
            with aside.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        fsync(path.parent)


def write_atomic(path: Path, data: bytes, *, parents: bool = True) -> None:
    """Publish ``data`` as ``path``."""
    with open_atomic(path, parents=parents) as stream:
        stream.write(data)


def publish_directory(aside: Path, final: Path) -> None:
    """Publish a complete directory: sync the files and folders in it, then rename it as a whole."""
    with stopping_errors(final):
        for path in (aside, *sorted(aside.rglob("*"))):
            if path.is_dir() or path.is_file():
                fsync(path)
        aside.rename(final)
        fsync(final.parent)


@contextmanager
def open_folder_atomic(path: Path) -> Iterator[Path]:
    """Make a folder beside ``path`` to be filled, and publish it under that name if no error is raised."""
    aside = path_aside(path)
    with stopping_errors(path):
        try:
            aside.mkdir()
            yield aside
            publish_directory(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def create_once(folder: Path, data: bytes) -> bytes:
    """Return the data that a folder was made with: these, unless there is one. Of several processes one makes it."""
    try:
        with open_folder_atomic(folder) as aside:
            write_new(aside / "data", data)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    return read_stored(folder / "data")


def remove_at_once(folder: Path) -> None:
    """Remove a folder in which others may be at work: by a rename first, after which nobody finds it any more.

    When this returns, nothing that was in it can be renamed out of it either. What processes that were killed while
    they did this have left goes too.
    """
    aside = path_aside(folder)
    with stopping_errors(folder):
        with suppress(FileNotFoundError):
            folder.rename(aside)
            fsync(folder.parent)
        # Another process may be making a file in it at this moment.
        for _ in range(10):
            shutil.rmtree(aside, ignore_errors=True)
            if not aside.exists():
                break
        # Others that are removing it are at work on the same files.
        with suppress(FileNotFoundError):
            remove_asides(folder.parent, {folder.name})


def make_folder(path: Path) -> None:
    """Make a folder, with its parents, so that it outlasts a loss of power."""
    with stopping_errors(path):
        _make_folder(path)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner may look into; one that is there becomes so.

    What is unpickled may lie there: nobody can put anything there, or another folder in its place.

    Raises:
        ConfigError: it is a link or another user's, or anybody may write to a folder that it lies in.
    """
    make_folder(path.parent)
    refuse_strangers(path.parent, [path])
    with stopping_errors(path):
        path.mkdir(mode=0o700, exist_ok=True)
        is_own = path.stat().st_uid == os.geteuid()
        shared = [str(one) for one in path.absolute().parents if _is_shared(one.stat(), stat.S_IWOTH)]
        refuse(
            (not is_own, f"{path} belongs to another user: choose another run_dir, or remove it if it is not needed"),
            (shared, f"anybody may write to {', '.join(shared)}: take that permission away (chmod o-w)"),
            code="foreign_output",
        )
        path.chmod(0o700)


def _is_shared(status: os.stat_result, writers: int) -> bool:
    """Return True if these others may replace what lies in a folder; in one like /tmp they can only replace theirs."""
    return bool(status.st_mode & writers) and not status.st_mode & stat.S_ISVTX


def remove_if_empty(*folders: Path) -> None:
    """Remove those of the folders that are there and have nothing in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def require_private(folder: Path) -> None:
    """Raise ConfigError unless a folder and what lies in it belong to this user, and nobody else can put things there.

    What is read there decides what this process does: a configuration may name code of other packages.
    """
    for path in (folder, *folder.parents):
        status = path.lstat()
        writers = stat.S_IWGRP | stat.S_IWOTH
        is_shared, owners = bool(status.st_mode & writers), {os.geteuid()}
        if path != folder:
            is_shared, owners = _is_shared(status, writers), {os.geteuid(), 0}
        if is_shared or status.st_uid not in owners:
            raise ConfigError(
                f"{folder} is not for this user alone: others may write to {path}, or it is theirs (chmod go-w, chown)",
                code="foreign_output",
            )
    for path in folder.iterdir():
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"{path} is a link or another user's: {folder} is not worked on", code="foreign_output")


def refuse_strangers(root: Path, paths: Iterable[Path], *, may_be_link: Path | None = None) -> None:
    """Raise ConfigError if a path below ``root``, or a folder on the way to it, is a link or a stranger's.

    So it is if it is a FIFO, a socket or a device. One path may be a link, but no stranger's.
    """
    seen: set[Path] = set()
    for path in paths:
        for part in (path, *path.parents):
            if part == root or part in seen or not part.is_relative_to(root):
                break
            seen.add(part)
            try:
                status = part.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            refuse(
                (
                    stat.S_ISLNK(status.st_mode) and part != may_be_link,
                    f"{part} is a link, and links inside {root} are not followed: put what it leads to there itself, "
                    "or let the directory as a whole be a link",
                ),
                (
                    is_strangers(status, part.parent),
                    f"{part} belongs to another user, whom {part.parent} does not let in by its group, or anybody may "
                    "write there (chmod o-w): look at what is there, and remove it or make it yours (chown)",
                ),
                (
                    stat.S_IFMT(status.st_mode) not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK),
                    f"{part} is neither a file nor a folder: remove it",
                ),
                code="foreign_output",
            )


def remove_asides(folder: Path, names: Container[str] | None = None) -> None:
    """Remove what killed processes left in a folder, not in those below it, of files that were to be published there.

    Only for the one process that may publish there; where others publish files too, ``names`` are its own.
    """
    for path in folder.glob(".*.tmp"):
        match = _ASIDE.fullmatch(path.name)
        if match and (names is None or match[1] in names):
            remove(path)


def remove(*paths: Path) -> None:
    """Remove files and directories with all that is in them, if they exist, so that no loss of power brings them back.

    Of a link, what it leads to stays.
    """
    for path in paths:
        with stopping_errors(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for folder in dict.fromkeys(path.parent for path in paths):
        if folder.is_dir():
            fsync(folder)


def require_writable(directory: Path) -> None:
    """Make a directory if it is missing, and raise ConfigError unless files can be written there."""
    try:
        _make_folder(directory)
        if os.access(directory, os.W_OK | os.X_OK):
            return
        problem = "it is read-only, or others permit it to nobody"
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    raise ConfigError(f"cannot write to {directory}: {problem}; choose a folder that you may write to", code="disk")


def time_of_folder(folder: Path) -> float:
    """Return the time of the file system that a folder is on, in Unix seconds, as it stands at files written now.

    Nodes' clocks may be minutes apart. Where this user cannot write there, it is the time of this machine. On NFS this
    also brings the node's view of the names in the folder up to date, since it makes a file there.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\n")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()


# On NFS another node may replace a file while it is read: opened once more it is the new one.
@retry(
    retry=retry_if_exception(lambda error: getattr(error, "errno", None) == errno.ESTALE),
    stop=stop_after_attempt(3),
    wait=wait_fixed(0.1),
    reraise=True,
)
def read_stored(path: Path) -> bytes:
    """Return the content of a small file of a run directory; raises as ``open_stored``, and where it is too large."""
    with open_stored(path) as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise damaged_file(path, f"it is larger than {_MAX_BYTES >> 20} MiB")
    return data


def read_stored_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of a run directory with their ends; one that is too long comes in parts."""
    with open_stored(path) as stream:
        yield from iter(partial(stream.readline, _MAX_BYTES), b"")


class RecordLog:
    """Appends records, a line of JSON each, to a ``.jsonl`` file that this process alone writes.

    Args:
        folder: that of the file, beside those of other processes; it is there as long as the plan is the present one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def append(self, record: msgspec.Struct, *, synced: bool = False) -> None:
        """Append a record; it is in the file when this returns, and with ``synced`` on disk.

        Raises:
            FatalError: it cannot be written.
        """
        is_new = self._path is None
        # Kept only after a success: after a failed write the file may end in half a line, and gets no more.
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
    """Reads the records in the ``.jsonl`` files of a folder to which processes append, each byte once."""

    def __init__(self, folder: Path, kind: type[Decoded]) -> None:
        self._folder = folder
        self._decoder = msgspec.json.Decoder(kind)
        self._offsets: dict[str, int] = {}

    def records(self) -> Iterator[Decoded]:
        """Yield the records of the complete lines that are new since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            # Opening makes NFS ask the server for the size too.
            with open_stored(path) as stream:
                stream.seek(self._offsets.get(path.name, 0))
                for line in iter(partial(stream.readline, _MAX_BYTES), b""):
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path.name] = self._offsets.get(path.name, 0) + len(line)
                    try:
                        record = self._decoder.decode(line)
                    except NOT_JSON as error:
                        # A file system that lost its power may leave such lines; what they told is done again.
                        log.warning("a line of %s is no record: %s", path, error)
                    else:
                        yield record


def decode_stored(path: Path, data: bytes, kind: type[Decoded]) -> Decoded:
    """Decode JSON that a file of a run directory has.

    Raises:
        ConfigError: it is not what it should be.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        raise damaged_file(path, str(error)) from error


def load_record(path: Path, kind: type[Decoded]) -> Decoded:
    """Return what a small file of a run directory holds as JSON; raises as ``read_stored`` and ``decode_stored``."""
    return decode_stored(path, read_stored(path), kind)


def read_record(path: Path, kind: type[Decoded]) -> Decoded | None:
    """Return what ``load_record`` does, or None where the file is not there."""
    try:
        return load_record(path, kind)
    except FileNotFoundError:
        return None


def read_records(path: Path, kind: type[Decoded]) -> Iterator[Decoded]:
    """Yield what the lines of a file of a run directory hold as JSON; raises as ``load_record``."""
    return (decode_stored(path, line, kind) for line in read_stored_lines(path))


def load_stored_array(path: Path) -> np.ndarray:
    """Return the array of a file of a run directory; one with pickled objects is refused.

    Raises:
        ConfigError: it is not an array, or a larger one than any that is read as a whole.
    """
    with open_stored(path) as stream:
        if os.fstat(stream.fileno()).st_size > _MAX_ARRAY_BYTES:
            raise damaged_file(path, f"it is larger than {_MAX_ARRAY_BYTES >> 20} MiB")
        try:
            return np.lib.format.read_array(stream, allow_pickle=False)
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def map_stored_array(path: Path) -> np.ndarray:
    """Return the array of a file of a run directory without reading it: its bytes are read where they are used.

    Raises:
        ConfigError: it is not an array of numbers.
    """
    with open_stored(path) as stream:
        try:
            # By its descriptor, which was checked.
            return np.lib.format.open_memmap(f"/proc/self/fd/{stream.fileno()}", mode="r")
        except _NOT_AN_ARRAY as error:
            raise damaged_file(path, str(error)) from error


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as an ``.npy`` file. Where the disk is full, ``np.save`` raises an error that does not say so."""
    with open_new(path) as stream:
        write_array(stream, array.dtype, array.shape, [array])


def write_array(stream: BinaryIO, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """Write an ``.npy`` file whose content comes in parts."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for part in parts:
        stream.write(np.ascontiguousarray(part, dtype).data)


class Patience:
    """Waits for what other nodes had written when this was made; ``seconds`` in all, however often it is asked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def once_seen(self, work: Callable[[], Result]) -> Result:
        """Return what a function returns, which is called again where it may have met files as they were before."""
        retrying = Retrying(
            retry=retry_if_exception(lambda error: getattr(error, "errno", None) in _LATE),
            stop=lambda state: time.monotonic() >= self._deadline,
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        return retrying(work)

    def wait_until(self, is_seen: Callable[[], bool], what: str) -> bool:
        """Wait until a condition holds; return False, and say in the log what is missing, where time is over."""

        def look() -> None:
            if not is_seen():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what)

        try:
            self.once_seen(look)
        except OSError as error:
            if error.errno not in _LATE:
                raise
            log.warning("%s cannot be seen here, after %g s of waiting for a shared disk", what, self._seconds)
            return False
        return True


def check_name(name: str) -> None:
    """Raise ValueError unless a name that a file of a run directory holds is that of a file below a folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or not name.isprintable():
        raise ValueError(f"{name!r} is no name below a folder")


@dataclass(frozen=True)
class PublishedFile:
    """A file of a committed unit; ``name`` is relative to the root that it was published below."""

    name: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        check_name(self.name)


class Staging:
    """Folder in which one process writes the files of its units, one unit at a time, before they are published.

    It lies on the file system of ``root``, below which they are published, so that this is a rename. Each process has
    its own: two attempts at one unit do not meet before the rename, and then both bring the same bytes. Parents are
    never made: the folder of the plan's token, and those of the final files, are there as long as the plan is valid,
    and are missed (FileNotFoundError) as soon as it is not. In a folder for each attempt, with the folders of the final
    files in it, making and removing these would be most of what a unit asks of the file system.

    With ``scratch``, a folder of this machine, the files are written there, and copied to the folder that is renamed
    from when all of a unit are there: many small writes go to a disk of the machine, and few large ones to the shared
    one.
    """

    def __init__(self, root: Path, token: str, scratch: Path | None = None) -> None:
        self.root = root
        name = f"{_names_here()}{os.getpid()}-{uuid4().hex}"
        self.folder = token_staging(root, token) / name
        self.written_in = self.folder if scratch is None else scratch / f"{_SCRATCH_PREFIX}{name}"
        self._has_scratch = scratch is not None

    def __enter__(self) -> "Staging":
        refuse_strangers(self.root, [self.folder.parent])
        with stopping_errors(self.folder):
            self.folder.mkdir()
        if self._has_scratch:
            remove_dead_attempts(self.written_in.parent)
            with self.write_errors():
                # Others may look into the folders of a machine.
                self.written_in.mkdir(mode=0o700)
        return self

    def __exit__(self, *exception: object) -> None:
        for folder in dict.fromkeys((self.folder, self.written_in)):
            shutil.rmtree(folder, ignore_errors=True)

    def write_errors(self, errnos: frozenset[int] = STOPPING_ERRNOS) -> AbstractContextManager[None]:
        """Turn errors of writing there into a FatalError, or where it is a disk of this machine into a DeviceError."""
        host = socket.gethostname() if self._has_scratch else ""
        return stopping_errors(self.written_in, errnos, host=host)

    def path(self, name: str) -> Path:
        """Return the path at which to write the file that will be published as ``root / name``."""
        return self.written_in / self._aside(name).name

    def publish(self, names: list[str]) -> list[PublishedFile]:
        """Publish the files in the order given.

        Where the last one lies in a folder of its own, a reader may rely on it to mean that all are there.
        """
        if not names:
            return []
        finals = [self.root / name for name in names]
        with stopping_errors(self.root), ExitStack() as stack:
            for name in names if self._has_scratch else ():
                shutil.copyfile(self.path(name), self._aside(name), follow_symlinks=False)
            streams = [stack.enter_context(open_regular(self._aside(name), buffering=0)) for name in names]
            # The disk gets all files at once, and writes while their checksums are computed.
            with ThreadPoolExecutor(len(names), "fsync") as pool:
                flushed = [pool.submit(os.fsync, stream.fileno()) for stream in streams]
                published = [
                    PublishedFile(name, os.fstat(stream.fileno()).st_size, checksum_stream(stream))
                    for name, stream in zip(names, streams, strict=True)
                ]
                for future in flushed:
                    future.result()
            folders = {folder: self._open_folder(folder, stack) for folder in {final.parent: None for final in finals}}
            for name, final in zip(names, finals, strict=True):
                if final == finals[-1]:
                    for folder, descriptor in folders.items():
                        if folder != final.parent:
                            os.fsync(descriptor)
                self._aside(name).replace(final)
            os.fsync(folders[finals[-1].parent])
        return published

    def clear(self) -> None:
        """Remove the files that an attempt has not published."""
        with suppress(OSError):
            for folder in dict.fromkeys((self.folder, self.written_in)):
                for path in folder.iterdir():
                    path.unlink()

    def _aside(self, name: str) -> Path:
        check_name(name)
        return self.folder / name.replace("/", "+")

    def _open_folder(self, folder: Path, stack: ExitStack) -> int:
        """Open a folder of final files, to be synced, until ``stack`` is left.

        Raises:
            ConfigError: it is a link or a stranger's: what was the run's own when it was planned was replaced since.
        """
        refuse_strangers(self.root, [folder])
        flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if folder != self.root else 0)
        descriptor = os.open(folder, flags)
        stack.callback(os.close, descriptor)
        if is_strangers(os.fstat(descriptor), folder.parent):
            refuse_strangers(self.root, [folder])
        return descriptor


def token_staging(root: Path, token: str) -> Path:
    """Return the folder below which all ranks of a plan write aside what they publish below ``root``."""
    return root / STAGING_NAME / token


def _names_here() -> str:
    """Return how the names of folders begin whose processes can be asked for here.

    Containers of one machine may have its host name, and the numbers of their processes mean nothing in others.
    """
    return f"rank-{socket.gethostname()}-{checksum_bytes(this_kernel().encode())[:8]}-"


def remove_dead_attempts(parent: Path) -> None:
    """Remove what processes of this machine that have ended left in a folder, unless it is another user's.

    Others may be at work in it: it is that of a plan's ranks, or a scratch folder.
    """
    name = re.compile(rf"({_SCRATCH_PREFIX})?{re.escape(_names_here())}([0-9]{{1,9}})-[0-9a-f]+")
    for folder in parent.glob("*rank-*"):
        match = name.fullmatch(folder.name)
        with suppress(FileNotFoundError):
            if match and folder.lstat().st_uid == os.geteuid() and is_gone(int(match[2])):
                shutil.rmtree(folder, ignore_errors=True)
