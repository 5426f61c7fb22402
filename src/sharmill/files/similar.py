"""Names that look alike: they differ in Unicode form, as on macOS, in case, or in the kind of whitespace."""

import os
import re
import unicodedata
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

_DIFFERENCES: Final = ("Unicode form (NFC or NFD)", "upper and lower case", "kind of blanks")
# Per-process limits on the number of folders listed, and on the number of names, per folder and in total. Every missing
# file may be in a different folder, and listing many names on a shared disk takes many requests.
_MOST_FOLDERS: Final = 64
_MOST_NAMES: Final = 200_000


class Names:
    """A set of names, stored as hashes of 24 bytes per name."""

    def __init__(self, names: Iterable[str]) -> None:
        hashes = np.fromiter((hash(form) for name in names for form in _fold(name)), np.int64)
        self._hashes = np.sort(hashes.reshape(-1, len(_DIFFERENCES)), axis=0)

    def __len__(self) -> int:
        return len(self._hashes)

    def describe(self, wanted: str) -> str:
        """Return the end of a sentence about a missing name if a similar name exists, otherwise an empty text.

        >>> Names(["One.wav"]).describe("one.wav")
        "; a similar name differs from 'one.wav' in upper and lower case: rename it, or correct the path"
        """
        for hashes, form, what in zip(self._hashes.T, _fold(wanted), _DIFFERENCES, strict=True):
            if np.searchsorted(hashes, hash(form)) < np.searchsorted(hashes, hash(form), "right"):
                return f"; a similar name differs from {wanted!r} in {what}: rename it, or correct the path"
        return ""


def _fold(name: str) -> tuple[str, str, str]:
    """Return increasingly normalized forms of a name, one for each of ``_DIFFERENCES``."""
    composed = unicodedata.normalize("NFC", name)
    return composed, composed.casefold(), re.sub(r"[\s\u200b\ufeff]+", " ", composed.casefold())


# Folders that this process has listed; a large folder is stored without names.
listed: Final[dict[Path, Names]] = {}


def _list(folder: Path) -> Names:
    """Return the names in a folder; none if listing it would exceed the limits."""
    if folder not in listed and len(listed) < _MOST_FOLDERS and sum(map(len, listed.values())) <= _MOST_NAMES:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES + 1)]
        listed[folder] = Names(names if len(names) <= _MOST_NAMES else ())
    return listed.get(folder, Names(()))


def describe_similar(path: str | Path) -> str:
    """Return the end of a sentence about a missing file if a similar path exists, otherwise an empty text.

    This also describes a link in the path whose target is missing.
    """
    missing = Path(path)
    try:
        while not missing.parent.exists():
            missing = missing.parent
        if not os.path.lexists(missing):
            return _list(missing.parent).describe(missing.name)
        target = os.path.realpath(missing)
        return "" if os.path.lexists(target) else f"; {missing} is a link to {target}, which is missing"
    except OSError:  # the folder cannot be listed
        return ""
