"""Units of work, and the records of how they ended: outputs, commits, failed attempts, totals of a stage."""

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
        notes: an array about the files, which saves a later stage reading them. It lies in the run directory under a
            name made from their checksums, so that it is found for these bytes only.
    """

    files: list[str]
    num_out: int
    rejects: list[Reject] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    notes: np.ndarray | None = None


class Commit(msgspec.Struct, tag="commit", tag_field="type", frozen=True, kw_only=True):
    """The record of a finished unit: written last, and its existence means that all else is in place.

    It counts for the plan with its ``token`` only. ``slot`` is where it was done, in the ``launch`` of ranks that is
    named, at a ``time`` by the clock of the slot's host. ``device_kind`` is that of its rank's processor, ``delays``
    the part of its ``seconds`` that went into decoding, the model and the disk, as far as that was noted.
    ``memory_mb`` is the most that its process had held by then, ``memory_asked_mb`` what its job had asked for, 0 if
    that is not known.
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
        # Stages add these up; a damaged ledger may hold anything, and is refused when it is read.
        for key, value in self.stats.items():
            if ("seconds" in key or "clipped" in key) and not isinstance(value, (int, float)):
                raise ValueError(f"stats: {key} is not a number")

    @property
    def num_rejected(self) -> int:
        return sum(self.rejects.values())


def name_devices(kinds: Iterable[str]) -> list[str]:
    """Return the kinds of device to be named beside an output; empty if only CPUs were used, which are equivalent."""
    found = sorted(set(kinds) - {""})
    return [] if found == ["cpu"] else found


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of a finished stage, and what it leaves for the stages behind it.

    Attributes:
        rejects: counts by reason code.
        hours: audio that went on.
        notes: sentences about the output.
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
        """Raise FatalError unless every input record ended exactly once."""
        if self.num_in != expected_in or self.num_out + self.num_rejected != self.num_in:
            raise FatalError(
                f"{stage}: accounts do not add up: {expected_in} records planned, {self.num_in} read, "
                f"{self.num_out} went on, {self.num_rejected} rejected",
                code="accounts",
            )


def add_up(commits: Sequence[Commit]) -> Totals:
    """Return the totals of the commits' counts; ``hours`` from ``stats['seconds']``, the audio that went on."""
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
    """Reason why an attempt at a unit failed: one line, and the traceback or the signal."""

    index: int
    message: str
    traceback: str
