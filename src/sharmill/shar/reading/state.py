"""The order of the cuts in an epoch, its division into parts, and the progress of each part.

The order is a pure function of (seed, epoch). Shards are permuted; every ``mix_shards`` consecutive shards of the
permutation form a **group**; a random number is drawn for every cut; and the epoch is ordered by (group, drawn number).
So the position of a cut depends only on its shard and its index in the shard. No cut has to be replayed, or even read,
to know which cuts come after it.

A shard is divided into **blocks** of consecutive cuts; all shards have the same number of blocks. Blocks are numbered
in the order of the permutation, and within a shard in a random order that depends on the epoch. Part p of P reads the
blocks whose number is p modulo P, in the order of the epoch. So it reads different blocks in every epoch, and about as
many cuts as any other part. Blocks and their numbers do not depend on P.

The progress records how far each part has read, so that any number of parts can read the rest. An epoch may have been
read with different numbers of parts P, one after the other; for each P, the progress stores the last position of every
part. A cut is left if, for each of these P, it comes after the last position of the part that it belonged to. The
progress can also list cuts that were read but not consumed; they are left regardless of all positions.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np

from sharmill.errors import ConfigError, refuse

# The number of blocks that a dataset should have: few enough that the blocks of a large dataset are whole shards, and
# enough to give hundreds of parts nearly equal shares.
_WANTED_BLOCKS = 4096
# Constants of SplitMix64.
_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_VERSION = 1
# The maximum numbers of epochs and parts in a state. No training has more, and code loops over them.
_MAX_EPOCH: Final = 1 << 20
_MAX_PARTS: Final = 1 << 20
_Number = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
_Draw = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=_MAX_PARTS)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX_PARTS)]


class Position(NamedTuple):
    """The position of a cut within an epoch; positions compare in the order of the cuts."""

    group: int
    draw: int
    block: int
    item: int


BEGINNING = Position(-1, 0, 0, 0)
END = Position(1 << 40, 0, 0, 0)


def count_blocks(num_shards: int, shard_size: int, block_size: int | None) -> int:
    """Return the number of blocks per shard, such that the blocks of a typical shard have at most ``block_size`` cuts.

    Args:
        num_shards: the number of shards.
        shard_size: the number of cuts in a typical shard. A larger shard has larger blocks.
        block_size: the maximum size of a block; by default whole shards, or smaller blocks if there are few shards.
    """
    if block_size is None:
        block_size = max(1, num_shards * shard_size // _WANTED_BLOCKS)
    return max(1, -(-shard_size // block_size))


class ShardPositions(NamedTuple):
    """The positions of a shard's cuts: cut n is at (group of the shard, ``draws[n]``, ``blocks[n]``, n)."""

    draws: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Order:
    """The order of all epochs of a dataset.

    Args:
        num_shards: the number of shards.
        blocks_per_shard: the number of blocks in each shard.
        shuffle: if False, use the order of the dataset.
        seed: the seed for permutations and drawn numbers.
        mix_shards: the number of shards in a group. Without ``shuffle`` each shard is its own group.
        sequential: if True, the cuts of a shard keep their relative order, because the shard can only be read in that
            order.
    """

    num_shards: int
    blocks_per_shard: int
    shuffle: bool = False
    seed: int = 0
    mix_shards: int = 1
    sequential: bool = False

    @property
    def group_size(self) -> int:
        return self.mix_shards if self.shuffle else 1

    @property
    def num_groups(self) -> int:
        return -(-self.num_shards // self.group_size)

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the shards (num_shards,) in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.num_shards)
        return np.argsort(_draw(self._key(epoch, 0), np.arange(self.num_shards, dtype=np.uint64)), kind="stable")

    def slots(self, group: int) -> range:
        """Return the slots (indices into the permutation) that form a group."""
        return range(group * self.group_size, min((group + 1) * self.group_size, self.num_shards))

    def group_of(self, block: int) -> int:
        """Return the group of a block."""
        return block // self.blocks_per_shard // self.group_size

    def positions(self, epoch: int, slot: int, count: int) -> ShardPositions:
        """Return the positions of the ``count`` cuts of the shard at a slot of the permutation."""
        items = np.arange(count, dtype=np.int64)
        number = min(count, self.blocks_per_shard)
        blocks = self._block_numbers(epoch, slot, number)[items * number // max(1, count)]
        if not self.shuffle:
            return ShardPositions(np.zeros(count, np.int64), blocks)
        draws = _draw(self._key(epoch, slot + 1), items.astype(np.uint64))
        return ShardPositions((np.sort(draws) if self.sequential else draws).astype(np.int64), blocks)

    def _block_numbers(self, epoch: int, slot: int, number: int) -> np.ndarray:
        """Return the numbers (number,) of the blocks of the shard at a slot.

        The numbers vary from epoch to epoch. If they were fixed, a cut would belong to the same part in every epoch
        whenever P divides the number of blocks per shard. If all short shards began at their first possible number,
        their cuts would all go to the same few parts.
        """
        key = self._key(epoch, -1 - slot)
        first = slot * self.blocks_per_shard + _mix_bits(key) % (self.blocks_per_shard - number + 1)
        if not self.shuffle:
            return first + np.arange(number)
        return first + np.argsort(_draw(key, np.arange(number, dtype=np.uint64)), kind="stable")

    def _key(self, epoch: int, stream: int) -> int:
        state = 0
        for value in (self.seed, epoch, stream) if self.shuffle else (0, 0, stream):
            state = _mix_bits((state + value) & _WORD)
        return state


def _mix_bits(value: int) -> int:
    """Return the SplitMix64 hash (Steele, Lea and Flood 2014), which is equal on all machines and library versions."""
    value = (value + _STEP) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _draw(key: int, numbers: np.ndarray) -> np.ndarray:
    """Return 53 pseudorandom bits per number, like ``_mix_bits`` but for arrays; JSON readers keep 53 bits exactly."""
    value = numbers * np.uint64(_STEP) + np.uint64(key)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))) >> np.uint64(11)


class _EpochState(msgspec.Struct):
    reached: list[tuple[_Index, _Count, _Number, _Draw, _Number, _Number]]
    unused: list[Annotated[list[_Number], msgspec.Meta(min_length=1)]]


class _State(msgspec.Struct):
    """The schema of the result of ``Progress.to_dict``."""

    identity: dict[str, Any]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=_MAX_EPOCH)]
    part: tuple[_Index, _Count] | None
    epochs: dict[str, _EpochState]
    num_damaged: Annotated[int, msgspec.Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``index`` of ``count`` parts, which reads the blocks whose number modulo ``count`` is ``index``."""

    index: int = 0
    count: int = 1

    def has(self, block: int) -> bool:
        return block % self.count == self.index


@dataclass(slots=True)
class EpochProgress:
    """The progress of one epoch.

    Args:
        reached: the last position that each part has reached.
        unused: items, by block, that were read but not used and are therefore left.
    """

    reached: dict[Part, Position] = field(default_factory=dict)
    unused: dict[int, set[int]] = field(default_factory=dict)

    def groups_left(self, order: Order, part: Part) -> Iterator[int]:
        """Yield, in order, the groups that may have cuts left for a part; groups known to be finished are skipped."""
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

    def add(self, other: "EpochProgress") -> None:
        """Add the progress of one or more other parts."""
        for part, position in other.reached.items():
            self.reached[part] = max(self.reached.get(part, BEGINNING), position)
        for block, items in other.unused.items():
            self.unused.setdefault(block, set()).update(items)


@dataclass(slots=True)
class Progress:
    """The progress of one part or, if ``part`` is None, of all parts together.

    Args:
        identity: the values that determine what positions mean, such as dataset and seed. States of readers with other
            values are refused.
        epoch: the epoch being read. Earlier epochs are finished.
        part: the part whose progress this is.
        epochs: the known progress in ``epoch`` and later epochs.
        num_damaged: the number of cuts, over all epochs, that were left out because they were damaged.
    """

    identity: dict[str, Any]
    epoch: int = 0
    part: Part | None = None
    epochs: dict[int, EpochProgress] = field(default_factory=dict)
    num_damaged: int = 0

    def current(self) -> EpochProgress:
        return self.epochs.setdefault(self.epoch, EpochProgress())

    def take(self, position: Position | None) -> None:
        """Record that the part reached a position. Padding has none and changes nothing."""
        if position is None:
            return
        assert self.part is not None
        known = self.current()
        # A cut that was read but not used lies before the position reached, which then does not change.
        if position > known.reached.get(self.part, BEGINNING):
            known.reached[self.part] = position
        if position == END:
            known.unused.clear()
        elif items := known.unused.get(position.block):
            items.discard(position.item)
            if not items:
                del known.unused[position.block]

    def go_back_to(self, first: int) -> None:
        """Return to an earlier epoch, marking the epochs in between as finished by this part."""
        assert self.part is not None
        for epoch in range(first, self.epoch):
            self.epochs.setdefault(epoch, EpochProgress()).reached[self.part] = END
        self.epoch = first

    def skip_ended(self, *parts: Part) -> None:
        """Advance to the first epoch in which these parts have cuts left."""
        ends = dict.fromkeys(parts, END)
        while (known := self.current()).reached.items() >= ends.items() and not known.unused:
            del self.epochs[self.epoch]
            self.epoch += 1

    def for_part(self, part: Part) -> "Progress":
        """Return a copy with which ``part`` continues; raise ConfigError if this progress belongs to another part."""
        if self.part not in (None, part):
            raise ConfigError(
                f"the state belongs to part {self.part.index} of {self.part.count}, but this is part {part.index} of "
                f"{part.count}: merge the states of all parts with merge_states",
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
            # Divide the total of left-out cuts among the parts, so that the sum stays correct.
            share, rest = divmod(num_damaged, part.count)
            num_damaged = share + (part.index < rest)
        return Progress(self.identity, self.epoch, part, epochs, num_damaged)

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as numbers, strings and lists, for JSON and checkpoints."""
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
    def from_dict(cls, state: Mapping[str, Any]) -> "Progress":
        """Read the result of ``to_dict``; raise ConfigError if ``state`` is not the state of a reader."""
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
                raise ValueError("an epoch is out of range")
            part = None if found.part is None else Part(*found.part)
            return cls(found.identity, found.epoch, part, epochs, found.num_damaged)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:  # includes msgspec's errors
            raise ConfigError(f"this is not the state of a Shar reader: {error!r}", code="wrong_state") from error


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all parts into one, for a reader with any number of ranks and workers.

    Args:
        states: the ``state_dict()`` of every part: of each worker of each rank.

    Returns:
        The state for ``load_state_dict`` on every rank. If the number of parts is unchanged, each part continues where
        it stopped.

    Raises:
        ConfigError: a part is missing or occurs twice, or the states belong to different readers.

    Example:
        >>> one = merge_states([rank_0.state_dict(), rank_1.state_dict()])  # doctest: +SKIP
        >>> open_shar("data/librispeech", rank=2, world_size=3).data.load_state_dict(one)  # doctest: +SKIP
    """
    parts = [Progress.from_dict(state) for state in states]
    refuse(
        (not parts, "there is no state to merge"),
        (any(progress.part is None for progress in parts), "a merged state cannot be merged again"),
        code="wrong_state",
    )
    found = Counter(f"{progress.part.index} of {progress.part.count}" for progress in parts if progress.part)
    count = next(progress.part.count for progress in parts if progress.part)
    wanted = Counter(f"{index} of {count}" for index in range(count))
    if odd := sorted({**(wanted - found), **(found - wanted)}):
        raise ConfigError(
            f"part {odd[0]} is missing, occurs twice, or belongs to a reader with a different number of parts: "
            "merge the states of all parts of one reader, each exactly once",
            code="wrong_state",
        )
    merged = Progress(
        parts[0].identity,
        min(progress.epoch for progress in parts),
        num_damaged=sum(progress.num_damaged for progress in parts),
    )
    for progress in parts:
        check_identity(progress.identity, merged.identity, "the states of two parts")
        progress.go_back_to(merged.epoch)
        for epoch, known in progress.epochs.items():
            merged.epochs.setdefault(epoch, EpochProgress()).add(known)
    merged.skip_ended(*(Part(index, count) for index in range(count)))
    return merged.to_dict()


def check_identity(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raise ConfigError with the first difference between two identities, if there is one."""
    for key in {**found, **expected}:
        if found.get(key) != expected.get(key):
            raise ConfigError(
                f"{what} differ in {key}: {found.get(key)!r} and {expected.get(key)!r}", code="wrong_state"
            )
