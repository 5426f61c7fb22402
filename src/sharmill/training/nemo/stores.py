"""Files in stores (``ais://``, ``s3://``, ``gs://``) for NeMo's types: NeMo reads copies in a cache.

Read from the store, a tar that is cut off would lose its end with a warning, and lhotse would send all URLs to AIStore.
The cache is in the folder that ``NEMO_DATA_STORE_CACHE_DIR`` names, or that of the user.
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
# The copies whose paths NeMo has got last are not evicted before it opens them.
_held: Final[deque[Path]] = deque(maxlen=4 * FETCHES_AT_ONCE)


def is_stored(name: str) -> bool:
    """Return True for the URL of a store; other URLs and pipes are left to NeMo."""
    return _SCHEMES.match(name) is not None


def copied(name: str) -> str:
    """Return the path of a file: of a copy in the cache, if it is in a store.

    Raises:
        ConfigError: the store does not give it, or something is missing on this machine.
    """
    if not is_stored(name):
        return name
    copy = _ask(name, RemoteLocation.fetch)
    _held.append(copy)
    return str(copy)


def version_of(url: str) -> Version:
    """Return the version that a store has of a file, and remove the copy of another one; raises as ``copied``."""
    return Version(*_ask(url, RemoteLocation.version))


def refuse_command(source: Any) -> None:
    """Raise ConfigError for audio that lhotse would run: NeMo takes pipe:// in a manifest for the scheme of a URL."""
    if isinstance(source, str) and source.startswith("pipe:"):
        raise ConfigError(f"audio of the data is a command, which is not run: {source!r}", code="bad_manifest")


def _ask(url: str, call: Callable[[RemoteLocation], Any]) -> Any:
    folder = os.environ.get("NEMO_DATA_STORE_CACHE_DIR")
    try:
        return call(RemoteLocation(url, Cache.at(Path(folder, "sharmill") if folder else None)))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), code="missing_input") from error
