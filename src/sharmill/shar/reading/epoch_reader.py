"""Reading of the cuts that are left in an epoch for a part (a rank or one of its workers), with audio decoded ahead."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from sharmill.errors import DamagedShard, RejectRecord, refuse
from sharmill.files.clients import FETCHES_AT_ONCE
from sharmill.files.location import Location, check_copy, local
from sharmill.prefetch import prefetch
from sharmill.shar.reading.decoding import decode_audio
from sharmill.shar.reading.open_shard import OpenShard
from sharmill.shar.reading.shard_source import ReadableShard, ShardSource
from sharmill.shar.reading.state import (
    EpochProgress,
    Order,
    Part,
    Position,
    Progress,
    ShardPositions,
    count_blocks,
)

PADDING: Final = "shar_padding"

# The maximum number of open shards with shuffle="global". Each open shard has one open file per field.
_OPEN_SHARDS = 64
# If a shard has at most this many cuts, their positions are computed from the index without opening the shard.
_MANY_CUTS = 1 << 17

# Draws, blocks, items and slots of the cuts that are left in a group; see the module ``state``.
_Choice = tuple[list[int], list[int], list[int], list[int]]
# The position of a cut (None for padding); the cut, the damage that replaces it, or None if it is left out; and its
# shard.
Found = tuple[Position | None, Any, ReadableShard | DamagedShard]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """The options of ``open_shar``; see its documentation."""

    shuffle: bool | Literal["global"] = False
    seed: int = 0
    mix_shards: int = 8
    block_size: int | None = None
    rank: int = 0
    world_size: int = 1
    split_by_worker: bool = True
    infinite: bool = False
    tail: str = "keep"
    decode_threads: int = 0
    decode_prefetch: int = 0
    on_damage: str = "raise"
    max_damaged: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is invalid."""
        refuse(
            (not 0 <= self.rank < self.world_size,
             f"rank is {self.rank}: it must be from 0 to world_size - 1, and world_size is {self.world_size}"),
            (self.shuffle not in (True, False, "global"),
             f"shuffle is {self.shuffle!r}: it must be true, false or global"),
            (self.mix_shards < 1, f"mix_shards is {self.mix_shards}: at least 1 shard must be open"),
            (self.block_size is not None and self.block_size < 1,
             f"block_size is {self.block_size}: it must be at least 1"),
            (self.tail not in ("keep", "drop", "pad"), f"tail is {self.tail!r}: it must be keep, drop or pad"),
            (self.infinite and self.tail != "keep",
             f"tail={self.tail!r} applies to single epochs, but infinite=True has no last epoch: remove one of them"),
            (self.decode_threads < 0 or self.decode_prefetch < 0,
             "decode_threads and decode_prefetch cannot be negative"),
            (self.on_damage not in ("raise", "skip"), f"on_damage is {self.on_damage!r}: it must be raise or skip"),
            (self.max_damaged is not None and self.on_damage != "skip",
             "max_damaged limits the cuts that on_damage='skip' leaves out: set on_damage='skip' as well"),
            (self.max_damaged is not None and self.max_damaged < 0,
             f"max_damaged is {self.max_damaged}: it cannot be negative"),
            (self.on_damage == "skip" and self.tail != "keep",
             f"tail={self.tail!r} counts cuts before they are read, but on_damage='skip' leaves some out: use one"),
        )  # fmt: skip


class EpochReader:
    """Reads the cuts of a source in the order of any epoch."""

    def __init__(self, source: ShardSource, options: ReadOptions) -> None:
        self.source = source
        self._options = options

    @cached_property
    def order(self) -> Order:
        """The order of all epochs."""
        options, source = self._options, self.source
        blocks_per_shard = count_blocks(source.num_shards, source.shard_size, options.block_size)
        mix_shards = max(1, source.num_shards) if options.shuffle == "global" else options.mix_shards
        return Order(
            source.num_shards, blocks_per_shard, bool(options.shuffle), options.seed, mix_shards, source.sequential
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values that distinguish this order of this dataset from others in saved states."""
        order = self.order
        shuffled = {"seed": order.seed, "mix_shards": order.mix_shards} if order.shuffle else {}
        return {
            **self.source.identity,
            "num_shards": order.num_shards,
            "blocks_per_shard": order.blocks_per_shard,
            "shuffle": order.shuffle,
            **shuffled,
        }

    def read(self, progress: Progress, part: Part) -> Iterator[Found]:
        """Yield the cuts left for a part in the epoch of ``progress``, with decoded audio if requested."""
        options, cuts = self._options, self._read_epoch(progress, part)
        if not options.decode_threads:
            return cuts

        def decode(found: Found) -> Found:
            position, cut, shard = found
            if cut is None or isinstance(cut, DamagedShard):
                return found
            assert isinstance(shard, OpenShard)
            try:
                return position, decode_audio(cut, shard), shard
            except DamagedShard as damage:
                if options.on_damage == "raise":
                    raise
                return position, damage, shard

        return prefetch(decode, cuts, threads=options.decode_threads, ahead=options.decode_prefetch)

    def _read_epoch(self, progress: Progress, part: Part) -> Iterator[Found]:
        """Yield the cuts that are left for a part, shortened or padded according to ``tail``."""
        # Copy the progress: cuts are read before they are yielded, and later changes must not affect reading.
        known = progress.for_part(part).current()
        cuts = self._read(progress.epoch, known, part)
        if self._options.tail == "keep":
            yield from cuts
            return
        left = self.count_left(progress.epoch, known, part.count)
        if self._options.tail == "drop":
            yield from islice(cuts, int(left.min()))
            return
        yield from cuts
        missing = int(left.max() - left[part.index])
        while missing:
            for _, cut, shard in islice(self._read(progress.epoch, EpochProgress(), Part()), missing):
                setattr(cut, PADDING, True)
                missing -= 1
                yield None, cut, shard

    def _read(self, epoch: int, known: EpochProgress, part: Part) -> Iterator[Found]:
        permutation = self.order.permutation(epoch)
        limit = _OPEN_SHARDS if self._options.shuffle == "global" else self.order.group_size
        for group, (draws, blocks, items, slots) in self._chosen(epoch, known, part, permutation):
            # Keep shards open, up to the limit, and remember damage, so that a damaged shard is opened only once.
            open_once = lru_cache(limit)(partial(_open, self.source, permutation, epoch))
            for draw, block, item, slot in zip(draws, blocks, items, slots, strict=True):
                shard = open_once(slot)
                try:
                    position = (epoch, group, draw, block, item)
                    cut = shard if isinstance(shard, DamagedShard) else shard.read(item, position)
                except DamagedShard as damage:
                    cut = damage
                if isinstance(cut, DamagedShard) and self._options.on_damage == "raise":
                    for file in self.source.locations(int(permutation[slot])):
                        check_copy(file)
                    raise cut
                yield Position(group, draw, block, item), cut, shard

    def _chosen(
        self, epoch: int, known: EpochProgress, part: Part, permutation: np.ndarray
    ) -> Iterator[tuple[int, _Choice]]:
        """Yield each group with the result of ``_choose``; remote files are copied one group ahead."""
        groups = ((group, self._choose(epoch, group, known, part, permutation))
                  for group in known.groups_left(self.order, part))  # fmt: skip
        if not self.source.is_remote:
            yield from groups
            return

        def copy(item: Location | tuple[int, _Choice]) -> tuple[int, _Choice] | None:
            if isinstance(item, tuple):
                return item
            # Ignore errors here: they are raised again when the shard is opened.
            with suppress(RejectRecord):
                local(item)
            return None

        def with_files() -> Iterator[Location | tuple[int, _Choice]]:
            for group, choice in groups:
                for slot in dict.fromkeys(choice[-1]):
                    with suppress(DamagedShard):
                        yield from self.source.locations(int(permutation[slot]))
                yield group, choice

        # Files weigh nothing and a group weighs 1, so the files of the next group are copied ahead, or one file per
        # thread if that is more.
        copied = prefetch(
            copy, with_files(), threads=FETCHES_AT_ONCE, ahead=1, weigh=lambda item: isinstance(item, tuple)
        )
        yield from filter(None, copied)

    def _choose(self, epoch: int, group: int, known: EpochProgress, part: Part, permutation: np.ndarray) -> _Choice:
        """Return the draws, blocks, items and slots of those cuts of a group that are left for a part, in order."""
        columns = []
        for slot in self.order.slots(group):
            if self.order.blocks_per_shard == 1 and not part.has(slot):
                continue  # do not count its cuts, for which a foreign shard would have to be read
            positions = self._positions(epoch, slot, permutation)
            chosen = np.flatnonzero((positions.blocks % part.count == part.index) & known.left(group, positions))
            columns.append((positions.draws[chosen], positions.blocks[chosen], chosen, np.full(len(chosen), slot)))
        if not columns:
            return [], [], [], []
        draws, blocks, items, slots = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((items, blocks, draws))
        return draws[order].tolist(), blocks[order].tolist(), items[order].tolist(), slots[order].tolist()

    def _positions(self, epoch: int, slot: int, permutation: np.ndarray) -> ShardPositions:
        """Return the positions of a shard's cuts; only the first ``_MANY_CUTS`` of them if the shard is damaged."""
        count = self.source.count(int(permutation[slot]))
        if count > _MANY_CUTS and isinstance(_open(self.source, permutation, epoch, slot), DamagedShard):
            count = _MANY_CUTS
        return self.order.positions(epoch, slot, count)

    def count_left(self, epoch: int, known: EpochProgress, num_parts: int) -> np.ndarray:
        """Return the number of cuts left for each part (num_parts,), not counting cuts known to be filtered out."""
        left = np.zeros(num_parts, np.int64)
        permutation = self.order.permutation(epoch)
        for group in range(self.order.num_groups):
            for slot in self.order.slots(group):
                positions = self._positions(epoch, slot, permutation)
                chosen = known.left(group, positions) & self.source.expected(int(permutation[slot]))
                left += np.bincount(positions.blocks[chosen] % num_parts, minlength=num_parts)
        return left


def _open(source: ShardSource, permutation: np.ndarray, epoch: int, slot: int) -> ReadableShard | DamagedShard:
    """Open the shard at a slot of the permutation; if it is damaged, return the damage."""
    try:
        return source.open(int(permutation[slot]), epoch)
    except DamagedShard as damage:
        return damage
