"""Requests for files behind URLs, which are tried again if that may help, with errors that say whose fault it is.

What a server says of one file is a ``RejectRecord``; what it says of itself, or no answer at all, is an ``OSError``
after some tries; what is missing on this machine (a package, an endpoint, credentials) is a ``ConfigError``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.client import HTTPException, RemoteDisconnected
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Final
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sharmill.errors import ConfigError, RejectRecord
from sharmill.files.clients import TRIES, AIStoreClient, BucketClient, Client, PassingError, WebClient, origin

SCHEMES: Final = ("https", "http", "s3", "gs", "ais")
_wait = wait_exponential(multiplier=0.5, max=10)
# Anybody on the way could read or change what comes by http from another machine.
_UNENCRYPTED: Final = re.compile(
    r"http://(?!([^/?#@]*@)?(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|\Z))", re.IGNORECASE
)
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "ais": "aistore"}
# Classes of errors of the clients' libraries.
_ERRORS: Final = {
    "ais": ["aistore.sdk.errors:APIRequestError"],
    "s3": ["aiohttp:ClientError", "botocore.exceptions:BotoCoreError"],
    "gs": ["aiohttp:ClientError", "gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError"],
}


def is_unencrypted(url: str) -> bool:
    """Return True for http to another machine."""
    return _UNENCRYPTED.match(url) is not None


def _make_client(scheme: str, origins: Collection[str]) -> Client:
    package = _PACKAGES.get(scheme)
    if package is not None and find_spec(package) is None:
        what = f"{scheme}:// needs the package {package}: run pip install 'sharmill[stores]'"
        raise ConfigError(what, code="missing_package")
    if scheme == "ais":
        return AIStoreClient()
    return WebClient(origins) if scheme.startswith("http") else BucketClient()


def request(url: str, call: Callable[[Any], Any], origins: Collection[str] = ()) -> Any:
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
    if scheme not in SCHEMES:
        raise RejectRecord("outside_root", f"the URL {url[:200]!r} is not of {', '.join(SCHEMES)}")
    if is_unencrypted(url):
        raise RejectRecord("outside_root", f"{url} has no certificates; name https://")
    client = _make_client(scheme, {origin(one) for one in (url, *origins)})
    # The client of Google's makes six tries itself, within a minute.
    stop = stop_after_attempt(2 if scheme == "gs" else TRIES)
    tries = Retrying(retry=retry_if_exception_type(PassingError), stop=stop, wait=_wait, reraise=True)

    def attempt() -> Any:
        with _translated(url):
            return call(client)

    try:
        return tries(attempt)
    except PassingError as error:
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
        raise PassingError(RejectRecord("unreadable_audio", f"{url} was cut off, {TRIES} times: {error}")) from None
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout, HTTPError) as error:
        causes = [cause for one in error.args for cause in getattr(one, "args", ())]
        if any(isinstance(one, HTTPException) and not isinstance(one, RemoteDisconnected) for one in causes):
            what = f"{url} is answered by what is no HTTP: {error}"
            raise PassingError(RejectRecord("unreadable_audio", what)) from None
        raise PassingError(ConnectionError(f"cannot fetch {url}: {error}")) from None
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
        return PassingError(RejectRecord("unreadable_audio", what))
    return PassingError(ConnectionError(what))
