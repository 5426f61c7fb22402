"""The iterable in the CutSet of ``open_shar``: the cuts of this part in the order of the epoch, and its state."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from lhotse.cut import Cut
from torch.utils.data import get_worker_info

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.fields import POSITION
from sharmill.shar.reading.epoch_reader import PADDING, EpochReader, ReadOptions
from sharmill.shar.reading.epochs import NextEpoch
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.shar.reading.state import (
    END,
    EpochProgress,
    Part,
    Progress,
    check_identity,
)

log = logging.getLogger(__name__)

# Damaged cuts that a part may skip by default.
_MAX_DAMAGED = 100
# If there are hardly more cuts than parts, a part may draw none in an epoch and some in the next.
_MAX_EMPTY_EPOCHS = 20


class SharReader:
    """The cuts that this part has of a dataset; each iteration is the next epoch.

    ``state_dict()`` says which cuts the iteration that began last has consumed. Loaded into a reader of the same
    dataset, with the same options but for ``rank`` and ``world_size``, it makes the next iteration go on with the
    others, without reading these. The states of several ranks and workers are first put together by ``merge_states``;
    the result is loaded on every rank, before workers start. The number of ranks and workers may then be another one.

    By default a cut is consumed as soon as the reader gives it out. Where something between the reader and training
    reads ahead (a sampler with buckets, a shuffling buffer, a queue), call ``count_only_marked()`` first: then a cut
    is consumed once it was given to ``mark_consumed``.

    Attributes:
        num_left_out: how many cuts this process has left out because they have no codes in a field that is read.

    Example:
        >>> cuts = open_shar("data/librispeech", shuffle=True, infinite=True)  # doctest: +SKIP
        >>> reader = cuts.data  # doctest: +SKIP
        >>> reader.count_only_marked()  # doctest: +SKIP
        >>> for batch in DynamicBucketingSampler(cuts, max_duration=100, num_buckets=10):  # doctest: +SKIP
        ...     train(batch)
        ...     reader.mark_consumed(batch)
        ...     checkpoint["data"] = reader.state_dict()
    """

    def __init__(self, source: ShardSource, options: ReadOptions) -> None:
        if source.needed and options.tail != "keep":
            raise ConfigError(
                f"tail={options.tail!r} counts cuts before they are read, and those without {source.needed[0]} are "
                "left out: use tail='keep', with infinite=True where all ranks need as many, or leave that field out",
                code="bad_config_value",
            )
        self._epochs = EpochReader(source, options)
        self._options = options
        self._epoch = 0
        self._next_epoch = NextEpoch()
        # The process in which an iteration began last, and whether a state was loaded there since.
        self._process = os.getpid()
        self._is_loaded = False
        self._start: Progress | None = None  # where an iteration begins, if not with a whole epoch
        self._running: Progress | None = None
        self._only_marked = False
        self.num_left_out = 0
        # Positions that were given out and not marked since.
        self._unmarked: set[tuple[int, ...]] = set()
        # The beginning of a pass of which cuts were read and none was marked.
        self._pass_start: Progress | None = None

    def __len__(self) -> int:
        """Return the number of cuts of the whole dataset, of which this part may have some only."""
        if self._options.infinite:
            raise TypeError("a reader with infinite=True has no length")
        return self._epochs.source.num_cuts()

    def __iter__(self) -> Iterator[Cut]:
        part = self.part
        self.begin_pass()
        self._running = (self._start or Progress(self._epochs.identity, self._epoch)).for_part(part)
        return self._iterate(self._running, part)

    def begin_pass(self, *, anew: bool = False) -> None:
        """Go to where the next iteration begins; ``state_dict`` tells of it from then on.

        In a new worker process that is the epoch after the one that the loader's workers have begun last.

        Args:
            anew: also in a worker that goes on, which has not ended its epoch if the loader's iteration was left early.
        """
        if self._pass_start is not None:
            self._go_on_from(self._pass_start)
        self._clear_marks()
        self._running = None
        if self._options.infinite:
            return
        if (anew or self._process != os.getpid()) and not self._is_loaded:
            epoch = self._next_epoch.find(self._epoch)
            if epoch != self._epoch:
                self._go_to(epoch, self._start)
        self._process, self._is_loaded = os.getpid(), False
        self._next_epoch.set(self._epoch + (get_worker_info() is not None))

    def end_pass(self) -> None:
        """End the epoch of a finite reader, whether or not all of its cuts were read and marked."""
        if self._running is not None and not self._options.infinite:
            self._clear_marks()
            self._running.take(END)
            self._go_to(self._running.epoch + 1, self._running)

    @property
    def part(self) -> Part:
        """The part that an iteration begun here and now has: the rank's, or that of the worker that asks."""
        options, info = self._options, get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info and options.split_by_worker else (0, 1)
        return Part(options.rank * num_workers + worker, options.world_size * num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next to be iterated over, from its beginning."""
        self._running = None
        self._go_to(epoch)
        self._clear_marks()

    def count_only_marked(self) -> None:
        """From now on, count a cut as consumed once it was given to ``mark_consumed``; call it before iterating.

        A sampler may read the cuts once more than it uses them, to estimate its buckets. So a pass of which nothing
        was marked does not count, and the next one begins where it began. Do not ``repeat()`` the cuts:
        ``infinite=True`` does. A cut that is never marked stays in the state, to be read again after a resume.
        """
        self._only_marked = True

    def mark_consumed(self, cuts: Iterable[Cut]) -> None:
        """Count cuts as consumed, or as dropped; also those that a cut was mixed or joined from.

        Raises:
            ConfigError: ``count_only_marked`` was not called, so that cuts count as soon as they are given out.
        """
        if not self._only_marked:
            raise ConfigError("call count_only_marked() of this reader before iterating", code="inexact_state")
        for cut in cuts:
            if getattr(cut, PADDING, False):
                # A copy that fills up a part: the cut itself has its own mark.
                continue
            for position in _positions_of(cut):
                if position in self._unmarked:
                    self._unmarked.remove(position)
                    self._pass_start = None

    @property
    def num_unmarked(self) -> int:
        """The number of cuts that were given out and not marked as consumed since."""
        return len(self._unmarked)

    def count_left(self, epoch: int) -> np.ndarray:
        """Count the cuts of an epoch that were left for each part (parts,) where the iteration began.

        The state of one part does not tell what others have read: then all count as much as this one.
        """
        part, start = self.part, self._start or Progress(self._epochs.identity)
        left = self._epochs.count_left(epoch, start.epochs.get(epoch, EpochProgress()), part.count)
        if start.part is not None and epoch in start.epochs:
            left[:] = left[part.index]
        return left

    def count_damaged(self) -> int:
        """Count one more cut as damaged, for what its user found in it; return how many there are in all epochs."""
        assert self._running is not None
        self._running.num_damaged += 1
        return self._running.num_damaged

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this part as numbers, texts and lists, for JSON and checkpoints.

        It is small, a few numbers for each part; with ``count_only_marked`` it also names the cuts that were read and
        not marked.
        """
        return {**self._progress().to_dict(), "infinite": self._options.infinite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on from a state of this part, or from the merged states of all parts.

        The state of a finite epoch that has ended begins the next one; but not in a worker, which waits for the others.

        Raises:
            ConfigError: it is the state of another dataset or order; or, when iterating, of another part.
        """
        progress = Progress.from_dict(state)
        check_identity(progress.identity, self._epochs.identity, "the saved state and this reader")
        self._is_loaded = get_worker_info() is not None
        if not self._is_loaded and progress.part == self.part:
            progress.skip_ended(self.part)
        self._go_on_from(progress)
        self._clear_marks()

    def _progress(self) -> Progress:
        current = self._running or self._start or Progress(self._epochs.identity, self._epoch)
        progress = current.for_part(current.part or self.part)
        # A copy, which is made at once: another thread may be reading.
        for epoch, _, _, block, item in list(self._unmarked):
            known = progress.epochs.setdefault(epoch, EpochProgress())
            known.unused.setdefault(block, set()).add(item)
        progress.go_back_to(min([progress.epoch, *progress.epochs]))
        return progress

    def _go_on_from(self, progress: Progress) -> None:
        self._start, self._running, self._epoch = progress, None, progress.epoch
        self._next_epoch.set(self._epoch)

    def _go_to(self, epoch: int, known: Progress | None = None) -> None:
        """Go to the beginning of an epoch, or to what is left of it by what is known."""
        later = {number: progress for number, progress in known.epochs.items() if number >= epoch} if known else {}
        self._epoch, self._start = epoch, Progress(self._epochs.identity, epoch, None, later) if later else None
        self._next_epoch.set(epoch)

    def _clear_marks(self) -> None:
        self._unmarked.clear()
        self._pass_start = None

    def _iterate(self, progress: Progress, part: Part) -> Iterator[Cut]:
        pass_start = progress.for_part(part) if self._only_marked else None
        num_empty = 0
        while True:
            before = self.num_left_out
            num_empty += not progress.current().reached  # of a resumed one, the rest may be empty
            for position, cut, _ in self._epochs.read(progress, part):
                if cut is None or isinstance(cut, DamagedShard):
                    if cut is None:
                        self.num_left_out += 1
                    else:
                        _count_damage(progress, cut, self._options.max_damaged)
                    progress.take(position)
                    continue
                if self._only_marked:
                    # Before the position is taken, so that a state never has it as consumed. Padding has none.
                    if position is not None:
                        self._unmarked.add((progress.epoch, *position))
                    if pass_start is not None:
                        self._pass_start, pass_start = pass_start, None
                progress.take(position)
                num_empty = 0
                yield cut
            progress.take(END)
            if self.num_left_out > before:
                log.warning("epoch %d: %d cuts are left out, since they have no %s", progress.epoch,
                            self.num_left_out - before, " or no ".join(self._epochs.source.needed))  # fmt: skip
            if not self._options.infinite:
                # The next iteration is the next epoch; until it begins, the state tells of the end of this one.
                self._go_to(progress.epoch + 1, progress)
                return
            if num_empty >= (_MAX_EMPTY_EPOCHS if self._options.shuffle else 1):
                raise ConfigError(
                    f"part {part.index} of {part.count} gets no cut in epoch {progress.epoch}: there are too few for "
                    "so many ranks and workers, or block_size is too large",
                    code="too_few_cuts",
                )
            del progress.epochs[progress.epoch]
            progress.epoch += 1


def _count_damage(progress: Progress, damage: DamagedShard, max_damaged: int | None) -> None:
    """Count a cut that is left out because its shard is damaged; raise the damage where these are too many."""
    progress.num_damaged += 1
    limit = _MAX_DAMAGED if max_damaged is None else max_damaged
    if progress.num_damaged > limit:
        raise DamagedShard(
            f"{damage}; more than max_damaged={limit} cuts of this part were damaged: look at the dataset with "
            "sharmill validate"
        ) from damage
    log.warning("a damaged cut is skipped (%d of at most %d): %s", progress.num_damaged, limit, damage)


def _positions_of(cut: Cut) -> list[tuple[int, ...]]:
    """Return the positions of the cuts that a cut is made of: several where cuts were mixed or joined."""
    tracks = getattr(cut, "tracks", None)
    if tracks is not None:
        return [position for track in tracks for position in _positions_of(track.cut)]
    position = (getattr(cut, "custom", None) or {}).get(POSITION)
    return [] if position is None else [tuple(position)]
