"""Audio at URLs: fetched once into a folder of the run directory, where every stage and rank finds the same copy.

What a server says of one file becomes a ``RejectRecord``; what it says of itself, or no answer at all, an ``OSError``,
so that the unit is tried again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urljoin, urlsplit

import xxhash
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.storage import open_atomic, open_stored, refuse_strangers

if TYPE_CHECKING:
    import requests

FETCHES_AT_ONCE: Final = 8
# More than a day of speech at 16 kHz in WAV.
_MAX_BYTES: Final = 4 << 30
_BLOCK_BYTES: Final = 1 << 20
_CONNECT_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 60.0
# A server that sends less is as good as one that is silent.
_LEAST_BYTES_PER_SECOND: Final = 1024
_MAX_REDIRECTS: Final = 5
_TRIES: Final = 4
_wait = wait_exponential(multiplier=0.5, max=10)
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_REDIRECTS: Final = (301, 302, 303, 307, 308)
# The server is busy, whatever is asked of it.
_BUSY: Final = (429, 503)
# What a path of a URL has as it stands; what is quoted already stays so.
_SAFE: Final = "/%?=&+,:;@~!$'()*[]"


_locks: Final = [Lock() for _ in range(64)]


class _PassingError(Exception):
    """An error that another try may not meet; ``final`` is what is raised where none is left."""

    def __init__(self, final: RejectRecord | OSError) -> None:
        super().__init__(str(final))
        self.final = final


def is_url(path: str) -> bool:
    """Return True if a path begins with the scheme of a URL, whichever."""
    return _SCHEME.match(path) is not None


def check_url_root(root: str) -> None:
    """Raise ValueError where a URL cannot be the root of audio: of another scheme, with a password or a query."""
    try:
        parts = urlsplit(root)
        problem = "needs a host" if not parts.hostname else None
    except ValueError as error:
        raise ValueError(f"audio_root {root!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        problem = "must begin with https:// or http://"
    elif parts.username is not None or parts.password is not None:
        problem = "must not have a password, which would be stored; put it into ~/.netrc"
    elif parts.query or parts.fragment or "?" in root or "#" in root:
        problem = "must end before '?' and '#'"
    if problem is not None:
        raise ValueError(f"the URL of audio_root, {root!r}, {problem}")


def origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def url_below(root: str, relative: str) -> str:
    """Return the URL of a path below a root; what URLs cannot have is quoted.

    >>> url_below("https://host/speech", "84/a b.flac")
    'https://host/speech/84/a%20b.flac'
    """
    return f"{root}/{quote(relative, safe=_SAFE)}"


def copy_of(url: str, copies: Path) -> Path:
    """Return the path of the copy of a URL in a folder of copies."""
    name = xxhash.xxh3_128_hexdigest(url.encode())
    return copies / name[:2] / name


def fetch(url: str, copies: Path, origins: Collection[str]) -> Path:
    """Return the copy of a URL in the folder ``copies``, fetched where it is not there yet.

    Args:
        url: of scheme http or https.
        copies: a folder, which is made.
        origins: those that a redirect may lead to.

    Raises:
        RejectRecord: missing_audio where the server does not give the file, unreadable_audio where it cuts it off or it
            is too large, outside_root where it redirects elsewhere.
        OSError: the server cannot be reached, or is busy.
        ConfigError: a folder on the way to the copy is a link, or a stranger's.
    """
    path = copy_of(url, copies)
    # Segments of one recording are wanted by several threads at once.
    with _locks[int(path.name, 16) % len(_locks)]:
        refuse_strangers(copies.parent, [path.parent])
        if not _is_copy(path):
            _fetch(url, path, origins)
    return path


def _is_copy(path: Path) -> bool:
    """Return True if a file is there, and False for what others have put in its place: that is fetched anew."""
    try:
        open_stored(path).close()
    except (FileNotFoundError, ConfigError):
        return False
    return True


def _fetch(url: str, path: Path, origins: Collection[str]) -> None:
    tries = Retrying(
        retry=retry_if_exception_type(_PassingError), stop=stop_after_attempt(_TRIES), wait=_wait, reraise=True
    )
    try:
        tries(_fetch_once, url, path, origins)
    except _PassingError as error:
        raise error.final from None


def _fetch_once(url: str, path: Path, origins: Collection[str]) -> None:
    import requests
    from urllib3.exceptions import DecodeError, HTTPError, ProtocolError

    try:
        with _follow(url, origins) as response:
            if response.status_code != 200:
                _refuse(url, response)
            _store(url, response, path)
    except (ProtocolError, DecodeError) as error:
        raise _PassingError(RejectRecord("unreadable_audio", f"{url} was cut off, {_TRIES} times: {error}")) from error
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout, HTTPError) as error:
        raise _PassingError(ConnectionError(f"cannot fetch {url}: {error}")) from error
    except requests.exceptions.RequestException as error:
        raise RejectRecord("missing_audio", f"{url} cannot be fetched: {error}") from error


def _follow(url: str, origins: Collection[str]) -> requests.Response:
    """Return the answer of a server, redirects followed, of which the body was not read yet."""
    place = url
    for _ in range(_MAX_REDIRECTS + 1):
        response = _session().get(
            place, stream=True, allow_redirects=False, timeout=(_CONNECT_SECONDS, _SILENT_SECONDS)
        )
        if response.status_code not in _REDIRECTS:
            return response
        response.close()
        try:
            place = urljoin(place, response.headers.get("Location", ""))
            host = origin(place)
        except ValueError as error:
            raise RejectRecord("missing_audio", f"{url} redirects to what is no URL: {error}") from error
        if host not in origins:
            raise RejectRecord(
                "outside_root",
                f"{url} redirects to {host[:200]}, which is no audio root; make it one if it is to be trusted",
            )
    raise RejectRecord("missing_audio", f"{url} redirects more than {_MAX_REDIRECTS} times")


@cache
def _session() -> requests.Session:
    """Return the session whose connections are used again; proxies and ``~/.netrc`` are those of the user."""
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


def _refuse(url: str, response: requests.Response) -> None:
    code = response.status_code
    answer = f"{url}: {code} {response.reason}"
    if code in _BUSY:
        raise _PassingError(ConnectionError(answer))
    reject = RejectRecord("missing_audio", answer)
    raise _PassingError(reject) if code >= 500 or code == 408 else reject


def _store(url: str, response: requests.Response, path: Path) -> None:
    too_large = RejectRecord("unreadable_audio", f"{url} has more than {_MAX_BYTES:,} bytes")
    # None where the header is absent or no number.
    if (response.raw.length_remaining or 0) > _MAX_BYTES:
        raise too_large
    begun, size = time.monotonic(), 0
    with open_atomic(path) as stream:
        # What has come, and not a whole block, for which a slow server would be waited for without an end.
        while block := response.raw.read1(_BLOCK_BYTES, decode_content=True):
            size += len(block)
            if size > _MAX_BYTES:
                raise too_large
            if time.monotonic() - begun > _SILENT_SECONDS + size / _LEAST_BYTES_PER_SECOND:
                raise _PassingError(ConnectionError(f"{url} comes too slowly"))
            stream.write(block)
