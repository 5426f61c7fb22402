"""Exact states of NeMo's loader: which cuts of each dataset of type sharmill were consumed.

NeMo's samplers cannot save where they are. They need not: our readers go on from what was consumed, and what samplers
held back comes again. Filters, buckets and the mixing of datasets begin anew.

NeMo puts a filter for each limit between the data and a sampler. They are put in one place, which reports what they
drop: a saved state must not hold it as still to come, and endless data of which all is dropped would be searched for
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from lhotse import CutSet
from lhotse.cut import Cut, MixedCut
from lhotse.dataset import IterableDatasetWrapper
from lhotse.dataset.sampling.base import CutSampler
from lhotse.lazy import LazyFilter
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError
from sharmill.shar.reading.loading import dataset_states
from sharmill.shar.reading.state import merge_states
from sharmill.training.cut_data import epoch_of
from sharmill.training.nemo.partition import READER, PartitionedCuts

# With these an example of a reader becomes several, or is read at another time than its neighbours.
_INEXACT = ("perturb_speed", "cut_into_windows_duration", "max_open_streams", "concurrent_bucketing", "noise_path")


def merge_data_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of the loaders of all data-parallel ranks into one, for any number of ranks and workers.

    Args:
        states: of ``state_dict()`` of the loader of ``get_dataloader(..., resumable=True)`` on every rank. Those of
            ranks that only get the batches of another one are empty, and do not matter.

    Returns:
        The ``state`` for ``get_dataloader(..., state=...)``, with the same entries of type sharmill in the same order.

    Raises:
        ConfigError: a rank is missing, or they are no such states.
    """
    workers = [found for state in states if state for found in dataset_states(state)]
    counts = {len(worker.get("readers", ())) for worker in workers}
    if len(counts) != 1 or counts == {0}:
        raise ConfigError(
            "these are not the states of one loader of get_dataloader(..., resumable=True)", code="wrong_state"
        )
    return {"readers": [merge_states([worker["readers"][i] for worker in workers]) for i in range(counts.pop())]}


def count_only_marked(sections: Sequence[Mapping[str, Any]], datasets: Sequence[PartitionedCuts]) -> None:
    """Make the readers of datasets count only marked cuts as consumed.

    Raises:
        ConfigError: settings under which no exact state is possible.
    """
    for section in sections:
        if inexact := [key for key in _INEXACT if section.get(key)]:
            raise ConfigError(
                f"resumable=True does not go with {inexact[0]}: what is consumed could not be counted",
                code="inexact_state",
            )
    if not datasets:
        raise ConfigError("resumable=True needs an entry of type sharmill: only these can go on", code="inexact_state")
    for dataset in datasets:
        dataset.count_only_marked()


class CountingDataset(torch.utils.data.Dataset):
    """The batches of another dataset class; the cuts in them are marked as consumed."""

    def __init__(self, dataset: torch.utils.data.Dataset[Any], sources: Sequence[PartitionedCuts]) -> None:
        self._dataset, self._sources = dataset, sources

    def __getitem__(self, examples: Any) -> Any:
        for example in examples:
            mark_consumed(self._sources, example)
        return self._dataset[examples]


def mark_consumed(sources: Sequence[PartitionedCuts], example: Any) -> None:
    """Mark the cuts of an example as consumed, or as dropped, in the readers that they come from."""
    for cut in cuts_of(example):
        # Those that a cut was joined from may come from several readers.
        for part in [track.cut for track in cut.tracks] if isinstance(cut, MixedCut) else [cut]:
            number = (getattr(part, "custom", None) or {}).get(READER)
            if number is not None:
                sources[number].reader.mark_consumed([part])


class ResumableBatches(torch.utils.data.IterableDataset):
    """The batches of NeMo's loader, with the state of the readers that they come from."""

    def __init__(self, batches: IterableDatasetWrapper, sources: Sequence[PartitionedCuts]) -> None:
        self._batches, self._sources = batches, sources

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's readers."""
        return {"readers": [source.reader.state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state of this part, or merged states, before iterating."""
        states = state.get("readers", ())
        if len(states) != len(self._sources):
            raise ConfigError(
                f"the state is of {len(states)} datasets of this loader, which has {len(self._sources)}",
                code="wrong_state",
            )
        for source, known in zip(self._sources, states, strict=True):
            source.go_on_from(known)


def with_state(
    loader: torch.utils.data.DataLoader[Any], sources: Sequence[PartitionedCuts], state: Mapping[str, Any] | None
) -> StatefulDataLoader:
    """Return a loader of the same batches that can save its state, and begins with the given one."""
    batches = ResumableBatches(loader.dataset, sources)
    if state is not None:
        batches.load_state_dict(state)
    return StatefulDataLoader(
        batches,
        batch_size=None,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )


# So many examples in a row, and a whole epoch of every dataset, must be dropped before nothing more is hoped for.
_MIN_DROPPED: Final = 1000


def report_dropped(sampler: CutSampler, dropped: Callable[[Any], None] | None = None) -> None:
    """Replace the filters before a sampler, or before each of those that it is made of, by ``_ReportingFilter``."""
    for one in getattr(sampler, "samplers", [sampler]):
        one.cuts = tuple(CutSet(_ReportingFilter(cuts, dropped)) for cuts in one.cuts)


class _ReportingFilter:
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
        # Of the examples dropped since the last that passed: their number, and each reader's epochs, first and last.
        count = 0
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for example in self._examples:
            if all(passes(example) for passes in self._predicates):
                yield example
                count, first, last = 0, {}, {}
                continue
            if self._dropped is not None:
                self._dropped(example)
            count += 1
            for cut in cuts_of(example):
                if (reader := (getattr(cut, "custom", None) or {}).get(READER)) is not None:
                    first.setdefault(reader, epoch_of(cut))
                    last[reader] = epoch_of(cut)
            if count >= _MIN_DROPPED and first and all(last[reader] > epoch + 1 for reader, epoch in first.items()):
                raise ConfigError(
                    f"none of {count} examples in a row passes the filters: loosen min_duration, max_duration, "
                    "max_cer, min_context_speaker_similarity, the buckets or whatever drops them",
                    code="too_few_cuts",
                )


def cuts_of(example: Any) -> list[Cut]:
    """Return the cuts of an example: itself, those of a conversation, or none of a text."""
    if isinstance(example, Cut):
        return [example]
    return example.list_cuts() if hasattr(example, "list_cuts") else []
