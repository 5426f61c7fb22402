"""The cuts, or other examples, that a process reads of an entry of ``input_cfg``, and their marks in a batch.

A **reader** is a data-parallel rank, or one worker process of its data loader. Who splits the data differs: a map-style
loader samples in the main process and its sampler takes every n-th batch, so that every rank must read the same order;
an iterable one samples where it reads, so that every reader must read something else.
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
# The divided sources of the loader that is being made, in the order in which NeMo reads their entries.
_made: ContextVar[list[PartitionedCuts]] = ContextVar("_made")


@contextmanager
def collect_sources() -> Iterator[list[PartitionedCuts]]:
    """Collect the sources that NeMo makes within the context; afterwards all of them begin with the first epoch."""
    sources: list[PartitionedCuts] = []
    token = _made.set(sources)
    try:
        yield sources
    finally:
        _made.reset(token)
    for cuts in sources:
        cuts.epoch = 0


class PartitionedCuts:
    """The cuts, or other examples, that this process reads: an epoch each time, or epochs without end.

    They are divided among the readers of a loader as the options of an entry ask for it. ``shard_seed`` is a number:
    one order, made from it, of which every reader gets its part. ``randomized``: the same, made from ``seed``.
    ``trng``: each rank draws an order of its own and reads all of it, its workers a part each; for a finite pass it is
    as ``randomized``, since otherwise samples would come twice.

    Args:
        open_reader: opens them, with ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of ``open_shar``.
        options: of an entry of ``input_cfg``, as NeMo hands them down. ``seed``, ``rank`` and ``world_size`` are not
            there where nobody told them: then they are those that NeMo gave to the worker process. ``whole_part``: the
            part is that of ``rank``, whichever worker reads it. ``passes``: so many epochs are a finite pass.

    Attributes:
        number: tells it from the others of a loader; its cuts have it as ``shar_reader``.
        epoch: the next one. To estimate buckets, NeMo reads cuts before the training does: each rank so many cuts,
            which may be another number of epochs on each. The training begins with the first one on all of them.
        reader: that of all iterations, after ``count_only_marked``.

    Raises:
        ConfigError: see ``open_reader``.
    """

    def __init__(self, open_reader: Callable[..., SharReader], options: Mapping[str, Any]) -> None:
        self._shard_seed = options.get("shard_seed", "trng")
        self._open_reader = partial(open_reader, shuffle=options.get("shuffle", False))
        self.reader = self._open_reader()  # a wrong name is an error here rather than in a worker
        self._options = options
        self._finite = options.get("force_finite", False) or options.get("metadata_only", False)
        self._passes = options.get("passes", 1) if self._finite else 1
        self._map_style = options.get("force_map_dataset", False)
        # True if the rank draws an order of its own.
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
            self.epoch += 1  # whoever iterates again gets another order
            for cut in reader:
                self.epoch = max(self.epoch, epoch_of(cut) + 1)
                setattr(cut, _READER, self.number)
                yield cut

    def __len__(self) -> int:
        return self._passes * len(self._open_reader())

    def count_left(self, epoch: int) -> tuple[int, int]:
        """Count what the running iteration has of an epoch: the reader that has most, and this one."""
        left = self._current.count_left(epoch)
        return int(left.max()), int(left[self._current.part.index])

    def count_only_marked(self) -> None:
        """Open the one ``reader`` of all iterations, which counts a cut as consumed once it was marked as such.

        Raises:
            ConfigError: there is no one order without end, that every reader has a part of.
        """
        refuse(
            (self._finite or self._map_style or self._drawn,
             "resumable=True is for streaming without end in one order for all: neither force_finite nor "
             "force_map_dataset, and shard_seed: randomized or a number"),
            code="inexact_state",
        )  # fmt: skip
        self.reader, self._only_marked = self._open(), True
        self.reader.count_only_marked()

    def _open(self) -> SharReader:
        """Open the part of this rank, or of this worker process, at the epoch that is next."""
        rank, world_size, seed = (self._options.get(key) for key in ("rank", "world_size", "seed"))
        if rank is None or world_size is None:
            from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED, get_rank, get_world_size

            # As lhotse's ``worker_init_fn`` left them in this worker process.
            rank, world_size, worker = get_rank(), get_world_size(), torch.utils.data.get_worker_info()
            if worker is None:
                # The rank of this process need not be its data-parallel rank.
                refuse(
                    (world_size > 1 and not self._drawn and not self._map_style,
                     "with num_workers 0 and several ranks, use sharmill.training.get_dataloader"),
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
    """Mark the cuts of an example as consumed, or as dropped, in the readers that they come from."""
    for number, part in marked_parts(example):
        sources[number].reader.mark_consumed([part])


def parts_of(example: Any) -> Iterator[Any]:
    """Yield the parts of an example that readers mark: itself, its cuts, or the cuts that a cut was joined from."""
    if not isinstance(example, Cut):
        yield example
    for cut in cuts_of(example):
        if isinstance(cut, MixedCut):
            yield from (track.cut for track in cut.tracks)
        else:
            yield cut


def place_of(example: Any) -> tuple[int, ...] | None:
    """Return reader, epoch, group, draw, block and item of an example, or of the first cut that it was made from."""
    places = ((reader, *part.custom["shar_position"]) for reader, part in marked_parts(example))
    return next(places, None)


def marked_parts(example: Any) -> Iterator[tuple[int, Any]]:
    """Yield the parts of an example that a reader gave, each with the number of its reader."""
    for part in parts_of(example):
        reader = (getattr(part, "custom", None) or {}).get(_READER)
        if reader is not None:
            yield reader, part


def cuts_of(example: Any) -> list[Cut]:
    """Return the cuts of an example: itself, those of a conversation, or none of a text."""
    if isinstance(example, Cut):
        return [example]
    return example.list_cuts() if hasattr(example, "list_cuts") else []
