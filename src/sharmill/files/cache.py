"""Copies of files behind URLs, in a folder of limited size.

The processes of a node share the folder of a ``Cache``. A marker file identifies the folder, and only files with the
cache's naming pattern are counted and removed. A copy is written to a temporary file, which is then renamed. A process
that uses a copy holds a shared kernel lock on it, which ends with the process. Two rules protect copies:

- A process removes a copy only while it holds the exclusive lock on the very file that has this name.
- A process replaces a copy only while it holds the lock on the folder, and the shared lock on the previous copy.

A name therefore cannot lead to another file between the check and the removal. The file ``about-...`` beside a copy
records its size and version, and is written last; a copy without it is fetched again.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Final

import msgspec
import xxhash

from sharmill.errors import ConfigError, FatalError, RejectRecord, refuse
from sharmill.files.atomic import make_folder, temp_path, write_atomic
from sharmill.files.checksums import checksum, hash_text
from sharmill.files.clients import Client, Version
from sharmill.files.disk import PUT_BACK, disk_errors, stopping_errors
from sharmill.files.pace import TooLarge
from sharmill.files.remote import request
from sharmill.files.stored import NOT_JSON, open_stored
from sharmill.files.trust import require_trusted_owner

_SECONDS_OF_USE: Final = 60.0
# Age in seconds above which a small unlocked file counts as a leftover. It is high, since writing such a file may take
# long on a busy disk.
_SECONDS_TO_WRITE: Final = 3600.0
# Each process scans the cache after fetching this share of the limit. It then evicts copies down to the kept share, to
# leave room for other processes.
_SWEPT_AFTER: Final = 1 / 64
_KEPT_SHARE: Final = 0.75
_MORE: Final = "more than the cache may hold ({:,.0f}); raise its limit (cache_gib)"
# Copies keep their extensions, by which libraries recognize archives and compressed files.
_EXTENSIONS: Final = r"(\.[A-Za-z0-9]{1,8}){0,2}"
# Name of the file that marks a folder as a cache. If it is missing, no files are evicted from the folder.
_MARKER: Final = ".sharmill-cache"
_COPY: Final = re.compile(rf"[0-9a-f]{{32}}{_EXTENSIONS}")
_TEMPORARY: Final = re.compile(rf"\.(about-)?{_COPY.pattern}\.[0-9a-f]{{32}}\.tmp")


class Copy(PosixPath):
    """The path of a copy in a cache, which is not evicted as long as this object exists."""

    stream: BinaryIO


# Bytes that this process has added to each cache folder since it last swept the folder.
_unswept: Final[dict[Path, float]] = {}


@dataclass(frozen=True)
class Cache:
    """Copies of remote files in a folder of limited size; the least recently used ones are evicted, but none in use.

    Args:
        folder: folder of the copies; created if it is missing.
        max_bytes: limit for all copies together.
        scope: run directory, or empty. Within a scope, a URL without a checksum is fetched once, and its copy is used
            from then on.
        origins: further URLs whose hosts a redirect may lead to.
        is_of_run: True if the folder is inside a run directory and must not be a link. The user may make any other
            cache folder a link.
    """

    folder: Path
    max_bytes: float
    scope: str = ""
    origins: frozenset[str] = frozenset()
    is_of_run: bool = False

    @classmethod
    def at(cls, folder: str | Path | None, gib: float = 100.0, *, scope: str = "") -> Cache:
        """Return the cache in a folder, by default the user's cache folder, with a limit in GiB."""
        default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/sharmill"
        # Unlike Path.expanduser, this does not raise for a user without a home folder.
        return cls(Path(os.path.expanduser(folder or default)), gib * (1 << 30), scope)  # noqa: PTH111

    @classmethod
    def of_run(cls, run_dir: str, cache_dir: str | None, gib: float) -> Cache:
        """Return the cache of a run: in ``cache_dir``, which several runs may share, or in the run directory if it is
        None.
        """
        if cache_dir is None:
            return replace(cls.at(Path(run_dir) / "copies", gib), is_of_run=True)
        return cls.at(cache_dir, gib, scope=os.path.realpath(run_dir))

    def get(self, url: str, xxh3: str = "", max_bytes: float = math.inf) -> Copy:
        """Return the copy of the file behind a URL; fetch the file first if there is no copy.

        Args:
            url: URL with one of the schemes that ``check_url`` allows.
            xxh3: checksum that the copy must have; if empty, an existing copy for the URL is accepted without a check.
            max_bytes: largest accepted size.

        Raises:
            RejectRecord: as ``request``; also unreadable_audio if the checksum differs.
            OSError: as ``request``.
            ConfigError: as ``request``; also if the file is larger than the cache limit, or the folder is on a disk
                without locks, is a link, belongs to an untrusted user, or is not a cache.
            FatalError: the folder cannot be written to, or the files in use exceed the cache limit.
        """
        path = self.path_of(url, xxh3)
        with disk_errors(path.parent, PUT_BACK):
            self._require_trusted_owner(path)
            # A user may have removed the cache, with its marker, while it was in use.
            if self.folder not in _unswept or not path.parent.is_dir():
                self._make_folder(path.parent)
            # Several threads and processes may need the same file at once.
            with open_stored(path.with_name(".lock"), append=True) as lock:
                _lock(lock, fcntl.LOCK_EX)
                try:
                    copy = None
                    # Fetch the file again if its copy is missing or is not a regular file.
                    with suppress(FileNotFoundError, ConfigError):
                        copy = _hold(path, open_stored(path))
                    if copy and os.fstat(copy.stream.fileno()).st_size == _read_version(path).size:
                        return copy
                    # The lock on an incomplete copy is held until the new copy has replaced it.
                    with stopping_errors(path):
                        return self._fetch(url, xxh3, path, max_bytes)
                finally:
                    # Unlock explicitly: a process forked in the meantime may also have this file open, so closing it
                    # would not unlock it.
                    _lock(lock, fcntl.LOCK_UN)

    def refresh(self, url: str) -> Version:
        """Return the server's version of a file; if the copy has another version, the next ``get`` replaces the copy.

        Raises:
            RejectRecord, OSError, ConfigError: as ``request``.
        """
        found: Version = self.ask(url, lambda client: client.version(url))
        path = self.path_of(url)
        with disk_errors(path.parent, PUT_BACK):
            self._require_trusted_owner(path)
            if _read_version(path).tag not in ("", _tag(found)):
                # Only the file with the version is removed, since the copy itself may be in use.
                _version_path(path).unlink(missing_ok=True)
        return found

    def _require_trusted_owner(self, path: Path) -> None:
        may_be_link = None if self.is_of_run else self.folder
        require_trusted_owner(self.folder.parent, [path.parent], may_be_link=may_be_link)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder for copies; raise ConfigError if the cache folder has files but no marker of a cache."""
        marker = self.folder / _MARKER
        refuse((str(folder).startswith("~"), f"{self.folder} has no home folder; set HOME or cache_dir"))
        if not marker.is_file():
            make_folder(self.folder)
            # Another process may have created the marker and a copy in the meantime.
            refuse(
                (
                    any(self.folder.iterdir()) and not marker.is_file(),
                    f"{self.folder} is not empty and not a cache, and a cache removes files: set cache_dir to a "
                    "new folder; if only an earlier sharmill version has used it, remove its content",
                ),
                code="foreign_output",
            )
            with suppress(FileExistsError):
                marker.touch(exist_ok=False)
        make_folder(folder)
        _unswept.setdefault(self.folder, self.max_bytes)

    def ask(self, url: str, call: Callable[[Client], Any]) -> Any:
        """Return the result of ``call`` with the client for a URL; see ``request``."""
        return request(url, call, self.origins)

    def path_of(self, url: str, xxh3: str = "") -> Path:
        """Return the path of a URL's copy, which may not exist."""
        name = xxhash.xxh3_128_hexdigest(f"{url}\n{xxh3 or self.scope}".encode())
        extensions = re.search(rf"{_EXTENSIONS}\Z", url)
        return self.folder / name[:3] / f"{name}{extensions[0] if extensions else ''}"

    def _fetch(self, url: str, xxh3: str, path: Path, max_bytes: float) -> Copy:
        temp = temp_path(path)
        stream = temp.open("x+b")
        try:
            _lock(stream, fcntl.LOCK_SH)
            # The source may require credentials, so only users who can write to the folder may read the copy.
            os.fchmod(stream.fileno(), 0o660 if path.parent.stat().st_mode & stat.S_IWGRP else 0o600)

            def download(client: Client) -> Version:
                stream.seek(0)
                stream.truncate()
                return client.download(url, stream, temp, min(max_bytes, self.max_bytes))

            try:
                version: Version = self.ask(url, download)
            except TooLarge as reject:
                # The cache limit of this machine must not decide which records a dataset contains. Exceeding it is
                # therefore an error rather than a reject.
                if self.max_bytes < max_bytes:
                    size = max(self.max_bytes, self.ask(url, lambda client: client.version(url)).size)
                    raise ConfigError(
                        f"{url} has at least {size:,.0f} bytes, {_MORE.format(self.max_bytes)}", code="bad_config_value"
                    ) from reject
                raise
            stream.flush()
            os.fsync(stream.fileno())
            if xxh3 and checksum(temp) != xxh3:
                raise RejectRecord("unreadable_audio", f"{url} does not have the checksum of the dataset's index")
            size = temp.stat().st_size
            self._make_room(size, path)
            # The modification time depends only on the version, so fetching the same version elsewhere gives the same
            # time.
            os.utime(stream.fileno(), ns=(time.time_ns(), int(_tag(version), 16) >> 4))
            temp.replace(path)
            write_atomic(_version_path(path), msgspec.json.encode(Version(size, _tag(version))))
            return _hold(path, stream)
        except BaseException:
            stream.close()
            raise
        finally:
            temp.unlink(missing_ok=True)

    def _make_room(self, size: int, new: Path) -> None:
        """Evict copies if this process has added so much that the cache may exceed its limit."""
        _unswept[self.folder] += size
        if _unswept[self.folder] < self.max_bytes * _SWEPT_AFTER:
            return
        _unswept[self.folder] = 0
        refuse(
            (
                not (self.folder / _MARKER).is_file(),
                f"{self.folder} is no longer a cache, its file {_MARKER} is gone; set cache_dir to a new folder",
            ),
            code="foreign_output",
        )
        total, copies = 0, []
        for path, status in self._files():
            if path == new:
                continue  # the new copy will replace it
            is_copy = _COPY.fullmatch(path.name)
            # Evict leftovers of killed processes first. A live process has locked its file, or has only just created
            # it.
            patience = _SECONDS_TO_WRITE if path.name.startswith(".about-") else _SECONDS_OF_USE
            if not is_copy and time.time() - status.st_mtime > patience and _evict(path):
                continue
            total += status.st_size
            if is_copy:
                copies.append((status.st_atime, status.st_size, path))
        for _, size, path in sorted(copies):
            if total > self.max_bytes * _KEPT_SHARE and _evict(path):
                total -= size
        if total > self.max_bytes:
            raise FatalError(
                f"the files in use in {self.folder} take up {total:,} bytes, {_MORE.format(self.max_bytes)}",
                code="disk",
            )

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the copies and temporary files; other files in the folder are neither counted nor touched."""
        for path in self.folder.glob(f"{'[0-9a-f]' * 3}/*"):
            is_own = _COPY.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
            with suppress(FileNotFoundError):
                status = path.lstat()
                if is_own and stat.S_ISREG(status.st_mode) and not path.parent.is_symlink():
                    yield path, status


def _lock(stream: BinaryIO, kind: int) -> None:
    try:
        fcntl.flock(stream, kind)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        raise ConfigError(
            f"{stream.name} is on a file system without locks; set cache_dir to a folder on a local disk",
            code="disk",
        ) from error


def _version_path(path: Path) -> Path:
    return path.with_name(f"about-{path.name}")


def _read_version(path: Path) -> Version:
    """Return the recorded size and version tag of a copy; if they cannot be read, a version that matches no file."""
    with suppress(OSError, ConfigError, *NOT_JSON), open_stored(_version_path(path)) as stream:
        return msgspec.json.decode(stream.read(1 << 10), type=Version)
    return Version(-1, "")


def _tag(version: Version) -> str:
    """Return a version tag of fixed length; the tag from a server may have any length."""
    return f"{hash_text(repr(version)):x}"


def _hold(path: Path, stream: BinaryIO) -> Copy:
    """Return a copy protected from eviction; raise FileNotFoundError if it has just been evicted."""
    _lock(stream, fcntl.LOCK_SH)
    status = os.fstat(stream.fileno())
    if not status.st_nlink:
        raise FileNotFoundError(path)
    if time.time() - status.st_atime > _SECONDS_OF_USE:
        with suppress(PermissionError):  # it belongs to another user
            os.utime(stream.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
    copy = Copy(path)
    copy.stream = stream
    return copy


def _evict(path: Path) -> bool:
    """Remove a copy or temporary file unless a process uses it; return True if it is gone."""
    try:
        with (
            suppress(FileNotFoundError),
            os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b") as stream,
        ):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another file may have replaced this one before it was locked.
            if os.path.samestat(os.fstat(stream.fileno()), path.lstat()):
                _version_path(path).unlink(missing_ok=True)
                path.unlink()
    except OSError:
        return False  # it is in use, belongs to another user, or is no longer a file
    return True
