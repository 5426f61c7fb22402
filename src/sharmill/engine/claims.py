"""Claims: the right of one rank to one unit, as files that are created exclusively and never change.

The claim on a unit is the file ``<unit>.<generation>``, whose content names its owner; that of the highest generation
holds. Who takes a unit over, from a rank that has given it back or whose heartbeat is stale, creates the next
generation. Of two that try, one succeeds, and neither can push a newer owner out: that one has created a later name.
A claim is no guard. A rank that was taken for dead may go on with its unit; both bring the same bytes then.
"""

from __future__ import annotations

from pathlib import Path

from sharmill.engine.stored import read_stored
from sharmill.storage import stopping_errors


class Claims:
    """The claims of one rank process on the units of a stage.

    Args:
        folder: of the claims of the stage's plan.
        owner: the random id of this process.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner.encode()

    def make(self, unit: int, generation: int) -> bool:
        """Claim a unit; return False if another rank has this generation of the claim."""
        path = self._path(unit, generation)
        with stopping_errors(path):
            try:
                with path.open("xb") as stream:
                    stream.write(self._owner)
            except FileExistsError:
                # The server's answer may have been lost, and the client have asked it again.
                return read_stored(path) == self._owner
        return True

    def owner(self, unit: int, generation: int) -> str | None:
        """Return the owner of a claim, "" if that is not written yet, or None if there is no such claim."""
        try:
            return read_stored(self._path(unit, generation)).decode("ascii", "replace")
        except FileNotFoundError:
            return None

    def latest(self) -> dict[int, int]:
        """Return the highest generation of the claims on each unit."""
        found: dict[int, int] = {}
        for path in self._folder.iterdir():
            unit, _, generation = path.name.partition(".")
            if unit.isdecimal() and generation.isdecimal():
                found[int(unit)] = max(found.get(int(unit), 0), int(generation))
        return found

    def _path(self, unit: int, generation: int) -> Path:
        return self._folder / f"{unit}.{generation}"
