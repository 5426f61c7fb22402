"""Files behind URLs: of web servers (https), S3 (s3), Google Cloud Storage (gs) and AIStore (ais).

The scheme of a URL chooses the client. What a server says of one file is a ``RejectRecord``; what it says of itself, or
no answer at all, is an ``OSError`` after some tries; what is missing on this machine (a package, an endpoint,
credentials) is a ``ConfigError``.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.client import HTTPException, RemoteDisconnected
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sharmill.errors import ConfigError, RejectRecord, hide_secrets
from sharmill.files.pace import SECONDS, AnswerPace, in_time, keep_pace

if TYPE_CHECKING:
    import aistore
    import requests
    from aistore.sdk.obj.object import Object
    from urllib3 import BaseHTTPResponse

FETCHES_AT_ONCE: Final = 8
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BLOCK_BYTES: Final = 1 << 20
_CONNECT_SECONDS: Final = 10.0
_MAX_REDIRECTS: Final = 5
_TRIES: Final = 4
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "ais": "aistore"}
_wait = wait_exponential(multiplier=0.5, max=10)
_BUSY: Final = frozenset({408, 429})
# Anybody on the way could read or change what comes by http from another machine.
_OPEN: Final = re.compile(r"http://(?!([^/?#@]*@)?(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|\Z))", re.IGNORECASE)
# Classes of errors of the clients' libraries.
_ERRORS: Final = {
    "ais": ["aistore.sdk.errors:APIRequestError"],
    "s3": ["aiohttp:ClientError", "botocore.exceptions:BotoCoreError"],
    "gs": ["aiohttp:ClientError", "gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError"],
}


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
        (_OPEN.match(url), "has no certificates; name https://"),
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
        # A reject hides what must not be shown itself.
        self.final = final if isinstance(final, RejectRecord) else ConnectionError(hide_secrets(str(final)))


class _Web:
    """A web server, of which redirects are followed to ``origins`` alone."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = origins

    def version(self, url: str) -> Version:
        with self._get(url) as response:
            return _version_of(response)

    def read(self, url: str, start: int, stop: int) -> bytes:
        with self._get(url, {"Range": f"bytes={start}-{stop - 1}"}) as response:
            return _read_part(response.raw, url, start, stop)

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        with self._get(url) as response:
            version = _version_of(response)
            AnswerPace(url, max_bytes).relative_update(version.size)
            _copy(response.raw, stream, AnswerPace(url, max_bytes))
            return version

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        raise ConfigError(f"{url} is a web server, which is read only; name s3://, gs:// or ais://", code="bad_usage")

    def _get(self, url: str, headers: dict[str, str] | None = None) -> requests.Response:
        """Return an answer of which the body was not read yet."""
        response = self._follow(url, headers)
        if (code := response.status_code) == 200 or (code == 206 and headers):
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
                place, stream=True, allow_redirects=False, timeout=(_CONNECT_SECONDS, SECONDS), headers=headers
            )
            if response.status_code not in (301, 302, 303, 307, 308):
                return response
            response.close()
            try:
                place = urljoin(place, response.headers.get("Location", ""))
                host = _origin(place)
            except ValueError:
                raise RejectRecord("missing_audio", f"{url} redirects to what is no URL") from None
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


def _copy(answer: BaseHTTPResponse, stream: BinaryIO, pace: AnswerPace) -> None:
    """Write the body of an answer into a stream, as the server stores it: it may store a file compressed."""
    # What has come, and not a whole block, which would be kept in memory.
    while block := answer.read1(_BLOCK_BYTES, decode_content=False):
        pace.relative_update(len(block))
        stream.write(block)


def _read_part(answer: BaseHTTPResponse, url: str, start: int, stop: int) -> bytes:
    """Return the bytes of a file from ``start`` to before ``stop`` from an answer that has them, or the whole file."""
    part = [int(number) for number in re.findall(r"\d{1,18}", answer.headers.get("Content-Range", ""))]
    end = min([stop, *part[2:]]) - 1
    # The length of the file may be unknown.
    is_whole = part[1:2] == [end] or (len(part) == 2 and part[1] < end)
    if answer.status == 206 and not (part[:1] == [start] and is_whole):
        raise RejectRecord("unreadable_audio", f"{url} gives another part than bytes {start} to {stop - 1}")
    skipped = 0 if answer.status == 206 else start
    return answer.read(skipped + stop - start, decode_content=False)[skipped:]


@cache
def _session(process: int) -> requests.Session:
    """Return the session of a process, whose connections are used again; proxies and ``~/.netrc`` are the user's."""
    import requests

    session = requests.Session()
    # It would read a redirect's body, however long, and parse its target unchecked.
    session.get_redirect_target = lambda resp: None  # type: ignore[method-assign]
    keep_pace(session, FETCHES_AT_ONCE)
    # It has the whole URL, of which a query may be a signature.
    logging.getLogger("urllib3.connection").addFilter(lambda record: "Failed to parse" not in str(record.msg))
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
        if url != f"{scheme}://{'/'.join(files.split_path(url)[:2])}":
            raise RejectRecord("missing_audio", f"{url} has a name that the client of {scheme} takes for another one")
        return files

    def _wait(self, pace: AnswerPace, files: Any, name: str, *args: Any, **options: Any) -> Any:
        """Return what a method of fsspec's gives, which must keep a pace."""
        from fsspec.asyn import sync

        return sync(files.loop, in_time, pace, getattr(files, name)(*args, **options))

    def version(self, url: str) -> Version:
        info = self._wait(AnswerPace(), self._files(url), "_info", url)
        if info["type"] != "file":
            raise FileNotFoundError(url)
        return Version(info["size"], str(info.get("ETag") or info.get("etag") or info.get("generation") or ""))

    def read(self, url: str, start: int, stop: int) -> bytes:
        pace = AnswerPace(url, stop - start, stop - start)
        data: bytes = self._wait(pace, self._files(url), "_cat_file", url, start=start, end=stop)
        pace.relative_update(len(data))
        return data

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        pace = AnswerPace(url, max_bytes)
        with _unchanged(self, url, path, max_bytes) as version:
            self._wait(pace, self._files(url), "_get_file", url, str(path), callback=pace)
        return version

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        pace, mode = AnswerPace(together=path.stat().st_size), "overwrite" if replace else "create"
        self._wait(pace, self._files(url), "_put_file", str(path), url, mode=mode)


class _AIStore:
    """AIStore, by its SDK, at the endpoint that the environment names."""

    @staticmethod
    def _object(url: str) -> Object:
        if not (endpoint := os.environ.get("AIS_ENDPOINT")):
            raise ConfigError(
                f"{url} needs the address of AIStore: set AIS_ENDPOINT=http://HOST:PORT", code="missing_input"
            )
        # As the name stands: the SDK would take what is behind '?' and '#' for no part of it.
        name, _, key = url.removeprefix("ais://").partition("/")
        if key.startswith("/") or {".", ".."} & {*key.split("/")}:
            raise RejectRecord("missing_audio", f"{url} has a name that AIStore takes for another one")
        return _aistore(endpoint, os.getpid()).bucket(name).object(key)

    def version(self, url: str) -> Version:
        found = self._object(url).head()
        return Version(found.size, found.checksum_value or found.obj_version)

    def read(self, url: str, start: int, stop: int) -> bytes:
        with self._object(url).get_reader(byte_range=f"bytes={start}-{stop - 1}").raw() as answer:
            return _read_part(answer, url, start, stop)

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        with _unchanged(self, url, path, max_bytes) as version:
            with self._object(url).get_reader().raw() as answer:
                _copy(answer, stream, AnswerPace(url, max_bytes))
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
    client = AIStoreClient(endpoint, timeout=(_CONNECT_SECONDS, SECONDS), retry_config=once)
    keep_pace(client.bucket("any").client.session_manager.session, FETCHES_AT_ONCE)
    return client


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
    AnswerPace(url, max_bytes).relative_update(before.size)
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
    if _OPEN.match(url):
        raise RejectRecord("outside_root", f"{url} has no certificates; name https://")
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
    """Turn the errors of the clients' libraries into those that ``request`` raises, or tries again after.

    Their causes are not shown: they have the whole URL, of which a password or a query may be a secret.
    """
    import requests
    from urllib3.exceptions import DecodeError, HTTPError, ProtocolError

    try:
        yield
    except (ProtocolError, DecodeError, requests.exceptions.ChunkedEncodingError) as error:
        raise _PassingError(RejectRecord("unreadable_audio", f"{url} was cut off, {_TRIES} times: {error}")) from None
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout, HTTPError) as error:
        causes = [cause for one in error.args for cause in getattr(one, "args", ())]
        if any(isinstance(one, HTTPException) and not isinstance(one, RemoteDisconnected) for one in causes):
            what = f"{url} is answered by what is no HTTP: {error}"
            raise _PassingError(RejectRecord("unreadable_audio", what)) from None
        raise _PassingError(ConnectionError(f"cannot fetch {url}: {error}")) from None
    except requests.exceptions.RequestException as error:
        raise RejectRecord("missing_audio", f"{url} cannot be fetched: {error}") from None
    except FileExistsError:
        raise
    except (OSError, ValueError, LookupError, *map(resolve_name, _ERRORS.get(urlsplit(url).scheme, ()))) as error:
        raise _explained(url, error) from None


def _explained(url: str, error: Exception) -> Exception:
    """Return what an error of a store's client means, by its class and status."""
    kind = type(error).__name__
    codes = [getattr(error, name, None) for name in ("status_code", "status", "code")]
    if isinstance(answer := getattr(error.__cause__, "response", None), dict):  # botocore's
        codes = [answer["ResponseMetadata"].get("HTTPStatusCode")]
    status = next((code for code in codes if isinstance(code, int)), None)
    if "Credentials" in kind:
        return ConfigError(f"{url} needs credentials ({error}); set them where the client looks", code="missing_input")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    if isinstance(error, FileNotFoundError) or kind in ("ErrObjNotFound", "ErrBckNotFound") or status == 404:
        return RejectRecord("missing_audio", f"{url} is not there")
    if isinstance(error, PermissionError) or status in (401, 403):
        return RejectRecord("unreadable_audio", f"{url} may not be read or written by these credentials: {error}")
    # An answer that is cut off, or is no HTTP, for which botocore has no class of its own.
    is_odd = kind in ("ClientPayloadError", "HTTPClientError") or isinstance(error, (ValueError, LookupError))
    what = f"cannot fetch {url}: {error or kind}"
    if is_odd or (status is not None and status >= 400 and status not in (408, 429, 503)):
        return _PassingError(RejectRecord("unreadable_audio", what))
    return _PassingError(ConnectionError(what))
