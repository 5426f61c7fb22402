"""Identities of plans: versions and folders in them, and the differences of two in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET

import sharmill

_SHOWN_CHARACTERS: Final = 60
_FOLDER_KEYS: Final = {"folder", "from_run_dir"}
# Their values say nothing to people.
_CHECKSUMS: Final = {"input": "the input has other content", "files": "files of the dataset have changed"}


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of sharmill and of each package; ``absent`` where there is none."""
    found = {"sharmill": sharmill.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def identify_folder(folder: Path, run_dir: Path) -> dict[str, str]:
    """Return what identifies a folder in the identity of a plan, however its path is spelt.

    Links and ``..`` are resolved. A folder that lies elsewhere by now, but at the same place as seen from the run
    directory, counts as the same: so a project goes on when it was moved as a whole.
    """
    real = folder.resolve()
    return {"folder": str(real), "from_run_dir": os.path.relpath(real, run_dir.resolve())}


def find_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a clause for each difference of two identities: ``match.min_similarity is 0.7, was 0.6``."""
    changes = []
    for path, before, now in find_differences(old, new):
        top = path.partition(".")[0].partition("[")[0]
        changes.append(_CHECKSUMS.get(top) or f"{path} is {show(now)}, was {show(before)}")
    return list(dict.fromkeys(changes))


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost places at which two values differ, and what is there; keys in their alphabetical order.

    It is ``msgspec.UNSET`` where only the other has the key. Folders that ``identify_folder`` has identified are the
    same where their paths are, or their places as seen from the run directory.

    >>> list(find_differences({"a": [1, 2], "b": 3}, {"a": [1, 5], "b": 3}))
    [('a[1]', 2, 5)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() == new.keys() == _FOLDER_KEYS:
            if all(old[key] != new[key] for key in _FOLDER_KEYS):
                yield path, old["folder"], new["folder"]
            return
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            yield from find_differences(old.get(key, UNSET), new.get(key, UNSET), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from find_differences(left, right, f"{path}[{number}]")
    elif type(old) is not type(new) or old != new:
        yield path, old, new


def show(value: Any) -> str:
    """Return a value as JSON of at most 60 characters; ``absent`` for ``msgspec.UNSET``."""
    text = "absent" if value is UNSET else msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
