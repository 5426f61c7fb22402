"""Which cuts of a dataset a reader gets in training, and in which order.

A reader is a data-parallel rank, or one worker process of its data loader. Who splits the data differs: a map-style
loader samples in the main process and its sampler takes every n-th batch, so that every rank must read the same order;
an iterable one samples where it reads, so that every reader must read something else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.reading.tracking import UseTracker
from sharmill.training.cut_data import epoch_of

if TYPE_CHECKING:
    from lhotse import CutSet
    from lhotse.cut import Cut


READER: Final = "shar_reader"


@dataclass(frozen=True, kw_only=True)
class Partition:
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

    def part_options(self, drawn_seed: int) -> dict[str, Any]:
        """Return the ``seed``, ``rank`` and ``world_size`` for ``open_shar`` in the process that calls this."""
        rank, world_size, seed = self.rank, self.world_size, self.seed
        if rank is None or world_size is None:
            rank, world_size, seed = _told_by_nemo(self)
        if self.drawn or self.map_style:
            rank, world_size = 0, 1
        if self.drawn:
            seed = drawn_seed
        elif isinstance(self.shard_seed, int):
            seed = self.shard_seed
        return {"seed": seed or 0, "rank": rank, "world_size": world_size}


class PartitionedCuts:
    """Iterates over this process's share of a dataset: an epoch each time, or epochs without end; each in its order.

    The options ``selection`` are those of ``open_shar`` that choose what to read: ``fields``, ``codec`` and
    ``decode_threads``.

    Attributes:
        number: tells it from the others of a loader; its cuts have it as ``shar_reader``.
    """

    def __init__(self, dataset: str | Path, partition: Partition, **selection: Any) -> None:
        open_shar(dataset, **selection)  # a wrong name is an error here rather than in a worker
        self._dataset, self._partition, self._selection = dataset, partition, selection
        self._drawn_seed = secrets.randbelow(2**31)
        self._epoch = 0
        self._process = os.getpid()
        self.number = 0
        self._is_tracked = False
        self._state: Mapping[str, Any] | None = None
        self._tracker: UseTracker | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._process != os.getpid():
            self._process = os.getpid()
            self.restart()
        cuts = self._tracked().cuts if self._is_tracked else self._open()
        self._epoch += 1  # whoever iterates again gets another order
        for cut in cuts:
            self._epoch = max(self._epoch, epoch_of(cut) + 1)
            setattr(cut, READER, self.number)
            yield cut

    def __len__(self) -> int:
        return len(open_shar(self._dataset, **self._selection))

    def restart(self) -> None:
        """Makes the next iteration begin with the first epoch.

        To estimate buckets, NeMo reads cuts before the training does: each rank so many cuts, which may be another
        number of epochs on each. The epochs that are divided among them must begin at the same one.
        """
        self._epoch = 0

    def track(self) -> None:
        """Begins to count what is used.

        Raises:
            ConfigError: there is no one order without end, that every reader has a part of.
        """
        if self._partition.finite or self._partition.map_style or self._partition.drawn:
            raise ConfigError(
                "resumable=True is for streaming without end in one order for all: neither force_finite nor "
                "force_map_dataset, and shard_seed: randomized or a number"
            )
        self._is_tracked = True

    def mark_consumed(self, cut: Cut) -> None:
        """Counts a cut as used, or as dropped, which is the same for a state."""
        self._tracked().used([cut])

    def state_dict(self) -> dict[str, Any]:
        """What is left to read for this process, where uses are counted."""
        return self._tracked().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state of this process, or from merged ones of all; before iterating."""
        self._state, self._tracker = state, None

    def _tracked(self) -> UseTracker:
        if self._tracker is None:
            self._tracker = UseTracker(self._open())
            if self._state is not None:
                self._tracker.load_state_dict(self._state)
        return self._tracker

    def _open(self) -> CutSet:
        """The cuts that a rank has from the epoch on that is next; in a worker process, those of the worker."""
        cuts = open_shar(
            self._dataset,
            shuffle=self._partition.shuffle,
            **self._partition.part_options(self._drawn_seed),
            infinite=not self._partition.finite,
            **self._selection,
        )
        cuts.data.set_epoch(self._epoch)
        return cuts


def _told_by_nemo(partition: Partition) -> tuple[int, int, int | None]:
    """Rank, world size and seed as ``lhotse.dataset.dataloading.worker_init_fn`` left them in this worker."""
    from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED, get_rank, get_world_size
    from torch.utils.data import get_worker_info

    rank, world_size, worker = get_rank(), get_world_size(), get_worker_info()
    if worker is None:
        if world_size > 1 and not partition.drawn and not partition.map_style:
            # The rank of this process need not be its data-parallel rank.
            raise ConfigError("with num_workers 0 and several ranks, use sharmill.training.get_dataloader")
        return 0, 1, partition.seed
    if partition.seed is not None:
        return rank, world_size, partition.seed
    return rank, world_size, int(os.environ[LHOTSE_PROCESS_SEED]) - 100 * worker.id - 100_000 * rank
