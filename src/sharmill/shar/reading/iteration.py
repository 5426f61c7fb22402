"""The iterable in the CutSet of ``open_shar``: which cuts this part reads, in which order, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from lhotse.cut import Cut, MonoCut

from sharmill.errors import ConfigError
from sharmill.shar.reading.attach import attach, decode_audio
from sharmill.shar.reading.order import END, Order, Position, count_blocks
from sharmill.shar.reading.shard import OpenShard
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.shar.reading.state import EpochProgress, Part, Progress, check_identity

PADDING = "shar_padding"

# Where cuts are hardly more than parts, a part may draw none in an epoch and some in the next.
_MAX_EMPTY_EPOCHS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of ``open_shar``, which explains them."""

    shuffle: bool = False
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


class SharReader:
    """Iterates over the cuts of this part; each iteration is the next epoch.

    ``state_dict()`` tells how far the iteration that began last has come, counting every cut that it gave out; loaded
    into a reader of the same dataset, with the same options but for ``rank`` and ``world_size``, the next iteration
    goes on behind these cuts without reading them. The states of several ranks and workers are first put together by
    ``merge_states``; the result is loaded on every rank, before workers start. The number of ranks and workers may
    then be another one.
    """

    def __init__(self, source: ShardSource, options: Options) -> None:
        self._source = source
        self._options = options
        self._epoch = 0
        self._start: Progress | None = None  # where an iteration begins, if not with a whole epoch
        self._running: Progress | None = None

    def __len__(self) -> int:
        """The cuts of the whole dataset, of which this part may have some only."""
        if self._options.infinite:
            raise TypeError("a reader with infinite=True has no length")
        return self._source.num_cuts()

    def __iter__(self) -> Iterator[Cut]:
        part = self.part
        self._running = (self._start or Progress(self._identity, self._epoch)).for_part(part)
        return self._iterate(self._running, part)

    @property
    def part(self) -> Part:
        """The part that an iteration begun here and now has: the rank's, or that of the worker that asks."""
        options = self._options
        worker, num_workers = _worker() if options.split_by_worker else (0, 1)
        return Part(options.rank * num_workers + worker, options.world_size * num_workers)

    @cached_property
    def order(self) -> Order:
        """The order of all epochs."""
        options, source = self._options, self._source
        blocks_per_shard = count_blocks(source.num_shards, source.shard_size, options.block_size)
        return Order(source.num_shards, blocks_per_shard, options.shuffle, options.seed, options.mix_shards)

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the next to be iterated over, from its beginning."""
        self._epoch, self._start, self._running = epoch, None, None

    def progress(self) -> Progress:
        """What ``state_dict()`` tells, as an object of its own."""
        current = self._running or self._start or Progress(self._identity, self._epoch)
        return current.for_part(current.part or self.part)

    def state_dict(self) -> dict[str, Any]:
        """How far this part is. Small: a few numbers for each part."""
        return self.progress().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from a state of this part, or from the merged states of all parts.

        Raises:
            ConfigError: it is the state of another dataset or order; or, when iterating, of another part.
        """
        progress = Progress.from_dict(state)
        check_identity(progress.identity, self._identity, "the saved state and this reader")
        self._start, self._running, self._epoch = progress, None, progress.epoch

    @cached_property
    def _identity(self) -> dict[str, Any]:
        order = self.order
        shuffled = {"seed": order.seed, "mix_shards": order.mix_shards} if order.shuffle else {}
        return {
            **self._source.identity,
            "num_shards": order.num_shards,
            "blocks_per_shard": order.blocks_per_shard,
            "shuffle": order.shuffle,
            **shuffled,
        }

    def _iterate(self, progress: Progress, part: Part) -> Iterator[Cut]:
        num_empty = 0
        while True:
            num_empty += not progress.current().reached  # of a resumed one, the rest may be empty
            for position, cut in self._decoded(self._read_epoch(progress, part)):
                progress.take(position)
                num_empty = 0
                yield cut
            progress.take(END)
            if not self._options.infinite:
                self._end_epoch(progress)
                return
            if num_empty >= (_MAX_EMPTY_EPOCHS if self._options.shuffle else 1):
                raise ConfigError(
                    f"part {part.index} of {part.count} gets no cut in epoch {progress.epoch}: there are too few for "
                    "so many ranks and workers, or block_size is too large"
                )
            progress.next_epoch()

    def _end_epoch(self, progress: Progress) -> None:
        """The next iteration is the next epoch; until it begins, the state tells of the end of this one."""
        self._epoch, self._start = progress.epoch + 1, None
        if later := {epoch: known for epoch, known in progress.epochs.items() if epoch > progress.epoch}:
            self._start = Progress(progress.identity, self._epoch, None, later)

    def _decoded(self, cuts: Iterator[_Found]) -> Iterator[tuple[Position | None, Cut]]:
        options = self._options
        if not options.decode_threads:
            return ((position, cut) for position, cut, _ in cuts)
        from sharmill.prefetch import prefetch

        def decode(found: _Found) -> tuple[Position | None, Cut]:
            position, cut, shard = found
            return position, decode_audio(cut, shard)

        return prefetch(decode, cuts, threads=options.decode_threads, ahead=options.decode_prefetch)

    def _read_epoch(self, progress: Progress, part: Part) -> Iterator[_Found]:
        """The cuts that are left for a part."""
        # A copy: what is read goes ahead of what is given out, and must not change with it.
        known = progress.for_part(part).current()
        cuts = self._read(progress.epoch, known, part)
        if self._options.tail == "keep":
            yield from cuts
            return
        left = self._count_left(progress.epoch, known, part.count)
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

    def _read(self, epoch: int, known: EpochProgress, part: Part) -> Iterator[_Found]:
        permutation = self.order.permutation(epoch)
        foreign = self._source.foreign
        for group in known.groups_left(self.order, part):
            draws, blocks, items, slots = self._choose(epoch, group, known, part, permutation)
            shards: dict[int, OpenShard] = {}
            try:
                for slot in sorted(set(slots)):
                    shards[slot] = OpenShard(self._source.files(int(permutation[slot])))
                for draw, block, item, slot in zip(draws, blocks, items, slots, strict=True):
                    position, shard = Position(group, draw, block, item), shards[slot]
                    cut, found = shard.read(item)
                    if type(cut) is not MonoCut and not foreign:
                        raise shard.damage(f"{cut.id!r} is not a MonoCut")
                    attach(cut, found, (epoch, group, draw, block, item), foreign=foreign)
                    yield position, cut, shard
            finally:
                for shard in shards.values():
                    shard.close()

    def _choose(
        self, epoch: int, group: int, known: EpochProgress, part: Part, permutation: np.ndarray
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Draws, blocks, items and slots of the cuts of a group that are left for a part, in the order of the epoch."""
        columns = []
        for slot in self.order.slots(group):
            positions = self.order.positions(epoch, slot, self._source.count(int(permutation[slot])))
            chosen = np.flatnonzero((positions.blocks % part.count == part.index) & known.left(group, positions))
            columns.append((positions.draws[chosen], positions.blocks[chosen], chosen, np.full(len(chosen), slot)))
        draws, blocks, items, slots = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((items, blocks, draws))
        return draws[order].tolist(), blocks[order].tolist(), items[order].tolist(), slots[order].tolist()

    def _count_left(self, epoch: int, known: EpochProgress, num_parts: int) -> np.ndarray:
        """How many cuts are left for each part (num_parts,)."""
        left = np.zeros(num_parts, np.int64)
        permutation = self.order.permutation(epoch)
        for group in range(self.order.num_groups):
            for slot in self.order.slots(group):
                positions = self.order.positions(epoch, slot, self._source.count(int(permutation[slot])))
                left += np.bincount(positions.blocks[known.left(group, positions)] % num_parts, minlength=num_parts)
        return left


# A cut with its position, which padding has none of, and the shard that it comes from.
_Found = tuple[Position | None, Cut, OpenShard]


def _worker() -> tuple[int, int]:
    """(index, number) of the workers of the torch DataLoader that this runs in."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
