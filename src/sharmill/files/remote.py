"""Files behind URLs: of web servers (https), S3 (s3), Google Cloud Storage (gs) and AIStore (ais), and copies of them.

The scheme of a URL chooses the client. What a server says of one file is a ``RejectRecord``; what it says of itself, or
no answer at all, is an ``OSError`` after some tries; what is missing on this machine (a package, an endpoint,
credentials) is a ``ConfigError``.

A ``Cache`` keeps copies in a folder up to a size. The processes of a node share it: a copy is written aside and
renamed, and a lock of the kernel on it, which ends with its process, says that it is in use. A ``RemoteFile`` is a path
whose file is copied where it is opened, so that all that reads files reads URLs.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

import msgspec
import xxhash
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sharmill.errors import ConfigError, FatalError, RejectRecord
from sharmill.files.storage import (
    checksum,
    decode_stored,
    make_folder,
    open_stored,
    path_aside,
    read_stored,
    refuse_strangers,
    stopping_errors,
    write_new,
)

if TYPE_CHECKING:
    import aistore
    import requests

FETCHES_AT_ONCE: Final = 8
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BLOCK_BYTES: Final = 1 << 20
_CONNECT_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 60.0
# A server that sends less is as good as one that is silent.
_LEAST_BYTES_PER_SECOND: Final = 1024
_MAX_REDIRECTS: Final = 5
_TRIES: Final = 4
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "ais": "aistore"}
_wait = wait_exponential(multiplier=0.5, max=10)
_BUSY: Final = frozenset({408, 429})
_SECONDS_OF_USE: Final = 60.0
# Each process looks at what is there after so much of the limit, and leaves room for what others bring meanwhile.
_SWEPT_AFTER: Final = 1 / 64
_KEPT_SHARE: Final = 0.75
# Libraries tell archives and packed files by their extensions.
_EXTENSIONS: Final = re.compile(r"(\.[A-Za-z0-9]{1,8}){0,2}\Z")
_COPY: Final = re.compile(r"[0-9a-f]{32}" + _EXTENSIONS.pattern)


def is_url(path: str) -> bool:
    """Return True if a path begins with the scheme of a URL, whichever."""
    return _SCHEME.match(path) is not None


def check_url(url: str, key: str) -> None:
    """Raise ValueError where a URL cannot be a value of ``key``: of another scheme, with a password or a query."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{key} {url!r} is no URL: {error}") from error
    for is_wrong, problem in (
        (parts.scheme not in _CLIENTS, f"must begin with {', '.join(f'{scheme}://' for scheme in _CLIENTS)}"),
        (parts.username is not None or parts.password is not None,
         "must not have a password, which would be stored; put it into ~/.netrc"),
        ("?" in url or "#" in url, "must end before '?' and '#'"),
        (not parts.hostname, "needs a host"),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"the URL of {key}, {url!r}, {problem}")


class Version(NamedTuple):
    """The size of a remote file in bytes, and what its server tells versions of it apart by, such as an ETag."""

    size: int
    tag: str


class Client(Protocol):
    """A client of the servers of one scheme. Errors are those of its library, or as ``_Web`` raises them."""

    def version(self, url: str) -> Version: ...

    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file from ``start`` to before ``stop``."""

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        """Write a file into a stream, which is that of ``path``, and return its version."""

    def upload(self, path: Path, url: str) -> None:
        """Store a local file, which is seen when all of it is there."""


class _PassingError(Exception):
    """An error that another try may not meet; ``final`` is what is raised where none is left."""

    def __init__(self, final: RejectRecord | OSError) -> None:
        super().__init__(str(final))
        self.final = final


class _Web:
    """A web server, of which redirects are followed to ``origins`` alone."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = origins

    def version(self, url: str) -> Version:
        with self._get(url) as response:
            return _version_of(response)

    def read(self, url: str, start: int, stop: int) -> bytes:
        with self._get(url, {"Range": f"bytes={start}-{stop - 1}"}) as response:
            skipped = 0 if response.status_code == 206 else start
            return response.raw.read(skipped + stop - start, decode_content=True)[skipped:]

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        with self._get(url) as response:
            version = _version_of(response)
            too_large = RejectRecord("unreadable_audio", f"{url} has more than {max_bytes:,} bytes")
            if version.size > max_bytes:
                raise too_large
            begun, size = time.monotonic(), 0
            # What has come, and not a whole block, for which a slow server would be waited for without an end.
            while block := response.raw.read1(_BLOCK_BYTES, decode_content=True):
                size += len(block)
                if size > max_bytes:
                    raise too_large
                if time.monotonic() - begun > _SILENT_SECONDS + size / _LEAST_BYTES_PER_SECOND:
                    raise _PassingError(ConnectionError(f"{url} comes too slowly"))
                stream.write(block)
            return version

    def upload(self, path: Path, url: str) -> None:
        raise ConfigError(f"{url} is a web server, which is read only; name s3://, gs:// or ais://", code="bad_usage")

    def _get(self, url: str, headers: dict[str, str] | None = None) -> requests.Response:
        """Return an answer of which the body was not read yet."""
        response = self._follow(url, headers)
        if (code := response.status_code) in (200, 206):
            return response
        response.close()
        answer = f"{url}: {code} {response.reason}"
        if code in (429, 503):  # busy, whatever is asked of it
            raise _PassingError(ConnectionError(answer))
        reject = RejectRecord("missing_audio", answer)
        raise _PassingError(reject) if code >= 500 or code in _BUSY else reject

    def _follow(self, url: str, headers: dict[str, str] | None) -> requests.Response:
        place = url
        for _ in range(_MAX_REDIRECTS + 1):
            response = _session(os.getpid()).get(
                place, stream=True, allow_redirects=False, timeout=(_CONNECT_SECONDS, _SILENT_SECONDS), headers=headers
            )
            if response.status_code not in (301, 302, 303, 307, 308):
                return response
            response.close()
            try:
                place = urljoin(place, response.headers.get("Location", ""))
                host = _origin(place)
            except ValueError as error:
                raise RejectRecord("missing_audio", f"{url} redirects to what is no URL: {error}") from error
            if host not in self._origins:
                raise RejectRecord(
                    "outside_root",
                    f"{url} redirects to {host[:200]}, which is no audio root; make it one if it is to be trusted",
                )
        raise RejectRecord("missing_audio", f"{url} redirects more than {_MAX_REDIRECTS} times")


def _version_of(response: requests.Response) -> Version:
    """Return the version that a web server names, -1 bytes where it says no length, or no number."""
    length, headers = response.raw.length_remaining, response.headers
    return Version(-1 if length is None else length, headers.get("ETag") or headers.get("Last-Modified", ""))


@cache
def _session(process: int) -> requests.Session:
    """Return the session of a process, whose connections are used again; proxies and ``~/.netrc`` are the user's."""
    import requests
    from requests.adapters import HTTPAdapter

    class Session(requests.Session):
        def get_redirect_target(self, resp: requests.Response) -> None:
            """Return None: requests would read a redirect's body, however long, and parse its target unchecked."""

    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=FETCHES_AT_ONCE))
    # The bytes as they are stored, not packed for the way.
    session.headers["Accept-Encoding"] = "identity"
    return session


class _Bucket:
    """A bucket of S3 or Google Cloud Storage, by fsspec: endpoint and credentials are where its clients look."""

    @staticmethod
    def _files(url: str) -> Any:
        scheme = urlsplit(url).scheme
        try:
            import fsspec

            options = {"config_kwargs": {"connect_timeout": _CONNECT_SECONDS, "retries": {"max_attempts": 0}}}
            files = fsspec.filesystem(scheme, use_listings_cache=False, **(options if scheme == "s3" else {}))
        except ImportError as error:
            raise _missing_package(scheme) from error
        files.retries = 1  # those of this module suffice
        return files

    def version(self, url: str) -> Version:
        info = self._files(url).info(url)
        if info["type"] != "file":
            raise FileNotFoundError(url)
        return Version(info["size"], str(info.get("ETag") or info.get("etag") or info.get("generation") or ""))

    def read(self, url: str, start: int, stop: int) -> bytes:
        return self._files(url).cat_file(url, start=start, end=stop)

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        with _unchanged(self, url, path, max_bytes) as version:
            self._files(url).get_file(url, str(path))
        return version

    def upload(self, path: Path, url: str) -> None:
        self._files(url).put_file(str(path), url)


class _AIStore:
    """AIStore, by its SDK, at the endpoint that the environment names."""

    @staticmethod
    def _object(url: str) -> Any:
        if not (endpoint := os.environ.get("AIS_ENDPOINT")):
            raise ConfigError(
                f"{url} needs the address of AIStore: set AIS_ENDPOINT=http://HOST:PORT", code="missing_input"
            )
        return _aistore(endpoint, os.getpid()).get_object_from_url(url)

    def version(self, url: str) -> Version:
        found = self._object(url).head()
        return Version(found.size, found.checksum_value or found.obj_version)

    def read(self, url: str, start: int, stop: int) -> bytes:
        return self._object(url).get_reader(byte_range=f"bytes={start}-{stop - 1}").read_all()

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        with _unchanged(self, url, path, max_bytes) as version:
            for block in self._object(url).get_reader():
                stream.write(block)
            stream.flush()
        return version

    def upload(self, path: Path, url: str) -> None:
        self._object(url).get_writer().put_file(path)


@cache
def _aistore(endpoint: str, process: int) -> aistore.Client:
    try:
        from aistore.sdk import Client as AIStoreClient
        from aistore.sdk.retry_config import RetryConfig
        from urllib3.util.retry import Retry
    except ImportError as error:
        raise _missing_package("ais") from error
    once = RetryConfig(http_retry=Retry(0), network_retry=Retrying(stop=stop_after_attempt(1), reraise=True))
    return AIStoreClient(
        endpoint, timeout=(_CONNECT_SECONDS, _SILENT_SECONDS), retry_config=once, max_pool_size=FETCHES_AT_ONCE
    )


def _missing_package(scheme: str) -> ConfigError:
    return ConfigError(
        f"{scheme}:// needs the package {_PACKAGES[scheme]}: run pip install 'sharmill[stores]'", code="missing_package"
    )


@contextmanager
def _unchanged(client: Client, url: str, path: Path, max_bytes: float) -> Iterator[Version]:
    """Give the version of a file that is copied meanwhile; raise an error where it is too large.

    An error that is tried again is raised where it was cut off or changed.
    """
    before = client.version(url)
    if before.size > max_bytes:
        raise RejectRecord("unreadable_audio", f"{url} has more than {max_bytes:,} bytes")
    yield before
    after, size = client.version(url), path.stat().st_size
    if before != after:
        raise _PassingError(ConnectionError(f"{url} was changed while it was copied"))
    if size != after.size:
        what = f"{url} was cut off, {_TRIES} times: {size:,} of {after.size:,} bytes came"
        raise _PassingError(RejectRecord("unreadable_audio", what))


_CLIENTS: Final[dict[str, Callable[[Collection[str]], Client]]] = {
    "https": _Web,
    "http": _Web,
    "s3": lambda _: _Bucket(),
    "gs": lambda _: _Bucket(),
    "ais": lambda _: _AIStore(),
}


def _origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def request(url: str, call: Callable[[Client], Any], origins: Collection[str] = ()) -> Any:
    """Return what a call of the client of a URL gives, which is made several times where it may succeed then.

    Args:
        url: of one of the schemes that ``check_url`` names.
        call: what is asked of the client of the scheme.
        origins: URLs to whose hosts a redirect may lead, beside that of the URL.

    Raises:
        RejectRecord: missing_audio where the server does not give the file, unreadable_audio where it cuts it off or it
            is too large, outside_root where it redirects elsewhere.
        OSError: the server cannot be reached, or is busy.
        ConfigError: a package, an endpoint or credentials are missing.
    """
    scheme = urlsplit(url).scheme
    if scheme not in _CLIENTS:
        raise RejectRecord("outside_root", f"the URL {url[:200]!r} is not of {', '.join(_CLIENTS)}")
    client = _CLIENTS[scheme]({_origin(one) for one in (url, *origins)})
    # The client of Google's makes six tries itself, within a minute.
    stop = stop_after_attempt(2 if scheme == "gs" else _TRIES)
    tries = Retrying(retry=retry_if_exception_type(_PassingError), stop=stop, wait=_wait, reraise=True)

    def attempt() -> Any:
        with _translated(url):
            return call(client)

    try:
        return tries(attempt)
    except _PassingError as error:
        raise error.final from None


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn the errors of the clients' libraries into those that ``request`` raises, or tries again after."""
    import requests
    from urllib3.exceptions import DecodeError, HTTPError, ProtocolError

    try:
        yield
    except (ProtocolError, DecodeError, requests.exceptions.ChunkedEncodingError) as error:
        raise _PassingError(RejectRecord("unreadable_audio", f"{url} was cut off, {_TRIES} times: {error}")) from error
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout, HTTPError) as error:
        raise _PassingError(ConnectionError(f"cannot fetch {url}: {error}")) from error
    except requests.exceptions.RequestException as error:
        raise RejectRecord("missing_audio", f"{url} cannot be fetched: {error}") from error
    except FileNotFoundError as error:
        raise RejectRecord("missing_audio", f"{url} is not there") from error
    except PermissionError as error:
        raise _refused(url, error) from error
    except _errors_of(urlsplit(url).scheme) as error:
        raise _explained(url, error) from error


def _refused(url: str, error: Exception) -> RejectRecord:
    return RejectRecord("unreadable_audio", f"{url} may not be read or written by these credentials: {error}")


def _errors_of(scheme: str) -> tuple[type[Exception], ...]:
    """Return the classes of errors that the client of a scheme raises."""
    if scheme == "ais":
        from aistore.sdk.errors import APIRequestError

        return OSError, APIRequestError
    if scheme == "s3":
        from aiohttp import ClientError
        from botocore.exceptions import BotoCoreError, HTTPClientError

        return OSError, ClientError, BotoCoreError, HTTPClientError
    if scheme == "gs":
        from aiohttp import ClientError
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return OSError, ClientError, HttpError, GoogleAuthError
    return (OSError,)


def _explained(url: str, error: Exception) -> Exception:
    """Return what an error of a store's client means, by its class and status."""
    kind, status = type(error).__name__, getattr(error, "status_code", None) or getattr(error, "code", None)
    if "Credentials" in kind:
        return ConfigError(f"{url} needs credentials ({error}); set them where the client looks", code="missing_input")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    if kind in ("ErrObjNotFound", "ErrBckNotFound") or status == 404:
        return RejectRecord("missing_audio", f"{url} is not there")
    if status in (401, 403):
        return _refused(url, error)
    return _PassingError(ConnectionError(f"cannot fetch {url}: {error or kind}"))


class Copy(PosixPath):
    """The path of a copy in a cache, which is not evicted as long as this object lives."""

    stream: BinaryIO


# Bytes that this process has brought into the cache of a folder since it was swept.
_unswept: Final[dict[Path, float]] = {}


@dataclass(frozen=True)
class Cache:
    """Copies of remote files in a folder, of a limited size: those unused for longest are evicted, none in use.

    Args:
        folder: of the copies, which is made.
        max_bytes: of all copies together.
        scope: of one run, or empty: without a checksum, the copy that the run has fetched first stands for a URL.
        origins: URLs to whose hosts a redirect may lead, beside that of the URL.
        is_of_run: the folder lies in a run directory, and must not be a link; the user may make any other one.
    """

    folder: Path
    max_bytes: float
    scope: str = ""
    origins: frozenset[str] = frozenset()
    is_of_run: bool = False

    @classmethod
    def at(cls, folder: str | Path | None, gib: float = 100.0, *, scope: str = "") -> Cache:
        """Return the cache in a folder, by default that of this user, with a limit in GiB."""
        default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/sharmill"
        # Unlike Path.expanduser, this leaves a user without a home folder alone.
        return cls(Path(os.path.expanduser(folder or default)), gib * (1 << 30), scope)  # noqa: PTH111

    @classmethod
    def of_run(cls, run_dir: str, cache_dir: str | None, gib: float) -> Cache:
        """Return the cache of a run: in ``cache_dir``, which other runs use as well, or in the run directory."""
        if cache_dir is None:
            return replace(cls.at(Path(run_dir) / "copies", gib), is_of_run=True)
        return cls.at(cache_dir, gib, scope=os.path.realpath(run_dir))

    def get(self, url: str, xxh3: str = "", max_bytes: float = math.inf) -> Copy:
        """Return the copy of a URL, fetched where it is not there yet.

        Args:
            url: of one of the schemes that ``check_url`` names.
            xxh3: the checksum that the copy must have; without, the copy that is there stands for the URL.
            max_bytes: a larger file is refused.

        Raises:
            RejectRecord: as ``request``; also unreadable_audio where the checksum is another one.
            OSError: as ``request``.
            ConfigError: as ``request``; also where the folder is a link, a stranger's, or on a disk without locks.
            FatalError: the folder cannot be written, or what is in use is more than the cache may hold.
        """
        path = self.path_of(url, xxh3)
        self._refuse_strangers(path)
        with stopping_errors(path.parent):
            make_folder(path.parent)
            lock = open_stored(path.with_name(".lock"), append=True)
        # Several threads and processes want a file at once.
        with lock:
            _lock(lock, fcntl.LOCK_EX)
            try:
                # What others have put in its place is fetched anew.
                with suppress(FileNotFoundError, ConfigError):
                    return _hold(path, open_stored(path))
                with stopping_errors(path):
                    return self._fetch(url, xxh3, path, min(max_bytes, self.max_bytes))
            finally:
                # A process forked meanwhile has this file open too, and closing it here would leave it locked.
                _lock(lock, fcntl.LOCK_UN)

    def refresh(self, url: str) -> Version:
        """Return the version of a remote file, and remove the copy of another one; raises as ``request``."""
        found: Version = self.ask(url, lambda client: client.version(url))
        path = self.path_of(url)
        with suppress(FileNotFoundError):
            self._refuse_strangers(path)
            known = decode_stored(path, read_stored(path.with_name(f"about-{path.name}")), dict[str, Any])
            if known != found._asdict():
                path.unlink(missing_ok=True)
        return found

    def _refuse_strangers(self, path: Path) -> None:
        may_be_link = None if self.is_of_run else self.folder
        refuse_strangers(self.folder.parent, [path.parent], may_be_link=may_be_link)

    def ask(self, url: str, call: Callable[[Client], Any]) -> Any:
        """Return what a call of the client of a URL gives, as ``request``."""
        return request(url, call, self.origins)

    def path_of(self, url: str, xxh3: str = "") -> Path:
        """Return where the copy of a URL is, or would be."""
        name = xxhash.xxh3_128_hexdigest(f"{url}\n{xxh3 or self.scope}".encode())
        return self.folder / name[:3] / f"{name}{_EXTENSIONS.search(url)[0]}"  # type: ignore[index]  # it finds nothing

    def _fetch(self, url: str, xxh3: str, path: Path, max_bytes: float) -> Copy:
        aside = path_aside(path)
        stream = aside.open("x+b")
        try:
            _lock(stream, fcntl.LOCK_SH)

            def download(client: Client) -> Version:
                stream.seek(0)
                stream.truncate()
                return client.download(url, stream, aside, max_bytes)

            version: Version = self.ask(url, download)
            stream.flush()
            os.fsync(stream.fileno())
            if xxh3 and checksum(aside) != xxh3:
                raise RejectRecord("unreadable_audio", f"{url} does not have the checksum of the dataset's index")
            self._make_room(aside.stat().st_size)
            write_new(path.with_name(f"about-{path.name}"), msgspec.json.encode(version._asdict()))
            # Fetched once more, here or on another node, the same version has the same time.
            os.utime(stream.fileno(), ns=(time.time_ns(), xxhash.xxh3_64_intdigest(repr(version).encode()) >> 4))
            aside.replace(path)
            return _hold(path, stream)
        except BaseException:
            stream.close()
            raise
        finally:
            aside.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Evict copies where this process has brought so much that the limit may be passed."""
        _unswept[self.folder] = _unswept.get(self.folder, self.max_bytes) + size
        if _unswept[self.folder] < self.max_bytes * _SWEPT_AFTER:
            return
        _unswept[self.folder] = 0
        found = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):
                    path = Path(folder, name)
                    status = path.lstat()
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    # What a killed process left goes first.
                    found.append((0.0 if name.endswith(".tmp") else status.st_atime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for time_used, size, path in sorted(found):
            is_copy = _COPY.fullmatch(path.name)
            if (not time_used or (is_copy and total > self.max_bytes * _KEPT_SHARE)) and _evict(path):
                total -= size
        if total > self.max_bytes:
            raise FatalError(
                f"the files in use in {self.folder} have {total:,} bytes, more than the cache may hold "
                f"({self.max_bytes:,.0f}): raise its limit (cache_gib)",
                code="disk",
            )


def _lock(stream: BinaryIO, kind: int) -> None:
    try:
        fcntl.flock(stream, kind)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        raise ConfigError(
            f"{stream.name} is on a file system without locks: set cache_dir to a folder on a disk of this machine",
            code="disk",
        ) from error


def _hold(path: Path, stream: BinaryIO) -> Copy:
    """Return a copy that is not evicted; raise FileNotFoundError where it was at this moment."""
    _lock(stream, fcntl.LOCK_SH)
    status = os.fstat(stream.fileno())
    if not status.st_nlink:
        raise FileNotFoundError(path)
    if time.time() - status.st_atime > _SECONDS_OF_USE:
        with suppress(PermissionError):  # another user's
            os.utime(stream.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
    copy = Copy(path)
    copy.stream = stream
    return copy


def _evict(path: Path) -> bool:
    """Remove a copy unless a process uses it; return True if it is gone."""
    try:
        with path.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, PermissionError):
        return False
    except FileNotFoundError:
        return True
    path.with_name(f"about-{path.name}").unlink(missing_ok=True)
    return True


# Copies stay while those that got their paths open them.
_opened: Final[deque[Copy]] = deque(maxlen=4 * FETCHES_AT_ONCE)


class RemoteFile(PosixPath):
    """A path that is a URL: the file is copied into a cache where it is opened, and the copy is what is read.

    Opening it raises FileNotFoundError where the server does not give the file, and else as ``Cache.get``.
    """

    url: str
    cache: Cache
    xxh3: str
    _copy: Copy | None = None

    @classmethod
    def of(cls, url: str, cache: Cache, xxh3: str = "") -> RemoteFile:
        """Make the path of a URL; ``xxh3`` is the checksum that its content must have."""
        path = cls(url)
        path.url, path.cache, path.xxh3 = url.rstrip("/"), cache, xxh3
        return path

    def __str__(self) -> str:
        return getattr(self, "url", None) or super().__str__()

    def __fspath__(self) -> str:
        if self._copy is not None:
            return str(self._copy)
        with self._refused():
            copy = self.cache.get(self.url, self.xxh3)
        _opened.append(copy)
        return str(copy)

    def hold(self) -> None:
        """Copy the file, which is then not evicted as long as this path lives; raises as ``Cache.get``."""
        self._copy = self.cache.get(self.url, self.xxh3)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the size, without copying the file; raises as opening it."""
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, self.refresh().size, 0, 0, 0))

    def refresh(self) -> Version:
        """Return the version that its server has, and remove the copy of another one; raises as opening it."""
        with self._refused():
            return self.cache.refresh(self.url)

    def read_head(self, size: int) -> bytes:
        """Return the first bytes, without copying the file; raises as opening it."""
        with self._refused():
            return self.cache.ask(self.url, lambda client: client.read(self.url, 0, size))

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except RejectRecord as reject:
            number = errno.ENOENT if reject.reason == "missing_audio" else errno.EREMOTEIO
            raise OSError(number, reject.detail, self.url) from reject

    def __truediv__(self, name: str | os.PathLike[str]) -> RemoteFile:
        return type(self).of(f"{self.url}/{name}", self.cache)

    def __reduce__(self) -> Any:
        return type(self).of, (self.url, self.cache, self.xxh3)

    def absolute(self) -> RemoteFile:
        return self
