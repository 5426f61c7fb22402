"""Cached copies of files in object stores (``ais://``, ``s3://``, ``gs://``), which NeMo reads in place of the URLs.

If NeMo read from the store, it would drop the rest of a truncated tar with only a warning, and lhotse would send all
URLs to AIStore. The cache is in the folder ``NEMO_DATA_STORE_CACHE_DIR`` or, if that is not set, in the user's cache.
"""

import os
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sharmill.errors import ConfigError
from sharmill.files.cache import Cache
from sharmill.files.clients import FETCHES_AT_ONCE, Version
from sharmill.files.location import RemoteLocation

_SCHEMES: Final = re.compile(r"(ais|s3|gs)://")
# References to the latest copies, which prevent their eviction before NeMo opens them.
_held: Final[deque[Path]] = deque(maxlen=4 * FETCHES_AT_ONCE)


def is_stored(name: str) -> bool:
    """Return True for the URL of an object store; other URLs and pipes are left to NeMo."""
    return _SCHEMES.match(name) is not None


def copied(name: str) -> str:
    """Return the local path of a file; a file in an object store is copied to the cache first.

    Raises:
        ConfigError: the file cannot be downloaded, or a package or an environment variable for it is missing.
    """
    if not is_stored(name):
        return name
    copy = _ask(name, RemoteLocation.fetch)
    _held.append(copy)
    return str(copy)


def version_of(url: str) -> Version:
    """Return a file's version in the object store and remove an outdated copy; raises the errors of ``copied``."""
    return Version(*_ask(url, RemoteLocation.version))


def refuse_command(source: Any) -> None:
    """Raise ConfigError if audio is a command: NeMo accepts pipe:// URLs in manifests, and lhotse would run them."""
    if isinstance(source, str) and source.startswith("pipe:"):
        raise ConfigError(f"the audio is a command, which is not run: {source!r}; name a file", code="bad_manifest")


def _ask(url: str, call: Callable[[RemoteLocation], Any]) -> Any:
    folder = os.environ.get("NEMO_DATA_STORE_CACHE_DIR")
    try:
        return call(RemoteLocation(url, Cache.at(Path(folder, "sharmill") if folder else None)))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), code="missing_input") from error
