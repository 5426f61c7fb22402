"""The share of an ``input_cfg`` entry that a process reads, and the marking of consumed examples.

A **reader** is a data-parallel rank, or one worker process of its data loader. A map-style loader samples in the main
process, and its sampler takes every n-th batch, so every rank must read the same order. An iterable loader samples in
the process that reads, so every reader must read a different part.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from lhotse.cut import Cut, MixedCut

from sharmill.errors import refuse
from sharmill.shar.reading.iteration import SharReader
from sharmill.training.codes import epoch_of

_READER: Final = "shar_reader"
# The divided sources of the loader under construction, in the order in which NeMo reads their entries.
_made: ContextVar[list[PartitionedCuts]] = ContextVar("_made")


@contextmanager
def collect_sources() -> Iterator[list[PartitionedCuts]]:
    """Collect the sources that NeMo creates within the context, and finally reset all of them to the first epoch."""
    sources: list[PartitionedCuts] = []
    token = _made.set(sources)
    try:
        yield sources
    finally:
        _made.reset(token)
    for cuts in sources:
        cuts.epoch = 0


class PartitionedCuts:
    """The cuts or other examples of an entry that this process reads; an iteration is one finite pass or is endless.

    The option ``shard_seed`` determines how the examples are divided among the readers of a loader. With a number,
    every reader gets its part of one order, which is derived from the number. With ``randomized``, the order is derived
    from ``seed``. With ``trng``, each rank draws its own order and reads all examples, divided among its workers. In a
    finite pass, ``trng`` works like ``randomized``, since otherwise examples would be repeated.

    Args:
        open_reader: opens a reader with ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of
            ``open_shar``.
        options: options of an entry of ``input_cfg``, including inherited ones. If ``seed``, ``rank`` and
            ``world_size`` are missing, the values that NeMo gave to the worker process are used. With ``whole_part``, a
            worker reads the whole part of ``rank``. ``passes`` is the number of epochs of a finite pass.

    Attributes:
        number: number of this source in its loader, which its cuts store as ``shar_reader``.
        epoch: the next epoch. When NeMo estimates buckets, ranks may read different numbers of epochs, so the epoch is
            reset to the first one before the training.
        reader: the reader used by all iterations after a call of ``count_only_marked``.

    Raises:
        ConfigError: see ``open_reader``.
    """

    def __init__(self, open_reader: Callable[..., SharReader], options: Mapping[str, Any]) -> None:
        self._shard_seed = options.get("shard_seed", "trng")
        self._open_reader = partial(open_reader, shuffle=options.get("shuffle", False))
        self.reader = self._open_reader()  # opened here so that a wrong name fails before workers start
        self._options = options
        self._finite = options.get("force_finite", False) or options.get("metadata_only", False)
        self._passes = options.get("passes", 1) if self._finite else 1
        self._map_style = options.get("force_map_dataset", False)
        # True if this rank draws its own order.
        self._drawn = bool(options.get("shuffle")) and self._shard_seed == "trng" and not self._finite
        self._drawn_seed = secrets.randbelow(2**31)
        self.epoch = 0
        self._process = os.getpid()
        self._only_marked = False
        made = _made.get([])
        self.number = len(made)
        made.append(self)

    def __iter__(self) -> Iterator[Any]:
        if self._process != os.getpid():
            self._process, self.epoch = os.getpid(), 0
        for _ in range(self._passes):
            reader = self._current = self.reader if self._only_marked else self._open()
            self.epoch += 1  # a further iteration gets another order
            for cut in reader:
                self.epoch = max(self.epoch, epoch_of(cut) + 1)
                setattr(cut, _READER, self.number)
                yield cut

    def __len__(self) -> int:
        return self._passes * len(self._open_reader())

    def count_left(self, epoch: int) -> tuple[int, int]:
        """Return how many examples of an epoch are left for the reader that has the most, and for this reader."""
        left = self._current.count_left(epoch)
        return int(left.max()), int(left[self._current.part.index])

    def count_only_marked(self) -> None:
        """Use a single ``reader`` for all iterations, which counts cuts as consumed only when they are marked.

        Raises:
            ConfigError: the data is not an infinite stream in one order for all readers.
        """
        refuse(
            (self._finite or self._map_style or self._drawn,
             "resumable=True needs an infinite stream in one order for all ranks: remove force_finite and "
             "force_map_dataset, and set shard_seed to randomized or a number"),
            code="inexact_state",
        )  # fmt: skip
        self.reader, self._only_marked = self._open(), True
        self.reader.count_only_marked()

    def _open(self) -> SharReader:
        """Open the part of this rank or worker process at the next epoch."""
        rank, world_size, seed = (self._options.get(key) for key in ("rank", "world_size", "seed"))
        if rank is None or world_size is None:
            from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED, get_rank, get_world_size

            # lhotse's ``worker_init_fn`` has set these values in this worker process.
            rank, world_size, worker = get_rank(), get_world_size(), torch.utils.data.get_worker_info()
            if worker is None:
                # The global rank of this process may differ from its data-parallel rank.
                refuse(
                    (world_size > 1 and not self._drawn and not self._map_style,
                     "the data-parallel rank is unknown with num_workers: 0 and several ranks: use "
                     "sharmill.training.get_dataloader"),
                    code="split_wrong",
                )  # fmt: skip
                rank, world_size = 0, 1
            elif seed is None:
                seed = int(os.environ[LHOTSE_PROCESS_SEED]) - 100 * worker.id - 100_000 * rank
        if self._drawn or self._map_style:
            rank, world_size = 0, 1
        if self._drawn:
            seed = self._drawn_seed
        elif isinstance(self._shard_seed, int):
            seed = self._shard_seed
        reader = self._open_reader(
            seed=seed or 0,
            rank=rank,
            world_size=world_size,
            split_by_worker=not self._options.get("whole_part", False),
            infinite=not self._finite,
        )
        reader.set_epoch(self.epoch)
        return reader


def mark_consumed(sources: Sequence[PartitionedCuts], example: Any) -> None:
    """Mark the cuts of a consumed or dropped example as consumed in the readers that they came from."""
    for number, part in marked_parts(example):
        sources[number].reader.mark_consumed([part])


def parts_of(example: Any) -> Iterator[Any]:
    """Yield the parts of an example that readers track: itself, its cuts, or the tracks of mixed cuts."""
    if not isinstance(example, Cut):
        yield example
    for cut in cuts_of(example):
        if isinstance(cut, MixedCut):
            yield from (track.cut for track in cut.tracks)
        else:
            yield cut


def place_of(example: Any) -> tuple[int, ...] | None:
    """Return the position of the first tracked part of an example; None if no part is tracked.

    The position consists of the numbers of the reader, epoch, group, draw, block and item.
    """
    places = ((reader, *part.custom["shar_position"]) for reader, part in marked_parts(example))
    return next(places, None)


def marked_parts(example: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of the reader and the part, for each part of an example that came from a reader."""
    for part in parts_of(example):
        reader = (getattr(part, "custom", None) or {}).get(_READER)
        if reader is not None:
            yield reader, part


def cuts_of(example: Any) -> list[Cut]:
    """Return the cuts of an example: the cut itself, the cuts of a conversation, or none for text."""
    if isinstance(example, Cut):
        return [example]
    return example.list_cuts() if hasattr(example, "list_cuts") else []
