"""The progress of an epoch: what has been read of it and by which parts, so that any number of parts can read the rest.

For every number of parts P that read an epoch, and every part, the last position that it reached is kept. A cut is left
if it comes after that position for each of these P, the part being the one that the cut belonged to then. Cuts that
were read but not consumed can be named as well; they are left whatever the positions say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from sharmill.errors import ConfigError
from sharmill.shar.reading.order import BEGINNING, END, Order, Position, ShardPositions

_VERSION = 1
# More epochs and parts than any training has: they are counted through.
_MAX_EPOCH: Final = 1 << 20
_MAX_PARTS: Final = 1 << 20
_Number = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
_Draw = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=_MAX_PARTS)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX_PARTS)]


class _EpochState(msgspec.Struct):
    reached: list[tuple[_Index, _Count, _Number, _Draw, _Number, _Number]]
    unused: list[Annotated[list[_Number], msgspec.Meta(min_length=1)]]


class _State(msgspec.Struct):
    """The form of ``Progress.to_dict``."""

    identity: dict[str, Any]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=_MAX_EPOCH)]
    part: tuple[_Index, _Count] | None
    epochs: dict[str, _EpochState]
    num_damaged: Annotated[int, msgspec.Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count``: has the blocks whose number is ``index`` modulo ``count``."""

    index: int = 0
    count: int = 1

    def has(self, block: int) -> bool:
        return block % self.count == self.index


@dataclass(slots=True)
class EpochProgress:
    """The progress of one epoch.

    Args:
        reached: the last position read, by the part that read it.
        unused: items by block, that were read and are left all the same.
    """

    reached: dict[Part, Position] = field(default_factory=dict)
    unused: dict[int, set[int]] = field(default_factory=dict)

    def groups_left(self, order: Order, part: Part) -> Iterator[int]:
        """Yield the groups that may have anything left for a part, in order, without those that surely have nothing."""
        unused = {order.group_of(block) for block in self.unused}
        first = self.reached.get(part, BEGINNING).group
        for count in {part.count for part in self.reached}:
            first = max(first, min(self.reached.get(Part(index, count), BEGINNING).group for index in range(count)))
        yield from sorted(group for group in unused if group < first)
        yield from range(max(first, 0), order.num_groups)

    def left(self, group: int, positions: ShardPositions) -> np.ndarray:
        """Return a mask (count,) of the cuts of a shard that are left."""
        items = np.arange(len(positions.blocks))
        left = np.ones(len(items), bool)
        for count in {part.count for part in self.reached}:
            ends = [self.reached.get(Part(index, count), BEGINNING) for index in range(count)]
            last = np.array(ends, np.int64)[positions.blocks % count]
            after = items > last[:, 3]
            for found, limit in ((positions.blocks, last[:, 2]), (positions.draws, last[:, 1]), (group, last[:, 0])):
                after = (found > limit) | ((found == limit) & after)
            left &= after
        for block, unused in self.unused.items():
            left |= (positions.blocks == block) & np.isin(items, list(unused))
        return left

    def add(self, other: EpochProgress) -> None:
        """Add the progress of another part, or of several."""
        for part, position in other.reached.items():
            self.reached[part] = max(self.reached.get(part, BEGINNING), position)
        for block, items in other.unused.items():
            self.unused.setdefault(block, set()).update(items)


@dataclass(slots=True)
class Progress:
    """The progress of one part, or, where ``part`` is None, of all parts together.

    Args:
        identity: what the positions mean: dataset, seed and so on. States of other readers are refused.
        epoch: the epoch being read. Of earlier ones nothing is left.
        part: whose progress it is.
        epochs: what is known of ``epoch`` and later ones.
        num_damaged: cuts that were left out because they were damaged, in all epochs.
    """

    identity: dict[str, Any]
    epoch: int = 0
    part: Part | None = None
    epochs: dict[int, EpochProgress] = field(default_factory=dict)
    num_damaged: int = 0

    def current(self) -> EpochProgress:
        known = self.epochs.get(self.epoch)
        if known is None:
            known = self.epochs[self.epoch] = EpochProgress()
        return known

    def take(self, position: Position | None) -> None:
        """Note that the part reached a position. Padding, which has none, changes nothing."""
        if position is None:
            return
        assert self.part is not None
        known = self.current()
        # Cuts that were left unused come from before the position that the part had reached.
        if position > known.reached.get(self.part, BEGINNING):
            known.reached[self.part] = position
        if position == END:
            known.unused.clear()
        elif items := known.unused.get(position.block):
            items.discard(position.item)
            if not items:
                del known.unused[position.block]

    def begin_with_first_epoch(self) -> None:
        """Go back to the first epoch of which anything is known; this part has read those between to their ends."""
        assert self.part is not None
        first = min([self.epoch, *self.epochs])
        for epoch in range(first, self.epoch):
            self.epochs.setdefault(epoch, EpochProgress()).reached[self.part] = END
        self.epoch = first

    def next_epoch(self) -> None:
        self.epochs.pop(self.epoch, None)
        self.epoch += 1

    def for_part(self, part: Part) -> Progress:
        """Return a copy for the part that goes on with it."""
        if self.part not in (None, part):
            raise ConfigError(
                f"the state is that of part {self.part.index} of {self.part.count}, and this is part {part.index} of "
                f"{part.count}: put the states of all parts together with merge_states",
                code="wrong_state",
            )
        epochs = {
            epoch: EpochProgress(
                dict(known.reached), {block: set(items) for block, items in known.unused.items() if part.has(block)}
            )
            for epoch, known in self.epochs.items()
        }
        num_damaged = self.num_damaged
        if self.part != part:
            # Of what all parts together have left out each takes a share, so that the sum stays right.
            share, rest = divmod(num_damaged, part.count)
            num_damaged = share + (part.index < rest)
        return Progress(self.identity, self.epoch, part, epochs, num_damaged)

    def to_dict(self) -> dict[str, Any]:
        """Return it as numbers, texts and lists, for JSON and checkpoints."""
        return {
            "version": _VERSION,
            "identity": dict(self.identity),
            "epoch": self.epoch,
            "part": None if self.part is None else [self.part.index, self.part.count],
            "num_damaged": self.num_damaged,
            "epochs": {
                str(epoch): {
                    "reached": [[part.index, part.count, *position] for part, position in known.reached.items()],
                    "unused": [[block, *sorted(items)] for block, items in sorted(known.unused.items())],
                }
                for epoch, known in self.epochs.items()
                if known.reached or known.unused
            },
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Progress:
        """Read what ``to_dict`` made; raise ConfigError where it is not the state of a reader."""
        try:
            if state["version"] != _VERSION:
                raise ConfigError(
                    f"the state has version {state['version']}; this sharmill reads {_VERSION}", code="wrong_state"
                )
            found = msgspec.convert(dict(state), _State)
            epochs = {
                int(epoch): EpochProgress(
                    {Part(*row[:2]): Position(*row[2:]) for row in known.reached},
                    {row[0]: set(row[1:]) for row in known.unused},
                )
                for epoch, known in found.epochs.items()
            }
            if any(not 0 <= epoch <= _MAX_EPOCH for epoch in epochs):
                raise ValueError("there is no such epoch")
            part = None if found.part is None else Part(*found.part)
            return cls(found.identity, found.epoch, part, epochs, found.num_damaged)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise ConfigError(f"this is not the state of a Shar reader: {error!r}", code="wrong_state") from error


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all parts into one, for a reader of any number of ranks and workers.

    Args:
        states: of ``state_dict()`` of every part: each rank, and there each worker.

    Returns:
        The state for ``load_state_dict`` on every rank. With as many parts as before, each goes on with its own.

    Raises:
        ConfigError: a part is missing or there twice, or they do not belong to one reader.

    Example:
        >>> one = merge_states([rank_0.state_dict(), rank_1.state_dict()])  # doctest: +SKIP
        >>> open_shar("data/librispeech", rank=2, world_size=3).data.load_state_dict(one)  # doctest: +SKIP
    """
    parts = [Progress.from_dict(state) for state in states]
    if not parts:
        raise ConfigError("there is no state to merge", code="wrong_state")
    _check_complete([progress.part for progress in parts])
    identity = parts[0].identity
    for progress in parts[1:]:
        check_identity(progress.identity, identity, "the states of two parts")
    merged = Progress(identity, epoch=min(progress.epoch for progress in parts))
    merged.num_damaged = sum(progress.num_damaged for progress in parts)
    for progress in parts:
        assert progress.part is not None
        for epoch in range(merged.epoch, progress.epoch):
            merged.epochs.setdefault(epoch, EpochProgress()).add(EpochProgress({progress.part: END}))
        for epoch, known in progress.epochs.items():
            merged.epochs.setdefault(epoch, EpochProgress()).add(known)
    return merged.to_dict()


def check_identity(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raise ConfigError that names the first difference."""
    for key in {**found, **expected}:
        if found.get(key) != expected.get(key):
            raise ConfigError(
                f"{what} differ in {key}: {found.get(key)!r} and {expected.get(key)!r}", code="wrong_state"
            )


def _check_complete(found: Sequence[Part | None]) -> None:
    if None in found:
        raise ConfigError("a state that is merged already cannot be merged once more", code="wrong_state")
    counts = sorted({part.count for part in found if part})
    if len(counts) > 1:
        raise ConfigError(
            f"the states come from readers with {counts[0]} and with {counts[1]} parts", code="wrong_state"
        )
    indices = sorted(part.index for part in found if part)
    if indices != list(range(counts[0])):
        missing = sorted(set(range(counts[0])) - set(indices))
        raise ConfigError(
            f"of {counts[0]} parts, the states of {missing} are missing"
            if missing
            else f"there are {len(indices)} states of {counts[0]} parts: some are there twice",
            code="wrong_state",
        )
