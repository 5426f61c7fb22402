"""Folders in the identities of plans, and the differences of two identities in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sharmill.engine.differences import ABSENT, Difference, find_differences, show


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
