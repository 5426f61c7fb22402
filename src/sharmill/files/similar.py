"""Names that are alike to the eye: they differ in the Unicode form, as on macOS, in capitals or in kinds of blanks."""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

_DIFFERENCES: Final = ("Unicode form (NFC or NFD)", "upper and lower case", "kind of blanks")


class Names:
    """A set of names, of which it keeps 24 bytes each."""

    def __init__(self, names: Iterable[str]) -> None:
        hashes = np.fromiter((hash(form) for name in names for form in _fold(name)), np.int64)
        self._hashes = np.sort(hashes.reshape(-1, len(_DIFFERENCES)), axis=0)

    def describe(self, wanted: str) -> str:
        """Return the end of a sentence about a missing name, if another name is alike; else an empty text.

        >>> Names(["One.wav"]).describe("one.wav")
        "; there is one that differs from 'one.wav' in upper and lower case: rename it, or correct the path"
        """
        for hashes, form, what in zip(self._hashes.T, _fold(wanted), _DIFFERENCES, strict=True):
            if np.searchsorted(hashes, hash(form)) < np.searchsorted(hashes, hash(form), "right"):
                return f"; there is one that differs from {wanted!r} in {what}: rename it, or correct the path"
        return ""


def _fold(name: str) -> tuple[str, str, str]:
    """Return forms of a name, each without one difference more."""
    composed = unicodedata.normalize("NFC", name)
    return composed, composed.casefold(), re.sub(r"[\s\u200b\ufeff]+", " ", composed.casefold())


@lru_cache(maxsize=4)
def _list(folder: Path) -> Names:
    return Names(path.name for path in folder.iterdir())


def describe_similar(path: str | Path) -> str:
    """Return the end of a sentence about a missing file, if it or a folder of its path has another spelling there."""
    missing = Path(path)
    try:
        while not missing.parent.exists():
            missing = missing.parent
        return _list(missing.parent).describe(missing.name)
    except OSError:  # it may not be listed
        return ""
