"""Files behind URLs: of web servers (https), S3 (s3), Google Cloud Storage (gs) and AIStore (ais).

The scheme of a URL chooses the client. What a server says of one file is a ``RejectRecord``; what it says of itself, or
no answer at all, is an ``OSError`` after some tries; what is missing on this machine (a package, an endpoint,
credentials) is a ``ConfigError``.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sharmill.errors import ConfigError, RejectRecord

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

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        """Store a local file, which is seen when all of it is there.

        Raises:
            FileExistsError: something is there already, and ``replace`` is not set.
        """


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

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
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

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        self._files(url).put_file(str(path), url, mode="overwrite" if replace else "create")


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

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        if not replace:
            # AIStore has no conditional writes, so that another writer may still come between look and upload.
            with suppress(RejectRecord), _translated(url):
                self.version(url)
                raise FileExistsError(url)
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
        OSError: the server cannot be reached, or is busy; FileExistsError as ``Client.upload``.
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
    except FileExistsError:
        raise
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
