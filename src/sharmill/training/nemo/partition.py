"""The partition of a dataset in training: the cuts that each reader gets, and their order.

A reader is a data-parallel rank, or one worker process of its data loader. Who splits the data differs: a map-style
loader samples in the main process and its sampler takes every n-th batch, so that every rank must read the same order;
an iterable one samples where it reads, so that every reader must read something else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from sharmill.errors import ConfigError
from sharmill.training.cut_data import epoch_of

if TYPE_CHECKING:
    from sharmill.shar.reading.iteration import SharReader


READER: Final = "shar_reader"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The division of a dataset among the readers of a loader, as NeMo's settings ask for it.

    ``shard_seed`` is a number: one order, made from it, of which every reader gets its part. ``randomized``: the same,
    made from ``seed``. ``trng``: each rank draws an order of its own and reads all of it, its workers a part each; for
    a finite pass it is as ``randomized``, since otherwise samples would come twice.

    ``seed``, ``rank`` and ``world_size`` are None where nobody told them: then they are those that NeMo gave to the
    worker process. ``whole_part``: the part is that of ``rank``, whichever worker reads it.
    """

    shuffle: bool | Literal["global"]
    shard_seed: int | str
    finite: bool
    map_style: bool
    seed: int | None = None
    rank: int | None = None
    world_size: int | None = None
    whole_part: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shard_seed, int) and self.shard_seed not in ("trng", "randomized"):
            raise ConfigError(
                f"shard_seed is a number, 'trng' or 'randomized', not {self.shard_seed!r}", code="bad_config_value"
            )

    @classmethod
    def of_entry(cls, options: Mapping[str, Any]) -> Partition:
        """Read it from the options of an entry of ``input_cfg``, as NeMo hands them down."""
        return cls(
            shuffle=options.get("shuffle", False),
            shard_seed=options.get("shard_seed", "trng"),
            finite=options.get("force_finite", False) or options.get("metadata_only", False),
            map_style=options.get("force_map_dataset", False),
            seed=options.get("seed"),
            rank=options.get("rank"),
            world_size=options.get("world_size"),
            whole_part=options.get("whole_part", False),
        )

    @property
    def drawn(self) -> bool:
        """True if the rank draws an order of its own."""
        return bool(self.shuffle) and self.shard_seed == "trng" and not self.finite

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
        return {
            "seed": seed or 0, "rank": rank, "world_size": world_size, "split_by_worker": not self.whole_part
        }  # fmt: skip


class PartitionedCuts:
    """The cuts, or other examples, that this process reads: an epoch each time, or epochs without end.

    Args:
        open_reader: opens them, with ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of ``open_shar``.
        partition: the part of them that is read here.

    Attributes:
        number: tells it from the others of a loader; its cuts have it as ``shar_reader``.
    """

    def __init__(self, open_reader: Callable[..., SharReader], partition: Partition) -> None:
        open_reader(shuffle=partition.shuffle)  # a wrong name is an error here rather than in a worker
        self._open_reader, self._partition = open_reader, partition
        self._drawn_seed = secrets.randbelow(2**31)
        self._epoch = 0
        self._process = os.getpid()
        self.number = 0
        self._only_marked = False
        self._state: Mapping[str, Any] | None = None
        self._reader: SharReader | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._process != os.getpid():
            self._process = os.getpid()
            self.restart()
        reader = self.reader if self._only_marked else self._open()
        self._epoch += 1  # whoever iterates again gets another order
        for cut in reader:
            self._epoch = max(self._epoch, epoch_of(cut) + 1)
            setattr(cut, READER, self.number)
            yield cut

    def __len__(self) -> int:
        return len(self._open_reader())

    def restart(self) -> None:
        """Make the next iteration begin with the first epoch.

        To estimate buckets, NeMo reads cuts before the training does: each rank so many cuts, which may be another
        number of epochs on each. The epochs that are divided among them must begin at the same one.
        """
        self._epoch = 0

    def count_only_marked(self) -> None:
        """From now on, count a cut as consumed once it was marked as such, by ``reader.mark_consumed``.

        Raises:
            ConfigError: there is no one order without end, that every reader has a part of.
        """
        if self._partition.finite or self._partition.map_style or self._partition.drawn:
            raise ConfigError(
                "resumable=True is for streaming without end in one order for all: neither force_finite nor "
                "force_map_dataset, and shard_seed: randomized or a number",
                code="inexact_state",
            )
        self._only_marked = True

    @property
    def reader(self) -> SharReader:
        """The reader of this process that counts marked cuts, opened when it is first asked for."""
        if self._reader is None:
            self._reader = self._open()
            self._reader.count_only_marked()
            if self._state is not None:
                self._reader.load_state_dict(self._state)
        return self._reader

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Begin with a state of this process's reader, or with merged ones of all; before iterating."""
        self._state, self._reader = state, None

    def _open(self) -> SharReader:
        """Open the part of this rank, or of this worker process, at the epoch that is next."""
        reader = self._open_reader(
            shuffle=self._partition.shuffle,
            **self._partition.part_options(self._drawn_seed),
            infinite=not self._partition.finite,
        )
        reader.set_epoch(self._epoch)
        return reader


def _told_by_nemo(partition: Partition) -> tuple[int, int, int | None]:
    """Return rank, world size and seed as ``lhotse.dataset.dataloading.worker_init_fn`` left them in this worker."""
    from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED, get_rank, get_world_size
    from torch.utils.data import get_worker_info

    rank, world_size, worker = get_rank(), get_world_size(), get_worker_info()
    if worker is None:
        if world_size > 1 and not partition.drawn and not partition.map_style:
            # The rank of this process need not be its data-parallel rank.
            raise ConfigError(
                "with num_workers 0 and several ranks, use sharmill.training.get_dataloader", code="split_wrong"
            )
        return 0, 1, partition.seed
    if partition.seed is not None:
        return rank, world_size, partition.seed
    return rank, world_size, int(os.environ[LHOTSE_PROCESS_SEED]) - 100 * worker.id - 100_000 * rank
