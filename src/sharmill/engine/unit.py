"""The values that pass between a stage and the engine: units, outputs, commit records, totals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sharmill.errors import FatalError
from sharmill.files.staging import PublishedFile
from sharmill.files.storage import checksum_bytes
from sharmill.manifest import Reject


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest piece of work, committed as a whole.

    Attributes:
        index: position in the plan.
        id: derived from the content, so that a commit record proves which work it is the record of.
        cost: predicted work, in the stage's ``cost_unit``.
        size: number of input records.
        params: the few values that the stage needs to find its records.
    """

    index: int
    id: str
    cost: float
    size: int
    params: dict[str, Any]


def make_unit(index: int, *, cost: float, size: int, params: dict[str, Any]) -> Unit:
    """Return a unit whose id is derived from its position and parameters."""
    content = msgspec.json.encode([index, size, params], order="sorted")
    return Unit(index=index, id=checksum_bytes(content), cost=cost, size=size, params=params)


@dataclass(kw_only=True)
class Output:
    """Result of one unit.

    Attributes:
        files: names, relative to the stage's root, of the files written in the staging folder, in the order in which
            they are to be published.
        num_out: records that go on to the next stage.
        rejects: records that do not.
        stats: numbers that ``finalize`` needs, small and JSON-encodable.
    """

    files: list[str]
    num_out: int
    rejects: list[Reject] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def check_accounts(self, unit: Unit) -> None:
        """Check that every record of the unit has ended exactly once.

        Raises:
            FatalError: the numbers do not add up, which is an error in the stage.
        """
        if self.num_out + len(self.rejects) != unit.size:
            raise FatalError(
                f"unit {unit.index}: {unit.size} records in, but {self.num_out} out and {len(self.rejects)} rejected",
                code="accounts",
            )


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a finished unit: written last, and its existence means that all else is in place.

    It counts for the plan with its ``token`` only. ``device_kind`` is that of its rank's processor, ``delays`` the part
    of its ``seconds`` that went into decoding, the model and the disk, as far as that was noted. ``memory_mb`` is the
    most that its process had held by then, ``memory_asked_mb`` what its job had asked for, 0 where that is not known.
    """

    token: str
    index: int
    id: str
    files: list[PublishedFile]
    num_in: int
    num_out: int
    rejects: dict[str, int]
    stats: dict[str, Any]
    seconds: float
    rank: int
    device_kind: str = ""
    delays: dict[str, float] = {}
    host: str = ""
    memory_mb: float = 0.0
    memory_asked_mb: float = 0.0

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())


def name_devices(kinds: Iterable[str]) -> list[str]:
    """Return the kinds of device that are named beside an output: none for CPUs alone, of which one is as another."""
    found = sorted(set(kinds) - {""})
    return [] if found == ["cpu"] else found


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The accounts of a whole stage. ``rejects`` counts by reason code; ``hours`` is audio that went on."""

    num_in: int
    num_out: int
    rejects: dict[str, int]
    hours: float
    notes: list[str] = field(default_factory=list)

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())

    def check(self, stage: str, expected_in: int) -> None:
        """Raise FatalError unless every input record ended exactly once."""
        if self.num_in != expected_in or self.num_out + self.num_rejected != self.num_in:
            raise FatalError(
                f"{stage}: accounts do not add up: {expected_in} records planned, {self.num_in} read, "
                f"{self.num_out} went on, {self.num_rejected} rejected",
                code="accounts",
            )
