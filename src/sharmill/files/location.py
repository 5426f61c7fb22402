"""Locations of files and folders, on a disk or behind a URL, which are read in the same way.

A location on a disk is a ``Path``. A file behind a URL is copied into a cache, and its copy is read.
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
    """Return True if a path begins with the scheme of a URL, whichever."""
    return _SCHEME.match(path) is not None


def check_url(url: str, key: str) -> None:
    """Raise ValueError if a URL cannot be a value of ``key``: of another scheme, with a password or a query."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{key} {url!r} is no URL: {error}") from error
    for is_wrong, problem in (
        (parts.scheme not in SCHEMES, f"must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)}"),
        (parts.username is not None or parts.password is not None,
         "must not have a password, which would be stored; put it into ~/.netrc"),
        ("?" in url or "#" in url, "must end before '?' and '#'"),
        (not parts.hostname, "needs a host"),
        (is_unencrypted(url), "has no certificates; name https://"),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"the URL of {key}, {url!r}, {problem}")


@dataclass(frozen=True)
class RemoteLocation:
    """A file or folder behind a URL.

    Its methods have the names and the errors of a ``Path``, except ``local``, which raises what ``Cache.get`` raises.

    Args:
        url: of the file or folder.
        cache: the folder of the copies.
        xxh3: the checksum that the content must have; empty for any content.
        max_bytes: a larger file is refused.
    """

    url: str
    cache: Cache
    xxh3: str = ""
    max_bytes: float = math.inf

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteLocation:
        # A web server would take '?', '#' and '%2e' in the name of a file for something else.
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
        with self._refused():
            return self.cache.ask(self.url, lambda client: client.read(self.url, 0, size))

    def version(self) -> Version:
        """Return the version that the server has; the copy of another version is fetched again."""
        with self._refused():
            return self.cache.refresh(self.url)

    def fetch(self) -> Path:
        """Return the path of the copy as ``local``, but raise an OSError if the server does not give the file."""
        with self._refused():
            return self.local()

    def local(self) -> Path:
        """Return the path of the copy, which is not evicted as long as this path object lives."""
        return self.cache.get(self.url, self.xxh3, self.max_bytes)

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except RejectRecord as reject:
            number = errno.ENOENT if reject.reason == "missing_audio" else errno.EREMOTEIO
            raise OSError(number, reject.detail, hide_secrets(self.url)) from reject


Location: TypeAlias = Path | RemoteLocation


def is_remote(location: Location) -> bool:
    """Return True for a location behind a URL: its server takes time to answer, and lists no folders."""
    return isinstance(location, RemoteLocation)


def local(location: Location) -> Path:
    """Return the path of a file on this machine; a copy is not evicted as long as this path object lives.

    Raises:
        RejectRecord: as ``Cache.get``.
    """
    return location.local() if isinstance(location, RemoteLocation) else location


def fetch(location: Location) -> Path:
    """Return the path of a file as ``local``, but raise an OSError if its server does not give it."""
    return location.fetch() if isinstance(location, RemoteLocation) else location


def open_location(location: str | Location, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading, as ``open_regular``; its copy if it is behind a URL."""
    path = location.fetch() if isinstance(location, RemoteLocation) else location
    return open_regular(path, buffering=buffering)


def read_head_of(location: Location, size: int) -> bytes:
    """Return the first bytes of a file, without copying it."""
    if isinstance(location, RemoteLocation):
        return location.read_head(size)
    with open_regular(location) as stream:
        return stream.read(size)


def tell_version(location: Location) -> list[Any]:
    """Return JSON values that tell versions of a file apart: its size and, behind a URL, its server's name for it.

    A copy of another version is fetched again.

    Raises:
        FileNotFoundError: there is no such file, or its name is longer than one can be.
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
    """Return a location that, behind a URL, refuses content with another checksum or with more bytes."""
    return replace(location, xxh3=xxh3, max_bytes=max_bytes) if isinstance(location, RemoteLocation) else location


def check_copy(location: Location) -> None:
    """Raise DamagedShard if a copy has changed since it was fetched, which reading it does not detect."""
    if isinstance(location, RemoteLocation):
        copy = location.cache.path_of(location.url, location.xxh3)
        with suppress(FileNotFoundError, ValueError):
            if location.xxh3 and checksum(copy) != location.xxh3:
                raise DamagedShard(f"{copy}, the copy of {location}, is damaged: remove it, and it is fetched again")
