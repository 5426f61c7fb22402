"""Identities of plans: versions and folders in them, and the differences of two in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

import sharmill

_SHOWN_CHARACTERS: Final = 60


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


def is_same_folder(one: Any, other: Any) -> bool:
    """Return True if two values of ``identify_folder`` stand for the same folder; for other values False."""
    keys = {"folder", "from_run_dir"}
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != keys or other.keys() != keys:
        return False
    return any(one[key] == other[key] for key in keys)


def find_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a clause for each difference of two identities: ``match.min_similarity is 0.7, was 0.6``."""
    same = _without_same_folders(old, new)
    return list(dict.fromkeys(_describe(difference) for difference in find_differences(same, new)))


def _without_same_folders(old: Any, new: Any) -> Any:
    """Return ``old`` with the folders of ``new`` in it where they are the same."""
    if is_same_folder(old, new):
        return new
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _without_same_folders(value, new.get(key)) for key, value in old.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [_without_same_folders(left, right) for left, right in zip(old, new, strict=True)]
    return old


def _describe(difference: Difference) -> str:
    path, old, new = difference
    top = path.partition(".")[0].partition("[")[0]
    if top == "input":
        return "the input has other content"
    if top == "files":
        return "files of the dataset have changed"
    if path.endswith(".from_run_dir"):
        return f"{path.removesuffix('.from_run_dir')} lies elsewhere as seen from the run directory"
    path = path.removesuffix(".folder")
    if top == "versions":
        return f"the version of {path.removeprefix('versions.')} is {_plain(new)}, was {_plain(old)}"
    if old is ABSENT:
        return f"{path} is {show(new)}, was not there"
    if new is ABSENT:
        return f"{path} is gone, was {show(old)}"
    return f"{path} is {_plain(new)}, was {_plain(old)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value and "\n" not in value and len(value) < 60 else show(value)


class _Absent:
    """The value of a key that is not there."""


ABSENT: Final = _Absent()


class Difference(NamedTuple):
    """A place at which two values differ, such as ``match.min_similarity``; ``ABSENT`` where only one has the key."""

    path: str
    old: Any
    new: Any


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """Yield the innermost places at which two values differ, keys in their alphabetical order.

    >>> [tuple(found) for found in find_differences({"a": [1, 2], "b": 3}, {"a": [1, 5], "b": 3})]
    [('a[1]', 2, 5)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            yield from find_differences(old.get(key, ABSENT), new.get(key, ABSENT), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from find_differences(left, right, f"{path}[{number}]")
    elif old is ABSENT or new is ABSENT or _encode(old) != _encode(new):
        yield Difference(path, old, new)


def show(value: Any) -> str:
    """Return a value as JSON of at most 60 characters; ``null`` for one that is absent."""
    text = "null" if value is ABSENT else msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
