"""Units of work and the records of their results: outputs, commits, failed attempts, and the totals of a stage."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sharmill.errors import FatalError
from sharmill.files.checksums import checksum_bytes
from sharmill.files.staging import PublishedFile
from sharmill.manifest import Reject


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest piece of work, committed as a whole.

    Attributes:
        index: position in the plan.
        id: a checksum of the position, the size and the parameters; a commit with the same id stands for the same work.
        cost: predicted work, in the stage's ``cost_unit``.
        size: number of input records.
        params: the values that the stage needs to find the unit's records; keep them small.
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
        files: names of the files written in the staging folder, relative to the stage's root, in the order in which
            they must be published.
        num_out: number of records that continue to the next stage.
        rejects: the rejected records.
        stats: numbers that ``finalize`` needs; small and JSON-encodable.
        notes: an array with facts about the files, so that a later stage need not read them. It is stored in the run
            directory under a name made from the checksums of the files, so it is found only for exactly these files.
    """

    files: list[str]
    num_out: int
    rejects: list[Reject] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    notes: np.ndarray | None = None


class Commit(msgspec.Struct, tag="commit", tag_field="type", frozen=True, kw_only=True):
    """The record of a complete unit. It is written last, so its existence means that the output is in place.

    Attributes:
        token: the token of the plan; the record counts for this plan only.
        index, id: the index and the id of the unit.
        files: the published files.
        num_in, num_out: number of records read, and number of records that continue to the next stage.
        rejects: number of rejected records by reason code.
        stats: numbers for ``finalize``.
        seconds: duration of the attempt.
        rank: number of the rank.
        device_kind: the kind of device of the rank's processor.
        delays: the part of ``seconds`` spent on decoding, on the model and on the disk, as far as it was measured.
        slot: the host with the GPU or core of the rank.
        launch: the id of the launch of the rank.
        time: Unix time of the commit by the clock of the slot's host.
        memory_mb: peak memory of the rank's processes so far.
        memory_asked_mb: memory that the rank's job has requested; 0 if unknown.
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
    slot: str = ""
    launch: str = ""
    time: float = 0.0
    memory_mb: float = 0.0
    memory_asked_mb: float = 0.0

    def __post_init__(self) -> None:
        # Stages sum these values, so a damaged ledger must be refused here, when it is read.
        for key, value in self.stats.items():
            if ("seconds" in key or "clipped" in key) and not isinstance(value, (int, float)):
                raise ValueError(f"stats: {key} is not a number")

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())


def name_devices(kinds: Iterable[str]) -> list[str]:
    """Return the kinds of device to record with an output; empty if only CPUs were used, since they are equivalent."""
    found = sorted(set(kinds) - {""})
    return [] if found == ["cpu"] else found


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of a finished stage, and its products for later stages.

    Attributes:
        num_in, num_out: number of records read, and number of records that continue to the next stage.
        rejects: number of rejected records by reason code.
        hours: hours of audio in the records that continue.
        notes: sentences about the output, for display.
        products: files for other stages, by name; their paths are relative to the run directory.
        facts: small values for other stages, by name.
    """

    num_in: int
    num_out: int
    rejects: dict[str, int]
    hours: float
    notes: list[str] = []
    products: dict[str, PublishedFile] = {}
    facts: dict[str, Any] = {}

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())

    def check(self, stage: str, expected_in: int) -> None:
        """Raise FatalError unless every input record was either kept or rejected exactly once."""
        if self.num_in != expected_in or self.num_out + self.num_rejected != self.num_in:
            raise FatalError(
                f"{stage}: record counts do not add up: {expected_in} planned, {self.num_in} read, "
                f"{self.num_out} kept, {self.num_rejected} rejected",
                code="accounts",
            )


def add_up(commits: Sequence[Commit]) -> Totals:
    """Return the sums of the commits' counts; ``hours`` is the kept audio, computed from ``stats['seconds']``."""
    rejects = Counter[str]()
    for commit in commits:
        rejects.update(commit.rejects)
    return Totals(
        num_in=sum(commit.num_in for commit in commits),
        num_out=sum(commit.num_out for commit in commits),
        rejects=dict(rejects),
        hours=sum(commit.stats.get("seconds", 0.0) for commit in commits) / 3600,
    )


@dataclass(frozen=True)
class FailedAttempt:
    """The reason why an attempt at a unit failed: a message of one line, and the traceback or signal."""

    index: int
    message: str
    traceback: str
