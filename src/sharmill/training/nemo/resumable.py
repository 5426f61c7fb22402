"""Exact states of NeMo's loader: which cuts and other examples of each divided entry were consumed.

NeMo's samplers cannot save where they are. They need not: our readers go on from what was consumed, and what samplers
held back comes again. Buckets and the mixing of datasets begin anew, with other seeds each time.

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
from sharmill.training.nemo.loader_settings import DIVIDED, Settings, is_divisible, sources_of, types_in
from sharmill.training.nemo.partition import READER, PartitionedCuts

# With these an example of a reader becomes several, or is read at another time than its neighbours.
_INEXACT = (
    "perturb_speed", "cut_into_windows_duration", "cut_text_into_windows_tokens", "max_open_streams",
    "concurrent_bucketing", "noise_path",
)  # fmt: skip
# These types of NeMo's drop cuts by filters of their own, or make cuts that do not say where they come from.
_UNMARKED = ("lhotse_magpietts_data_as_continuation", "s2s_as_conversation", "s2s_duplex_overlap_as_s2s_duplex")


# Far from the seeds that lhotse gives to ranks and workers, which are these plus multiples of 100.
_SEEDS_PER_RESUME: Final = 1_000_003


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
    found = [one for state in states if state for one in dataset_states(state)]
    workers = [part for one in found for part in one.get("parts", [one])]
    counts = {len(worker.get("readers", ())) for worker in workers}
    if len(counts) != 1 or counts == {0}:
        raise ConfigError(
            "these are not the states of one loader of get_dataloader(..., resumable=True)", code="wrong_state"
        )
    merged = [merge_states([worker["readers"][i] for worker in workers]) for i in range(counts.pop())]
    return {"readers": merged, "resumes": max(worker.get("resumes", 0) for worker in workers)}


def vary_seeds(settings: Settings, state: Mapping[str, Any]) -> int:
    """Give samplers and the mixing of datasets other seeds than before the stop; return the number of the resume.

    With the same ones, each resume would repeat the first draws, and datasets would not keep to their weights. The
    readers' own seeds are in their entries, and stay.
    """
    resumes = int(state.get("resumes", 0)) + 1
    for key in ("seed", "shard_seed"):
        if isinstance(settings[key], int):
            settings[key] += _SEEDS_PER_RESUME * resumes
    return resumes


def count_only_marked(sections: Sequence[Settings], datasets: Sequence[PartitionedCuts]) -> None:
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
        if unmarked := [kind for kind in types_in(section) if kind in _UNMARKED]:
            raise ConfigError(
                f"resumable=True: type {unmarked[0]} drops or makes examples without saying of which they come, so "
                "that what is consumed could not be counted",
                code="inexact_state",
            )
        for entry in sources_of(section):
            if is_divisible(entry):
                raise ConfigError(
                    f"resumable=True needs data of type {entry['type']} as a stream: set force_iterable_dataset: true",
                    code="inexact_state",
                )
            if entry.get("type") not in ("sharmill", DIVIDED):
                raise ConfigError(
                    f"resumable=True: data of type {entry.get('type')} cannot go on where they were: pipes, "
                    "slice_length, extra_fields and types that sharmill does not divide have no place to go back to",
                    code="inexact_state",
                )
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
    for part in parts_of(example):
        if (number := _reader_of(part)) is not None:
            sources[number].reader.mark_consumed([part])


class ResumableBatches(torch.utils.data.IterableDataset):
    """The batches of NeMo's loader, with the state of the readers that they come from."""

    def __init__(self, batches: IterableDatasetWrapper, sources: Sequence[PartitionedCuts], resumes: int = 0) -> None:
        self._batches, self._sources, self._resumes = batches, sources, resumes

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's readers."""
        return {"readers": [source.reader.state_dict() for source in self._sources], "resumes": self._resumes}

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
    loader: torch.utils.data.DataLoader[Any],
    sources: Sequence[PartitionedCuts],
    state: Mapping[str, Any] | None,
    resumes: int,
) -> StatefulDataLoader:
    """Return a loader of the same batches that can save its state, and begins with the given one."""
    batches = ResumableBatches(loader.dataset, sources, resumes)
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


# So many examples in a row, and a whole epoch of every dataset, must be dropped before nothing more is hoped for; or so
# many of data that have no epochs.
_MIN_DROPPED: Final = 1000
_MAX_DROPPED: Final = 1_000_000


def report_dropped(
    sampler: CutSampler, limits: Sequence[Callable[[Any], bool]], dropped: Callable[[Any], None] | None = None
) -> None:
    """Replace the filters before a sampler by one ``_ReportingFilter``, with further limits."""
    sampler.cuts = tuple(CutSet(_ReportingFilter(cuts, limits, dropped)) for cuts in sampler.cuts)


class _ReportingFilter:
    """The examples of a CutSet, through its outermost filters, all at once.

    Args:
        cuts: lazy, perhaps with filters.
        limits: further filters.
        dropped: is told each example that is dropped.
    """

    def __init__(
        self, cuts: CutSet, limits: Sequence[Callable[[Any], bool]], dropped: Callable[[Any], None] | None = None
    ) -> None:
        self._dropped = dropped
        self._predicates = list(limits)
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
            for part in parts_of(example):
                if (reader := _reader_of(part)) is not None:
                    first.setdefault(reader, epoch_of(part))
                    last[reader] = epoch_of(part)
            everything = first and all(last[reader] > epoch + 1 for reader, epoch in first.items())
            if count >= (_MIN_DROPPED if everything else _MAX_DROPPED):
                raise ConfigError(
                    f"none of {count} examples in a row passes the filters: loosen min_duration, max_duration, "
                    "max_cer, min_context_speaker_similarity, the buckets or whatever drops them",
                    code="too_few_cuts",
                )


def parts_of(example: Any) -> Iterator[Any]:
    """Yield what readers have marked in an example: itself, its cuts, and those that a cut was joined from."""
    if not isinstance(example, Cut):
        yield example
    for cut in cuts_of(example):
        if isinstance(cut, MixedCut):
            yield from (track.cut for track in cut.tracks)
        else:
            yield cut


def _reader_of(part: Any) -> int | None:
    return (getattr(part, "custom", None) or {}).get(READER)


def cuts_of(example: Any) -> list[Cut]:
    """Return the cuts of an example: itself, those of a conversation, or none of a text."""
    if isinstance(example, Cut):
        return [example]
    return example.list_cuts() if hasattr(example, "list_cuts") else []
