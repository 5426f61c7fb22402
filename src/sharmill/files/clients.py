"""Clients for web servers (https), for S3 (s3) and Google Cloud Storage (gs) through fsspec, and for AIStore (ais).

Clients raise a ``PassingError`` for a transient error. ``sharmill.files.remote`` translates errors of their libraries.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from tenacity import Retrying, stop_after_attempt

from sharmill.errors import ConfigError, RejectRecord, hide_secrets
from sharmill.files.pace import SECONDS, AnswerPace, check_size, limit_response_times, run_in_time

if TYPE_CHECKING:
    import requests
    from urllib3 import BaseHTTPResponse

FETCHES_AT_ONCE: Final = 8
TRIES: Final = 4
_BLOCK_BYTES: Final = 1 << 20
_CONNECT_SECONDS: Final = 10.0
_MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = (301, 302, 303, 307, 308)


class Version(NamedTuple):
    """The size of a remote file in bytes, and the server's identifier of its version, such as an ETag."""

    size: int
    tag: str


class Client(ABC):
    """A client for the servers of one URL scheme."""

    @abstractmethod
    def version(self, url: str) -> Version: ...

    @abstractmethod
    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return bytes ``start`` (inclusive) to ``stop`` (exclusive) of a file."""

    @abstractmethod
    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        """Write a remote file into ``stream``, which is the open local file ``path``; return the file's version."""


class PassingError(Exception):
    """A transient error; ``final`` is raised when no retries are left."""

    def __init__(self, final: RejectRecord | OSError) -> None:
        super().__init__(str(final))
        # A RejectRecord hides secrets itself.
        self.final = final if isinstance(final, RejectRecord) else ConnectionError(hide_secrets(str(final)))


def origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


class WebClient(Client):
    """A client for web servers, which follows redirects to ``origins`` only."""

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
            check_size(url, version.size, max_bytes)
            _copy(response.raw, stream, AnswerPace(url, max_bytes))
            return version

    def _get(self, url: str, headers: dict[str, str] | None = None) -> requests.Response:
        """Return a response whose body has not been read."""
        response = self._follow(url, headers)
        code = response.status_code
        if code == 200 or (code == 206 and headers):
            return response
        response.close()
        answer = f"{url}: {code} {response.reason}"
        if code in (429, 503):  # the server is busy, whichever file is requested
            raise PassingError(ConnectionError(answer))
        reject = RejectRecord("missing_audio", answer)
        raise PassingError(reject) if code >= 500 or code == 408 else reject

    def _follow(self, url: str, headers: dict[str, str] | None) -> requests.Response:
        place = url
        for _ in range(_MAX_REDIRECTS + 1):
            response = _session(os.getpid()).get(
                place, stream=True, allow_redirects=False, timeout=(_CONNECT_SECONDS, SECONDS), headers=headers
            )
            if response.status_code not in _REDIRECTS:
                return response
            response.close()
            try:
                place = urljoin(place, response.headers.get("Location", ""))
                host = origin(place)
            except ValueError:
                raise RejectRecord("missing_audio", f"{url} redirects to an invalid URL") from None
            if host not in self._origins:
                raise RejectRecord(
                    "outside_root",
                    f"{url} redirects to {host[:200]}, which is not an audio root; add it as one if you trust it",
                )
        raise RejectRecord("missing_audio", f"{url} redirects more than {_MAX_REDIRECTS} times")


def _version_of(response: requests.Response) -> Version:
    """Return the version that a web server reports, with a size of -1 if it reports no valid length."""
    length, headers = response.raw.length_remaining, response.headers
    return Version(-1 if length is None else length, headers.get("ETag") or headers.get("Last-Modified", ""))


def _copy(answer: BaseHTTPResponse, stream: BinaryIO, pace: AnswerPace) -> None:
    """Write the body of a response into a stream, without unpacking it if the server stores it compressed."""
    # Write bytes as they arrive, instead of collecting a whole block in memory.
    while block := answer.read1(_BLOCK_BYTES, decode_content=False):
        pace.relative_update(len(block))
        stream.write(block)


def _read_part(answer: BaseHTTPResponse, url: str, start: int, stop: int) -> bytes:
    """Return bytes ``start`` to ``stop`` (exclusive) from a response that contains this range or the whole file."""
    part = [int(number) for number in re.findall(r"\d{1,18}", answer.headers.get("Content-Range", ""))]
    end = min([stop, *part[2:]]) - 1
    # If the total length is unknown, the range may be shorter, because the file may end there.
    is_whole = part[1:2] == [end] or (len(part) == 2 and part[1] < end)
    if answer.status == 206 and not (part[:1] == [start] and is_whole):
        raise RejectRecord(
            "unreadable_audio", f"the server of {url} sent a different range than bytes {start} to {stop - 1}"
        )
    skipped = 0 if answer.status == 206 else start
    return answer.read(skipped + stop - start, decode_content=False)[skipped:]


@cache
def _session(process: int) -> requests.Session:
    """Return the session of a process, which reuses connections, and uses the user's proxies and ``~/.netrc``."""
    import requests

    session = requests.Session()
    # Prevent requests from following redirects: it would read a redirect's whole body, and parse its target unchecked.
    session.get_redirect_target = lambda resp: None  # type: ignore[method-assign]
    limit_response_times(session, FETCHES_AT_ONCE)
    # Suppress a log message that contains the whole URL, whose query may be a signature.
    logging.getLogger("urllib3.connection").addFilter(lambda record: "Failed to parse" not in str(record.msg))
    # Request the stored bytes without compression for the transfer.
    session.headers["Accept-Encoding"] = "identity"
    return session


class StoreClient(Client):
    """A client for an object store, which identifies versions of a file and also accepts uploads."""

    @abstractmethod
    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        """Upload a local file, which becomes visible only when it is complete.

        Raises:
            FileExistsError: the target exists, and ``replace`` is not set.
        """

    @abstractmethod
    def _copy(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> None:
        """Write a remote file into ``stream``, which is the open local file ``path``, unless it is too large."""

    def download(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> Version:
        """Write a file into a stream as in ``Client``; a truncated or changed file raises a PassingError."""
        before = self.version(url)
        check_size(url, before.size, max_bytes)
        self._copy(url, stream, path, max_bytes)
        after, size = self.version(url), path.stat().st_size
        if before != after:
            raise PassingError(ConnectionError(f"{url} changed while it was being copied"))
        if size != after.size:
            what = f"{url} was cut off {TRIES} times: {size:,} of {after.size:,} bytes arrived"
            raise PassingError(RejectRecord("unreadable_audio", what))
        return after


class BucketClient(StoreClient):
    """A client for S3 and Google Cloud Storage through fsspec, which finds endpoints and credentials itself."""

    @staticmethod
    def _files(url: str) -> Any:
        import fsspec

        scheme = urlsplit(url).scheme
        options = {"config_kwargs": {"connect_timeout": _CONNECT_SECONDS, "retries": {"max_attempts": 0}}}
        files = fsspec.filesystem(scheme, use_listings_cache=False, **(options if scheme == "s3" else {}))
        files.retries = 1  # ``request`` retries instead
        if url != f"{scheme}://{'/'.join(files.split_path(url)[:2])}":
            raise RejectRecord(
                "missing_audio",
                f"{url} contains characters that the client of {scheme} would interpret; rename the file",
            )
        return files

    def _wait(self, pace: AnswerPace, files: Any, name: str, *args: Any, **options: Any) -> Any:
        """Return the result of an fsspec method; raise TimeoutError if it is too slow for ``pace``."""
        from fsspec.asyn import sync

        return sync(files.loop, run_in_time, pace, getattr(files, name)(*args, **options))

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

    def _copy(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> None:
        pace = AnswerPace(url, max_bytes)
        self._wait(pace, self._files(url), "_get_file", url, str(path), callback=pace)

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        pace, mode = AnswerPace(together=path.stat().st_size), "overwrite" if replace else "create"
        self._wait(pace, self._files(url), "_put_file", str(path), url, mode=mode)


class AIStoreClient(StoreClient):
    """A client for AIStore through its SDK, with the endpoint from the environment."""

    @staticmethod
    def _object(url: str) -> Any:
        if not (endpoint := os.environ.get("AIS_ENDPOINT")):
            raise ConfigError(
                f"{url} needs the address of AIStore; set AIS_ENDPOINT=http://HOST:PORT", code="missing_input"
            )
        # Take the name literally: the SDK would cut it off at '?' and '#'.
        name, _, key = url.removeprefix("ais://").partition("/")
        if key.startswith("/") or {".", ".."} & {*key.split("/")}:
            raise RejectRecord(
                "missing_audio", f"{url} contains path components that AIStore would change; rename the object"
            )
        return _aistore(endpoint, os.getpid()).bucket(name).object(key)

    def version(self, url: str) -> Version:
        found = self._object(url).head()
        return Version(found.size, found.checksum_value or found.obj_version)

    def read(self, url: str, start: int, stop: int) -> bytes:
        with self._object(url).get_reader(byte_range=f"bytes={start}-{stop - 1}").raw() as answer:
            return _read_part(answer, url, start, stop)

    def _copy(self, url: str, stream: BinaryIO, path: Path, max_bytes: float) -> None:
        with self._object(url).get_reader().raw() as answer:
            _copy(answer, stream, AnswerPace(url, max_bytes))
        stream.flush()

    def upload(self, path: Path, url: str, *, replace: bool) -> None:
        from aistore.sdk.errors import APIRequestError

        if not replace:
            # AIStore has no conditional writes, so another writer may still come between this check and the upload.
            with suppress(APIRequestError):
                self.version(url)
                raise FileExistsError(url)
        self._object(url).get_writer().put_file(path)


@cache
def _aistore(endpoint: str, process: int) -> Any:
    from aistore.sdk import Client as SdkClient
    from aistore.sdk.retry_config import RetryConfig
    from urllib3.util.retry import Retry

    once = RetryConfig(http_retry=Retry(0), network_retry=Retrying(stop=stop_after_attempt(1), reraise=True))
    client = SdkClient(endpoint, timeout=(_CONNECT_SECONDS, SECONDS), retry_config=once)
    limit_response_times(client.bucket("any").client.session_manager.session, FETCHES_AT_ONCE)
    return client
