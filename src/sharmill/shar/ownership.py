"""The guard of dataset directories: a run changes and removes only what it has planned, and nobody else's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from sharmill.engine.identity import identify_folder, is_same_folder
from sharmill.engine.unit import Commit
from sharmill.storage import PublishedFile, checksum


def was_planned_for(plan_identity: Path, run_dir: Path, dataset_dir: Path) -> bool:
    """Return True if a stage's plan is there and was made for this dataset directory.

    A run directory may have served another one before: then what lies in this one is not the plan's. Where the
    directory has another path by now, but the same place as seen from the run directory, the project was moved, or
    somebody else's dataset lies there: then it must hold the files of one of the stage's commits.

    Args:
        plan_identity: the identity file of the stage's plan.
    """
    try:
        planned = msgspec.json.decode(plan_identity.read_bytes())["dataset_dir"]
    except FileNotFoundError:
        return False
    present = identify_folder(dataset_dir, run_dir)
    if not is_same_folder(planned, present):
        return False
    return planned["folder"] == present["folder"] or any(
        all(_is_in_place(dataset_dir, file) for file in files)
        for files in _committed_files(plan_identity.parent.parent / "ledger")
    )


def _committed_files(ledger: Path) -> Iterator[list[PublishedFile]]:
    for path in sorted(ledger.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                if files := msgspec.json.decode(line, type=Commit).files:
                    yield files


def _is_in_place(folder: Path, file: PublishedFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size and checksum(path) == file.xxh3
