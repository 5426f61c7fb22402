"""Exact states of NeMo's loader: what was used of each dataset of type sharmill.

NeMo's samplers cannot save where they are. They need not: our readers go on from what was used, and what samplers
held back comes again. Filters, buckets and the mixing of datasets begin anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lhotse.cut import MixedCut
from lhotse.dataset import IterableDatasetWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError
from sharmill.shar.reading.loading import dataset_states
from sharmill.shar.reading.state import merge_states
from sharmill.training.nemo.partition import READER, PartitionedCuts
from sharmill.training.nemo.reporting_filter import cuts_of

# With these an example of a reader becomes several, or is read at another time than its neighbours.
_INEXACT = ("perturb_speed", "cut_into_windows_duration", "max_open_streams", "concurrent_bucketing", "noise_path")


def merge_data_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state out of those of the loaders of all data-parallel ranks, for any number of ranks and workers.

    Args:
        states: what ``state_dict()`` of the loader of ``get_dataloader(..., resumable=True)`` gave on every rank. Those
            of ranks that only get the batches of another one are empty, and do not matter.

    Returns:
        What ``get_dataloader(..., state=...)`` takes, with the same entries of type sharmill in the same order.

    Raises:
        ConfigError: a rank is missing, or they are no such states.
    """
    workers = [found for state in states if state for found in dataset_states(state)]
    counts = {len(worker.get("readers", ())) for worker in workers}
    if len(counts) != 1 or counts == {0}:
        raise ConfigError("these are not the states of one loader of get_dataloader(..., resumable=True)")
    return {"readers": [merge_states([worker["readers"][i] for worker in workers]) for i in range(counts.pop())]}


def count_uses(sections: Sequence[Mapping[str, Any]], readers: Sequence[PartitionedCuts]) -> None:
    """Makes the readers count what is used.

    Raises:
        ConfigError: settings under which no exact state is possible.
    """
    for section in sections:
        if inexact := [key for key in _INEXACT if section.get(key)]:
            raise ConfigError(f"resumable=True does not go with {inexact[0]}: what was used could not be counted")
    if not readers:
        raise ConfigError("resumable=True needs an entry of type sharmill: only these can go on")
    for reader in readers:
        reader.track()


class CountingDataset(torch.utils.data.Dataset):
    """Makes batches as another dataset class does, and tells the readers which of their cuts are in them."""

    def __init__(self, dataset: torch.utils.data.Dataset[Any], readers: Sequence[PartitionedCuts]) -> None:
        self._dataset, self._readers = dataset, readers

    def __getitem__(self, examples: Any) -> Any:
        for example in examples:
            mark_consumed(self._readers, example)
        return self._dataset[examples]


def mark_consumed(readers: Sequence[PartitionedCuts], example: Any) -> None:
    """Counts the cuts of an example as used, or as dropped; also those that a cut was joined from."""
    for cut in cuts_of(example):
        for part in [track.cut for track in cut.tracks] if isinstance(cut, MixedCut) else [cut]:
            number = (getattr(part, "custom", None) or {}).get(READER)
            if number is not None:
                readers[number].mark_consumed(part)


class ResumableBatches(torch.utils.data.IterableDataset):
    """The batches of NeMo's loader, with the state of the readers that they come from."""

    def __init__(self, batches: IterableDatasetWrapper, readers: Sequence[PartitionedCuts]) -> None:
        self._batches, self._readers = batches, readers

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches

    def state_dict(self) -> dict[str, Any]:
        return {"readers": [reader.state_dict() for reader in self._readers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state of this part, or merged states, before iterating."""
        states = state.get("readers", ())
        if len(states) != len(self._readers):
            raise ConfigError(f"the state is of {len(states)} datasets of this loader, which has {len(self._readers)}")
        for reader, known in zip(self._readers, states, strict=True):
            reader.load_state_dict(known)


def with_state(
    loader: torch.utils.data.DataLoader[Any], readers: Sequence[PartitionedCuts], state: Mapping[str, Any] | None
) -> StatefulDataLoader:
    """A loader of the same batches, that can save its state, and begins with the given one."""
    batches = ResumableBatches(loader.dataset, readers)
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
