"""Which cuts of a dataset a reader gets in training, and in which order.

A reader is a data-parallel rank, or one worker process of its data loader. Who splits the data differs: a map-style
loader samples in the main process and its sampler takes every n-th batch, so that every rank must read the same order;
an iterable one samples where it reads, so that every reader must read something else.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset

_SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True, kw_only=True)
class Order:
    """NeMo's settings that decide about order and split.

    ``shard_seed`` is a number: one order, made from it, of which every reader gets its part. ``randomized``: the same,
    made from ``seed``. ``trng``: each rank draws an order of its own and reads all of it, its workers a part each; for
    a finite pass it is as ``randomized``, since otherwise samples would come twice.

    ``seed``, ``rank`` and ``world_size`` are None where nobody told them: then they are those that NeMo gave to the
    worker process.
    """

    shuffle: bool
    shard_seed: int | str
    finite: bool
    map_style: bool
    seed: int | None = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shard_seed, int) and self.shard_seed not in ("trng", "randomized"):
            raise ConfigError(f"shard_seed is a number, 'trng' or 'randomized', not {self.shard_seed!r}")

    @property
    def drawn(self) -> bool:
        """Whether the rank draws an order of its own."""
        return self.shuffle and self.shard_seed == "trng" and not self.finite


@dataclass(frozen=True)
class Place:
    """A reader among all readers of one order."""

    seed: int
    part: int
    parts: int


class TrainingCuts:
    """Iterates over this process's share of a dataset, each time in the order of the next epoch."""

    def __init__(self, dataset: str | Path, fields: Sequence[str] | None, codec: str | None, order: Order) -> None:
        open_shar(dataset, fields, codec=codec)  # a wrong name is an error here rather than in a worker
        self._dataset, self._fields, self._codec = dataset, fields, codec
        self._order = order
        self._drawn_seed = secrets.randbelow(2**31)
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        place = find_place(self._order, self._drawn_seed)
        count = 0
        for cut in read_part(
            self._dataset,
            self._fields,
            self._codec,
            seed=place.seed if self._order.shuffle else None,
            epoch=self._epoch,
            part=place.part,
            parts=place.parts,
        ):
            yield cut
            count += 1
        if count == 0 and not self._order.finite:
            raise ConfigError(
                f"{self._dataset}: {place.parts} readers (ranks x workers) are more than it has cuts for: "
                "use fewer workers, or shard_seed: trng"
            )
        self._epoch += 1

    def __len__(self) -> int:
        return read_dataset(Path(self._dataset)).num_cuts


def find_place(order: Order, drawn_seed: int) -> Place:
    """What the process that calls this is to read."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
    rank, world_size, seed = order.rank, order.world_size, order.seed
    if rank is None or world_size is None:
        rank, world_size, seed = _told_by_nemo(order, worker_id, in_worker=worker is not None)
    if order.drawn or order.map_style:
        rank, world_size = 0, 1
    if order.drawn:
        seed = drawn_seed
    elif isinstance(order.shard_seed, int):
        seed = order.shard_seed
    return Place(seed or 0, rank * num_workers + worker_id, world_size * num_workers)


def _told_by_nemo(order: Order, worker_id: int, *, in_worker: bool) -> tuple[int, int, int | None]:
    """Rank, world size and seed as ``lhotse.dataset.dataloading.worker_init_fn`` left them in this worker."""
    from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED, get_rank, get_world_size

    rank, world_size = get_rank(), get_world_size()
    if not in_worker:
        if world_size > 1 and not order.drawn and not order.map_style:
            # The rank of this process need not be its data-parallel rank.
            raise ConfigError("with num_workers 0 and several ranks, use sharmill.training.get_dataloader")
        return 0, 1, order.seed
    if order.seed is not None:
        return rank, world_size, order.seed
    return rank, world_size, int(os.environ[LHOTSE_PROCESS_SEED]) - 100 * worker_id - 100_000 * rank


def read_part(
    dataset: str | Path,
    fields: Sequence[str] | None,
    codec: str | None,
    *,
    seed: int | None,
    epoch: int,
    part: int,
    parts: int,
) -> Iterator[Any]:
    """Every ``parts``-th cut, from the ``part``-th on, of the order that (seed, epoch) make; None is as written."""
    cuts = open_shar(dataset, fields, codec=codec)
    if seed is not None:
        cuts = cuts.shuffle(random.Random(f"{seed} {epoch}"), buffer_size=_SHUFFLE_BUFFER)
    return islice(cuts, part, None, parts)
