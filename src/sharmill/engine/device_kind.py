"""The kind of device that a stage keeps to: that of its first rank, and of the units that are done."""

from __future__ import annotations

from collections.abc import Iterable

from sharmill.engine.stage import Stage
from sharmill.engine.stored import read_stored
from sharmill.engine.unit import Commit
from sharmill.storage import create_atomic, remove_tree, stopping_errors, write_atomic


def settle_device_kind(stage: Stage, commits: Iterable[Commit]) -> None:
    """Have the stage keep to the kind of what is done, or to any where nothing is; before its ranks begin."""
    path = stage.dir.device_kind
    kinds = sorted({commit.device_kind for commit in commits} - {""})
    if not kinds:
        remove_tree(path)
    elif not path.exists():
        write_atomic(path, kinds[0].encode())


def claim_device_kind(stage: Stage, kind: str) -> str:
    """Return the kind of device that the stage keeps to: ``kind``, where no rank was there before."""
    path = stage.dir.device_kind
    with stopping_errors(path):
        try:
            create_atomic(path, kind.encode())
        except FileExistsError:
            return read_stored(path).decode(errors="replace")
    return kind


def name_devices(kinds: Iterable[str]) -> list[str]:
    """Return the kinds of device that are named beside an output: none for CPUs alone, of which one is as another."""
    found = sorted(set(kinds) - {""})
    return [] if found == ["cpu"] else found
