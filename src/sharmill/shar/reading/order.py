"""The order of an epoch, and the part that each reader has of it, as pure functions of (seed, epoch).

Shards are permuted; each ``mix_shards`` consecutive shards of the permutation are a **group**, in which every cut draws
a number; the order of the epoch is that by (group, drawn number). So a cut's position follows from its shard and its
index in the shard, whatever else is read: nothing has to be replayed, or read at all, to know what comes after it.

A shard is cut into **blocks** of consecutive cuts, all shards into as many. They are numbered along the permutation,
within a shard as the epoch draws. Part p of P has the blocks whose number is p modulo P, in the order of the epoch: in
every epoch others, and about equally many cuts. Blocks and their numbers never depend on P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Few enough to make whole shards the blocks of large datasets, and enough to give hundreds of parts equal shares.
_WANTED_BLOCKS = 4096


class Position(NamedTuple):
    """The position of a cut within an epoch: positions compare as the cuts follow each other."""

    group: int
    draw: int
    block: int
    item: int


BEGINNING = Position(-1, 0, 0, 0)
END = Position(1 << 40, 0, 0, 0)


def count_blocks(num_shards: int, shard_size: int, block_size: int | None) -> int:
    """Count the blocks of a shard: of ``block_size`` cuts at most, and of equal sizes.

    Args:
        num_shards: how many there are.
        shard_size: cuts in a usual shard. Where one has more, its blocks are larger.
        block_size: the wish of the caller; by default whole shards, or smaller blocks where there are few shards.
    """
    if block_size is None:
        block_size = max(1, num_shards * shard_size // _WANTED_BLOCKS)
    return max(1, -(-shard_size // block_size))


class ShardPositions(NamedTuple):
    """The positions of a shard's cuts: for cut n, those of its group, ``draws[n]``, ``blocks[n]`` and n."""

    draws: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Order:
    """The order of all epochs of a dataset.

    Args:
        num_shards: how many there are.
        blocks_per_shard: into how many blocks each is cut.
        shuffle: whether there is any order but that of the dataset.
        seed: of permutations and drawn numbers.
        mix_shards: shards of a group. Without ``shuffle`` each shard is a group of its own.
        sequential: the cuts of a shard keep their order among themselves, where it can be read in no other.
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
        """Return the slots of the permutation that make a group."""
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
        """Return the numbers (number,) of the blocks of a shard.

        With numbers that were always the same, the part of a cut would be the same in every epoch wherever P divides
        the blocks of a shard; and with short shards that all began at their first number, so would be their parts.
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


_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _mix_bits(value: int) -> int:
    """Return SplitMix64 (Steele, Lea and Flood 2014): equal on every machine and with every version of any library."""
    value = (value + _STEP) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _draw(key: int, numbers: np.ndarray) -> np.ndarray:
    """Return 53 bits for each of ``numbers``: as ``_mix_bits``, for arrays. JSON readers keep 53 bits exactly."""
    value = numbers * np.uint64(_STEP) + np.uint64(key)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))) >> np.uint64(11)
