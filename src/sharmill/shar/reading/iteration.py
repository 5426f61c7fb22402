"""The iterable in the CutSet of ``open_shar``: this part's cuts in the order of the epoch, and the reader's state."""

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

# The number of damaged cuts that a part may skip by default.
_MAX_DAMAGED = 100
# With shuffling, the number of consecutive epochs without cuts after which reading fails. If there are hardly more cuts
# than parts, a part may get no cuts in one epoch and some in the next.
_MAX_EMPTY_EPOCHS = 20


class SharReader:
    """The cuts of a dataset for this part (a rank or one of its workers); each iteration reads the next epoch.

    ``state_dict()`` records which cuts the most recent iteration has consumed. If a reader of the same dataset with the
    same options (except ``rank`` and ``world_size``) loads that state, its next iteration continues with the remaining
    cuts, without reading the consumed ones. The states of several ranks and workers must first be merged by
    ``merge_states``; load the result on every rank before workers start. The number of ranks and workers may change.

    By default a cut counts as consumed as soon as the reader yields it. If anything between the reader and training
    reads ahead (a sampler with buckets, a shuffling buffer, a queue), call ``count_only_marked()`` first: a cut then
    counts as consumed once it is passed to ``mark_consumed``.

    Attributes:
        num_left_out: the number of cuts that this process left out, because a field being read has no codes for them or
            because they do not meet ``where``.

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
        if source.omits and options.tail != "keep":
            raise ConfigError(
                f"tail={options.tail!r} counts cuts before they are read, but cuts that {source.omits} are left out: "
                "use tail='keep' (with infinite=True if all ranks need equally many), or omit that field or condition",
                code="bad_config_value",
            )
        self._epochs = EpochReader(source, options)
        self._options = options
        self._epoch = 0
        self._next_epoch = NextEpoch()
        # The process of the most recent iteration, and whether it has loaded a state since then.
        self._process = os.getpid()
        self._is_loaded = False
        self._start: Progress | None = None  # the start of the next iteration; None for the beginning of an epoch
        self._running: Progress | None = None
        self._only_marked = False
        self.num_left_out = 0
        # Positions of cuts that were yielded and have not been marked since.
        self._unmarked: set[tuple[int, ...]] = set()
        # The progress at the start of a pass in which cuts were read but none was marked.
        self._pass_start: Progress | None = None

    def __len__(self) -> int:
        """Return the number of cuts of the whole dataset; this part may have fewer."""
        if self._options.infinite:
            raise TypeError("a reader with infinite=True has no length")
        return self._epochs.source.num_cuts()

    def __iter__(self) -> Iterator[Cut]:
        part = self.part
        self.begin_pass()
        self._running = (self._start or Progress(self._epochs.identity, self._epoch)).for_part(part)
        return self._iterate(self._running, part)

    def begin_pass(self, *, next_epoch: bool = False) -> None:
        """Move to the start of the next iteration, which ``state_dict`` describes from then on.

        A new worker process starts one epoch after the epoch that the loader's workers began most recently.

        Args:
            next_epoch: also start this later epoch in a persistent worker, whose epoch is unfinished if the loader's
                iteration was stopped early.
        """
        if self._pass_start is not None:
            self._go_on_from(self._pass_start)
        self._clear_marks()
        self._running = None
        if self._options.infinite:
            return
        if (next_epoch or self._process != os.getpid()) and not self._is_loaded:
            epoch = self._next_epoch.find(self._epoch)
            if epoch != self._epoch:
                self._go_to(epoch, self._start)
        self._process, self._is_loaded = os.getpid(), False
        self._next_epoch.set(self._epoch + (get_worker_info() is not None))

    def end_pass(self) -> None:
        """End the epoch of a finite reader, even if some cuts were not read or not marked."""
        if self._running is not None and not self._options.infinite:
            self._clear_marks()
            self._running.take(END)
            self._go_to(self._running.epoch + 1, self._running)

    @property
    def part(self) -> Part:
        """The part that an iteration started now would read: the part of the rank or of the calling worker."""
        options, info = self._options, get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info and options.split_by_worker else (0, 1)
        return Part(options.rank * num_workers + worker, options.world_size * num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of ``epoch``."""
        self._running = None
        self._go_to(epoch)
        self._clear_marks()

    def count_only_marked(self) -> None:
        """Count cuts as consumed only when they are passed to ``mark_consumed``; call this before iterating.

        A sampler may read cuts an extra time to estimate its buckets. So a pass in which no cut was marked does not
        count, and the next pass starts at the same place. Do not call ``repeat()`` on the cuts; use ``infinite=True``.
        A cut that is never marked stays in the state and is read again after a resume.
        """
        self._only_marked = True

    def mark_consumed(self, cuts: Iterable[Cut]) -> None:
        """Count cuts as consumed or dropped, including the cuts that a mixed or joined cut was made from.

        Raises:
            ConfigError: ``count_only_marked`` was not called, so cuts are already counted when they are yielded.
        """
        if not self._only_marked:
            raise ConfigError("call count_only_marked() on this reader before iterating", code="inexact_state")
        for cut in cuts:
            if getattr(cut, PADDING, False):
                # This cut is padding: a copy of a cut that is marked separately.
                continue
            for position in _positions_of(cut):
                if position in self._unmarked:
                    self._unmarked.remove(position)
                    self._pass_start = None

    @property
    def num_unmarked(self) -> int:
        """The number of cuts that were yielded but have not been marked as consumed since."""
        return len(self._unmarked)

    def count_left(self, epoch: int) -> np.ndarray:
        """Count the cuts of an epoch that were left for each part when the iteration began; shape (parts,).

        A state loaded from a single part does not record what other parts have read. In this case, the number of this
        part is returned for all parts.
        """
        part, start = self.part, self._start or Progress(self._epochs.identity)
        left = self._epochs.count_left(epoch, start.epochs.get(epoch, EpochProgress()), part.count)
        if start.part is not None and epoch in start.epochs:
            left[:] = left[part.index]
        return left

    def count_damaged(self) -> int:
        """Count one more damaged cut, which the caller has found; return the number of damaged cuts over all epochs."""
        assert self._running is not None
        self._running.num_damaged += 1
        return self._running.num_damaged

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this part as numbers, strings and lists, for JSON and checkpoints.

        The state is small: a few numbers per part. With ``count_only_marked`` it also lists the cuts that were read but
        not yet marked.
        """
        return {**self._progress().to_dict(), "infinite": self._options.infinite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration from a state of this part, or from the merged states of all parts.

        If the state's epoch is finished, the next iteration reads the next epoch. In a worker, however, it reads the
        empty rest of the finished epoch, because other workers may have cuts of that epoch left.

        Raises:
            ConfigError: the state belongs to another dataset or order, or, when iterating, to another part.
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
        # Copy the set in one step, since another thread may be adding cuts.
        for epoch, _, _, block, item in list(self._unmarked):
            known = progress.epochs.setdefault(epoch, EpochProgress())
            known.unused.setdefault(block, set()).add(item)
        progress.go_back_to(min([progress.epoch, *progress.epochs]))
        return progress

    def _go_on_from(self, progress: Progress) -> None:
        self._start, self._running, self._epoch = progress, None, progress.epoch
        self._next_epoch.set(self._epoch)

    def _go_to(self, epoch: int, known: Progress | None = None) -> None:
        """Move to the beginning of an epoch or, if ``known`` records progress in it, to the cuts that are left."""
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
            num_empty += not progress.current().reached  # a resumed epoch does not count, since its rest may be empty
            for position, cut, _ in self._epochs.read(progress, part):
                if cut is None or isinstance(cut, DamagedShard):
                    if cut is None:
                        self.num_left_out += 1
                    else:
                        _count_damage(progress, cut, self._options.max_damaged)
                    progress.take(position)
                    continue
                if self._only_marked:
                    # Note the cut as unmarked before recording its position, so that no state counts it as consumed.
                    # Padding has no position.
                    if position is not None:
                        self._unmarked.add((progress.epoch, *position))
                    if pass_start is not None:
                        self._pass_start, pass_start = pass_start, None
                progress.take(position)
                num_empty = 0
                yield cut
            progress.take(END)
            if self.num_left_out > before:
                log.warning("epoch %d: %d cuts were left out because they %s", progress.epoch,
                            self.num_left_out - before, self._epochs.source.omits)  # fmt: skip
            if not self._options.infinite:
                # The next iteration reads the next epoch. Until it begins, the state describes the end of the current
                # epoch.
                self._go_to(progress.epoch + 1, progress)
                return
            if num_empty >= (_MAX_EMPTY_EPOCHS if self._options.shuffle else 1):
                raise ConfigError(
                    f"part {part.index} of {part.count} gets no cuts in epoch {progress.epoch}: use fewer ranks and "
                    "workers, or a smaller block_size",
                    code="too_few_cuts",
                )
            del progress.epochs[progress.epoch]
            progress.epoch += 1


def _count_damage(progress: Progress, damage: DamagedShard, max_damaged: int | None) -> None:
    """Count a cut that is left out because of damage; raise the damage if there are too many such cuts."""
    progress.num_damaged += 1
    limit = _MAX_DAMAGED if max_damaged is None else max_damaged
    if progress.num_damaged > limit:
        raise DamagedShard(
            f"{damage}; more than max_damaged={limit} cuts of this part were damaged: check the dataset with "
            "sharmill validate"
        ) from damage
    log.warning("skipping a damaged cut (%d of at most %d): %s", progress.num_damaged, limit, damage)


def _positions_of(cut: Cut) -> list[tuple[int, ...]]:
    """Return the positions of the cuts that a cut was made from: several if cuts were mixed or joined."""
    tracks = getattr(cut, "tracks", None)
    if tracks is not None:
        return [position for track in tracks for position in _positions_of(track.cut)]
    position = (getattr(cut, "custom", None) or {}).get(POSITION)
    return [] if position is None else [tuple(position)]
