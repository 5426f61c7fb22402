"""The filters of a sampler of NeMo's in one place, which reports what they drop.

NeMo puts a filter for each limit between the data and a sampler. Where they drop everything, endless data would be
searched for ever; and what they drop has to be known, so that a saved state does not hold it as still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from lhotse import CutSet
from lhotse.cut import Cut
from lhotse.dataset.sampling.base import CutSampler
from lhotse.lazy import LazyFilter

from sharmill.errors import ConfigError
from sharmill.training.cut_data import epoch_of
from sharmill.training.nemo.partition import READER

# So many examples in a row, and a whole epoch of every dataset, must be dropped before nothing more is hoped for.
_MIN_DROPPED: Final = 1000


def report_dropped(sampler: CutSampler, dropped: Callable[[Any], None] | None = None) -> None:
    """Replace the filters before a sampler, or before each of those that it is made of, by ``ReportingFilter``."""
    for one in getattr(sampler, "samplers", [sampler]):
        one.cuts = tuple(CutSet(ReportingFilter(cuts, dropped)) for cuts in one.cuts)


class ReportingFilter:
    """The examples of a CutSet, through its outermost filters, all at once.

    Args:
        cuts: lazy, perhaps with filters.
        dropped: is told each example that is dropped.
    """

    def __init__(self, cuts: CutSet, dropped: Callable[[Any], None] | None = None) -> None:
        self._dropped = dropped
        self._predicates: list[Callable[[Any], bool]] = []
        while isinstance(cuts.data, LazyFilter):
            self._predicates.insert(0, cuts.data.predicate)
            cuts = cuts.data.iterator
        self._examples = cuts

    def __iter__(self) -> Iterator[Any]:
        in_vain = _InVain()
        for example in self._examples:
            if all(passes(example) for passes in self._predicates):
                yield example
                in_vain = _InVain()
            else:
                if self._dropped is not None:
                    self._dropped(example)
                in_vain.add(example)


class _InVain:
    """The examples that were dropped since the last one that passed."""

    def __init__(self) -> None:
        self._count = 0
        # The epoch of each reader then and now.
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def add(self, example: Any) -> None:
        self._count += 1
        for cut in cuts_of(example):
            custom = getattr(cut, "custom", None) or {}
            if (reader := custom.get(READER)) is not None:
                self._first.setdefault(reader, epoch_of(cut))
                self._last[reader] = epoch_of(cut)
        if self._count < _MIN_DROPPED or not self._first:
            return
        if all(self._last[reader] > first + 1 for reader, first in self._first.items()):
            raise ConfigError(
                f"none of {self._count} examples in a row passes the filters: loosen min_duration, max_duration, "
                "max_cer, min_context_speaker_similarity, the buckets or whatever drops them",
                code="too_few_cuts",
            )


def cuts_of(example: Any) -> list[Cut]:
    """Return the cuts of an example: itself, those of a conversation, or none of a text."""
    if isinstance(example, Cut):
        return [example]
    return example.list_cuts() if hasattr(example, "list_cuts") else []
