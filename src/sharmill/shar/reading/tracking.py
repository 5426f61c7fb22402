"""States that count what was used, where something between the reader and the use reads ahead.

A sampler with buckets, a shuffling buffer or a queue holds cuts that the reader has given out and training has not
seen. After a resume from the reader's own state those would be missing in their epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lhotse import CutSet
from lhotse.cut import Cut

from sharmill.errors import ConfigError
from sharmill.shar.reading.attach import positions_of
from sharmill.shar.reading.iteration import SharReader
from sharmill.shar.reading.order import END
from sharmill.shar.reading.state import EpochProgress


class UseTracker:
    """Stands between ``open_shar`` and what reads ahead, and is told what was used.

    Args:
        cuts: what ``open_shar`` gave.
        max_lag: a cut after which so many were read, and that was neither used nor dropped since, counts as dropped:
            some filter without this tracker's knowledge. It must be larger than everything that reads ahead can hold.
            By default there is no such limit, and every cut that is lost on the way stays in the state, to be read
            again after a resume.

    A sampler may read the cuts once more than it uses them, to estimate its buckets. So a pass of which nothing was
    used does not count, and the next one begins where it began. Do not ``repeat()`` the cuts: ``infinite=True`` does.

    Attributes:
        cuts: what to read instead of the reader's cuts.

    Example:
        >>> tracker = UseTracker(open_shar("data/librispeech", shuffle=True, infinite=True))  # doctest: +SKIP
        >>> sampler = DynamicBucketingSampler(tracker.cuts, max_duration=100, num_buckets=10)  # doctest: +SKIP
        >>> for batch in sampler:  # doctest: +SKIP
        ...     train(batch)
        ...     tracker.used(batch)
        ...     checkpoint["data"] = tracker.state_dict()
    """

    def __init__(self, cuts: CutSet, *, max_lag: int | None = None) -> None:
        if not isinstance(cuts.data, SharReader):
            raise ConfigError("a UseTracker takes the CutSet of open_shar as it is; filter and map its cuts instead")
        self._reader = cuts.data
        self._max_lag = max_lag
        # Positions in the order in which they were read, as dictionaries keep it.
        self._open: dict[tuple[int, ...], int] = {}
        self._num_read = 0
        # Where the pass began of which cuts were read and none was used.
        self._begun: dict[str, Any] | None = None
        self.cuts = CutSet(_Tracked(self))

    def used(self, cuts: Iterable[Cut]) -> None:
        """Counts cuts as used; also those that a cut was mixed or joined from."""
        for cut in cuts:
            for position in positions_of(cut):
                if self._open.pop(position, None) is not None:
                    self._begun = None

    def dropped(self, cut: Cut) -> None:
        """Counts a cut as done with, because nobody will use it."""
        self.used([cut])

    def state_dict(self) -> dict[str, Any]:
        """As the reader's, but what was read and not used is still to be read. It grows with what is read ahead."""
        progress = self._reader.progress()
        assert progress.part is not None
        for epoch, _, _, block, item in self._open:
            known = progress.epochs.setdefault(epoch, EpochProgress())
            known.unused.setdefault(block, set()).add(item)
        first = min([progress.epoch, *progress.epochs])
        for epoch in range(first, progress.epoch):
            progress.epochs.setdefault(epoch, EpochProgress()).reached[progress.part] = END
        progress.epoch = first
        return progress.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the reader's."""
        self._reader.load_state_dict(state)
        self._forget_all()

    def set_epoch(self, epoch: int) -> None:
        """As the reader's."""
        self._reader.set_epoch(epoch)
        self._forget_all()

    def _forget_all(self) -> None:
        self._open.clear()
        self._begun = None

    def _iterate(self) -> Iterator[Cut]:
        if self._begun is not None:
            self._reader.load_state_dict(self._begun)
        self._forget_all()
        cuts = iter(self._reader)
        begun = self._reader.state_dict()
        for number, cut in enumerate(cuts):
            if number == 0:
                self._begun = begun
            self._num_read += 1
            for position in positions_of(cut):
                self._open[position] = self._num_read
            if self._max_lag is not None:
                self._forget(self._num_read - self._max_lag)
            yield cut

    def _forget(self, before: int) -> None:
        while self._open:
            oldest = next(iter(self._open))
            if self._open[oldest] >= before:
                return
            del self._open[oldest]


class _Tracked:
    """The iterable in a tracker's CutSet."""

    def __init__(self, tracker: UseTracker) -> None:
        self._tracker = tracker

    def __iter__(self) -> Iterator[Cut]:
        return self._tracker._iterate()

    def __len__(self) -> int:
        return len(self._tracker._reader)
