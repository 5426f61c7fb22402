"""The shards that a reader has open at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from sharmill.errors import DamagedShard
from sharmill.shar.reading.shard_source import ReadableShard


class OpenShards:
    """The shards of a group that are open: opened when they are needed, the one that was used last closed last.

    Args:
        open_shard: opens the shard of a slot.
        limit: shards that are open at once.
    """

    def __init__(self, open_shard: Callable[[int], ReadableShard], limit: int) -> None:
        self._open_shard = open_shard
        self._limit = limit
        self._shards: dict[int, ReadableShard] = {}
        self._damaged: dict[int, DamagedShard] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for shard in self._shards.values():
            shard.close()

    def get(self, slot: int) -> ReadableShard:
        """Return the open shard of a slot; raise DamagedShard where it cannot be opened, which is tried once."""
        if slot in self._damaged:
            raise self._damaged[slot]
        shard = self._shards.pop(slot, None)
        if shard is None:
            if len(self._shards) >= self._limit:
                self._shards.pop(next(iter(self._shards))).close()
            try:
                shard = self._open_shard(slot)
            except DamagedShard as damage:
                self._damaged[slot] = damage
                raise
        self._shards[slot] = shard
        return shard
