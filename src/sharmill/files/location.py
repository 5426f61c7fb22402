"""Locations of files and folders, on a disk or behind a URL, with one interface for reading.

A location on a disk is a ``Path``. A file behind a URL is copied into a cache, and the copy is read.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Final, TypeAlias
from urllib.parse import quote, urlsplit

from sharmill.errors import DamagedShard, RejectRecord, hide_secrets
from sharmill.files.cache import Cache
from sharmill.files.checksums import checksum
from sharmill.files.clients import Version
from sharmill.files.regular import open_regular
from sharmill.files.remote import SCHEMES, is_unencrypted

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Return True if a path begins with any URL scheme."""
    return _SCHEME.match(path) is not None


def check_url(url: str, key: str) -> None:
    """Raise ValueError if the URL under ``key`` has an unknown scheme, a password or a query, or is not encrypted."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{key} {url!r} is not a valid URL: {error}") from error
    for is_wrong, problem in (
        (parts.scheme not in SCHEMES, f"must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)}"),
        (parts.username is not None or parts.password is not None,
         "must not contain a password, which would be stored; put it into ~/.netrc"),
        ("?" in url or "#" in url, "must not contain '?' or '#'"),
        (not parts.hostname, "needs a host"),
        (is_unencrypted(url), "is not encrypted; use https://"),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"the URL of {key}, {url!r}, {problem}")


@dataclass(frozen=True)
class RemoteLocation:
    """A file or folder behind a URL.

    Its methods have the names of ``Path`` methods and raise the same errors, except ``local``, which raises the errors
    of ``Cache.get``.

    Args:
        url: URL of the file or folder.
        cache: cache for the copies.
        xxh3: checksum that the content must have; empty accepts any content.
        max_bytes: largest accepted size.
    """

    url: str
    cache: Cache
    xxh3: str = ""
    max_bytes: float = math.inf

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteLocation:
        # A web server would interpret '?', '#' and '%2e' in the name of a file.
        quoted = quote(name) if self.url.startswith("http") else name
        return RemoteLocation(f"{self.url.rstrip('/')}/{quoted}", self.cache)

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def absolute(self) -> RemoteLocation:
        return self

    def exists(self) -> bool:
        with suppress(FileNotFoundError):
            self.version()
            return True
        return False

    is_file = exists

    def open(self, *args: Any, **options: Any) -> IO[Any]:
        return self.fetch().open(*args, **options)

    def read_text(self, *args: Any) -> str:
        return self.fetch().read_text(*args)

    def read_head(self, size: int) -> bytes:
        """Return the first bytes without copying the file."""
        with self._raise_os_errors():
            return self.cache.ask(self.url, lambda client: client.read(self.url, 0, size))

    def version(self) -> Version:
        """Return the server's current version. If the copy has another version, the next access fetches it again."""
        with self._raise_os_errors():
            return self.cache.refresh(self.url)

    def fetch(self) -> Path:
        """Return the path of the copy as ``local`` does, but raise an OSError if the server does not offer the file."""
        with self._raise_os_errors():
            return self.local()

    def local(self) -> Path:
        """Return the path of the copy, which is not evicted as long as the returned path object exists."""
        return self.cache.get(self.url, self.xxh3, self.max_bytes)

    @contextmanager
    def _raise_os_errors(self) -> Iterator[None]:
        try:
            yield
        except RejectRecord as reject:
            number = errno.ENOENT if reject.reason == "missing_audio" else errno.EREMOTEIO
            raise OSError(number, reject.detail, hide_secrets(self.url)) from reject


Location: TypeAlias = Path | RemoteLocation


def is_remote(location: Location) -> bool:
    """Return True for a location behind a URL, whose server answers slowly and cannot list folders."""
    return isinstance(location, RemoteLocation)


def local(location: Location) -> Path:
    """Return a local path of a file; a copy is not evicted as long as the returned path object exists.

    Raises:
        RejectRecord: as ``Cache.get``.
    """
    return location.local() if isinstance(location, RemoteLocation) else location


def fetch(location: Location) -> Path:
    """Return a local path of a file as ``local`` does, but raise an OSError if the server does not provide the file."""
    return location.fetch() if isinstance(location, RemoteLocation) else location


def open_location(location: str | Location, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file, or the copy of a file behind a URL, for reading; see ``open_regular``."""
    path = location.fetch() if isinstance(location, RemoteLocation) else location
    return open_regular(path, buffering=buffering)


def read_head_of(location: Location, size: int) -> bytes:
    """Return the first bytes of a file without copying it."""
    if isinstance(location, RemoteLocation):
        return location.read_head(size)
    with open_regular(location) as stream:
        return stream.read(size)


def tell_version(location: Location) -> list[Any]:
    """Return JSON values that identify the version of a file: its size and, behind a URL, the server's version tag.

    If the copy of a file behind a URL has another version, the next access fetches the file again.

    Raises:
        FileNotFoundError: the file does not exist, or its name is too long.
    """
    if isinstance(location, RemoteLocation):
        return list(location.version())
    try:
        is_there = location.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        is_there = False
    if not is_there:
        raise FileNotFoundError(location)
    return [location.stat().st_size]


def with_content(location: Location, xxh3: str, max_bytes: float) -> Location:
    """Return a location that, behind a URL, accepts only content with this checksum and at most ``max_bytes`` bytes."""
    return replace(location, xxh3=xxh3, max_bytes=max_bytes) if isinstance(location, RemoteLocation) else location


def check_copy(location: Location) -> None:
    """Raise DamagedShard if a copy has changed since it was fetched; reading the copy does not detect such a change."""
    if isinstance(location, RemoteLocation):
        copy = location.cache.path_of(location.url, location.xxh3)
        with suppress(FileNotFoundError, ValueError):
            if location.xxh3 and checksum(copy) != location.xxh3:
                raise DamagedShard(
                    f"{copy}, the copy of {location}, is damaged; remove it, and it will be fetched again"
                )
