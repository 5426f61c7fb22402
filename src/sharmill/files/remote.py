"""Requests for files behind URLs, with retries, and with errors whose type shows who can solve the problem.

A server's response about one file is a ``RejectRecord``. A response about the server itself, or no response after some
retries, is an ``OSError``. Something missing on this machine (a package, an endpoint, credentials) is a
``ConfigError``.
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
# URLs that use http to another machine; data could be read or changed in transit.
_UNENCRYPTED: Final = re.compile(
    r"http://(?!([^/?#@]*@)?(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|\Z))", re.IGNORECASE
)
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "ais": "aistore"}
# Error classes of the clients' libraries.
_ERRORS: Final = {
    "ais": ["aistore.sdk.errors:APIRequestError"],
    "s3": ["aiohttp:ClientError", "botocore.exceptions:BotoCoreError"],
    "gs": ["aiohttp:ClientError", "gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError"],
}


def is_unencrypted(url: str) -> bool:
    """Return True if a URL uses http to another machine."""
    return _UNENCRYPTED.match(url) is not None


def _make_client(scheme: str, origins: Collection[str]) -> Client:
    package = _PACKAGES.get(scheme)
    if package is not None and find_spec(package) is None:
        what = f"{scheme}:// needs the package {package}; run pip install 'sharmill[stores]'"
        raise ConfigError(what, code="missing_package")
    if scheme == "ais":
        return AIStoreClient()
    return WebClient(origins) if scheme.startswith("http") else BucketClient()


def request(url: str, call: Callable[[Any], Any], origins: Collection[str] = ()) -> Any:
    """Return the result of ``call`` with the client for a URL; retry it after transient errors.

    Args:
        url: URL with one of the schemes that ``check_url`` allows.
        call: function that is called with the client.
        origins: further URLs whose hosts a redirect may lead to.

    Raises:
        RejectRecord: missing_audio if the server does not provide the file, unreadable_audio if the file is truncated
            or too large, outside_root if the server redirects to an unknown host.
        OSError: the server is unreachable or busy; FileExistsError as in ``StoreClient.upload``.
        ConfigError: a package, an endpoint or credentials are missing.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise RejectRecord("outside_root", f"the URL {url[:200]!r} has an unknown scheme; use {', '.join(SCHEMES)}")
    if is_unencrypted(url):
        raise RejectRecord("outside_root", f"{url} is not encrypted; use https://")
    client = _make_client(scheme, {origin(one) for one in (url, *origins)})
    # Google's client makes six attempts itself, within a minute.
    stop = stop_after_attempt(2 if scheme == "gs" else TRIES)
    tries = Retrying(retry=retry_if_exception_type(PassingError), stop=stop, wait=_wait, reraise=True)

    def attempt() -> Any:
        with _translate_errors(url):
            return call(client)

    try:
        return tries(attempt)
    except PassingError as error:
        raise error.final from None


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Translate errors of the clients' libraries into the errors of ``request``, or into a PassingError.

    Causes are not shown, because they contain the whole URL, whose password or query may be secret.
    """
    import requests
    from urllib3.exceptions import DecodeError, HTTPError, ProtocolError

    try:
        yield
    except (ProtocolError, DecodeError, requests.exceptions.ChunkedEncodingError) as error:
        raise PassingError(RejectRecord("unreadable_audio", f"{url} was cut off {TRIES} times: {error}")) from None
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout, HTTPError) as error:
        causes = [cause for one in error.args for cause in getattr(one, "args", ())]
        if any(isinstance(one, HTTPException) and not isinstance(one, RemoteDisconnected) for one in causes):
            what = f"the server of {url} does not answer in HTTP: {error}"
            raise PassingError(RejectRecord("unreadable_audio", what)) from None
        raise PassingError(ConnectionError(f"cannot fetch {url}: {error}")) from None
    except requests.exceptions.RequestException as error:
        raise RejectRecord("missing_audio", f"{url} cannot be fetched: {error}") from None
    except FileExistsError:
        raise
    except (OSError, ValueError, LookupError, *map(resolve_name, _ERRORS.get(urlsplit(url).scheme, ()))) as error:
        raise _explain_error(url, error) from None


def _explain_error(url: str, error: Exception) -> Exception:
    """Return the error of ``request`` for an error of an object store's client, based on its class and HTTP status."""
    kind = type(error).__name__
    codes = [getattr(error, name, None) for name in ("status_code", "status", "code")]
    if isinstance(answer := getattr(error.__cause__, "response", None), dict):  # from botocore
        codes = [answer["ResponseMetadata"].get("HTTPStatusCode")]
    status = next((code for code in codes if isinstance(code, int)), None)
    if "Credentials" in kind:
        return ConfigError(
            f"{url} needs credentials ({error}); set them where the store's client looks for them", code="missing_input"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    if isinstance(error, FileNotFoundError) or kind in ("ErrObjNotFound", "ErrBckNotFound") or status == 404:
        return RejectRecord("missing_audio", f"{url} does not exist")
    if isinstance(error, PermissionError) or status in (401, 403):
        return RejectRecord("unreadable_audio", f"the credentials do not allow access to {url}: {error}")
    # A truncated or invalid response, for which botocore has no error class.
    is_odd = kind in ("ClientPayloadError", "HTTPClientError") or isinstance(error, (ValueError, LookupError))
    what = f"cannot fetch {url}: {error or kind}"
    if is_odd or (status is not None and status >= 400 and status not in (408, 429, 503)):
        return PassingError(RejectRecord("unreadable_audio", what))
    return PassingError(ConnectionError(what))
