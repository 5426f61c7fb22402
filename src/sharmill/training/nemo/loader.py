"""The training loader: NeMo's, over our datasets and whatever else NeMo reads, divided, and with exact states.

A **reader** is a data-parallel rank, or one worker process of its data loader. Who splits the data differs: a map-style
loader samples in the main process and its sampler takes every n-th batch, so that every rank must read the same order;
an iterable one samples where it reads, so that every reader must read something else.

NeMo's samplers cannot **save** where they are. They need not: our readers go on from what was consumed, and what
samplers held back comes again. Buckets and the mixing of datasets begin anew, with other seeds each time; buckets first
give out what is left of earlier epochs. NeMo puts a filter for each limit between the data and a sampler. They are put
in one place, which reports what they drop: a saved state must not hold it as still to come, and endless data of which
all is dropped would be searched for ever.

With ``canonical: N``, an epoch has N fixed parts, each of which makes its own batches. Of W ranks each has N / W parts,
and gives out one batch of each in turn; so N / W batches of every rank are together one global step, which is the same
for every W. All that is random follows from the number of a part.
"""

from __future__ import annotations

import math
import os
import random
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from lhotse import CutSet
from lhotse.cut import Cut, MixedCut
from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler, IterableDatasetWrapper
from lhotse.dataset.sampling.dynamic import DurationBatcher
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketer
from lhotse.lazy import LazyFilter
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError, refuse
from sharmill.registry import require_package
from sharmill.shar.fields import CONTEXT_AUDIO, CONTEXT_CODES
from sharmill.shar.index import read_dataset
from sharmill.shar.reading.iteration import SharReader
from sharmill.shar.reading.loading import dataset_states, load_states
from sharmill.shar.reading.state import merge_states
from sharmill.training.codes import CodecForm, epoch_of
from sharmill.training.nemo.classic import DIVIDED, Settings, entry_directory, type_of
from sharmill.training.nemo.settings import (
    check_files,
    check_tokenizer,
    entries_of,
    is_divisible,
    loader_schema,
    prepare_settings,
    resolve_settings,
    sections_of,
    sources_of,
    tag_names,
)
from sharmill.training.nemo.stores import refuse_command
from sharmill.training.speech_text import ContextSpeechDataset

_READER: Final = "shar_reader"
# The divided sources of the loader that is being made, in the order in which NeMo reads their entries.
_made: ContextVar[list[PartitionedCuts] | None] = ContextVar("_made", default=None)


class PartitionedCuts:
    """The cuts, or other examples, that this process reads: an epoch each time, or epochs without end.

    They are divided among the readers of a loader as the options of an entry ask for it. ``shard_seed`` is a number:
    one order, made from it, of which every reader gets its part. ``randomized``: the same, made from ``seed``.
    ``trng``: each rank draws an order of its own and reads all of it, its workers a part each; for a finite pass it is
    as ``randomized``, since otherwise samples would come twice.

    Args:
        open_reader: opens them, with ``shuffle``, ``seed``, ``rank``, ``world_size`` and ``infinite`` of ``open_shar``.
        options: of an entry of ``input_cfg``, as NeMo hands them down. ``seed``, ``rank`` and ``world_size`` are not
            there where nobody told them: then they are those that NeMo gave to the worker process. ``whole_part``: the
            part is that of ``rank``, whichever worker reads it. ``passes``: so many epochs are a finite pass.

    Attributes:
        number: tells it from the others of a loader; its cuts have it as ``shar_reader``.
        epoch: the next one. To estimate buckets, NeMo reads cuts before the training does: each rank so many cuts,
            which may be another number of epochs on each. The training begins with the first one on all of them.
        reader: that of all iterations, after ``count_only_marked``.

    Raises:
        ConfigError: see ``open_reader``.
    """

    def __init__(self, open_reader: Callable[..., SharReader], options: Mapping[str, Any]) -> None:
        self._shard_seed = options.get("shard_seed", "trng")
        self._shuffle = options.get("shuffle", False)
        self.reader = open_reader(shuffle=self._shuffle)  # a wrong name is an error here rather than in a worker
        self._open_reader, self._options = open_reader, options
        self._finite = options.get("force_finite", False) or options.get("metadata_only", False)
        self._passes = options.get("passes", 1) if self._finite else 1
        self._map_style = options.get("force_map_dataset", False)
        # True if the rank draws an order of its own.
        self._drawn = bool(self._shuffle) and self._shard_seed == "trng" and not self._finite
        self._drawn_seed = secrets.randbelow(2**31)
        self.epoch = 0
        self._process = os.getpid()
        self.number = 0
        if (made := _made.get()) is not None:
            self.number = len(made)
            made.append(self)
        self._only_marked = False

    def __iter__(self) -> Iterator[Any]:
        if self._process != os.getpid():
            self._process, self.epoch = os.getpid(), 0
        for _ in range(self._passes):
            reader = self.reader if self._only_marked else self._open()
            self.epoch += 1  # whoever iterates again gets another order
            for cut in reader:
                self.epoch = max(self.epoch, epoch_of(cut) + 1)
                setattr(cut, _READER, self.number)
                yield cut

    def __len__(self) -> int:
        return self._passes * len(self._open_reader(shuffle=self._shuffle))

    def count_only_marked(self) -> None:
        """Open the one ``reader`` of all iterations, which counts a cut as consumed once it was marked as such.

        Raises:
            ConfigError: there is no one order without end, that every reader has a part of.
        """
        if self._finite or self._map_style or self._drawn:
            raise ConfigError(
                "resumable=True is for streaming without end in one order for all: neither force_finite nor "
                "force_map_dataset, and shard_seed: randomized or a number",
                code="inexact_state",
            )
        self.reader, self._only_marked = self._open(), True
        self.reader.count_only_marked()

    def _open(self) -> SharReader:
        """Open the part of this rank, or of this worker process, at the epoch that is next."""
        rank, world_size, seed = (self._options.get(key) for key in ("rank", "world_size", "seed"))
        if rank is None or world_size is None:
            from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED, get_rank, get_world_size

            # As lhotse's ``worker_init_fn`` left them in this worker process.
            rank, world_size, worker = get_rank(), get_world_size(), torch.utils.data.get_worker_info()
            if worker is None:
                if world_size > 1 and not self._drawn and not self._map_style:
                    # The rank of this process need not be its data-parallel rank.
                    raise ConfigError(
                        "with num_workers 0 and several ranks, use sharmill.training.get_dataloader", code="split_wrong"
                    )
                rank, world_size = 0, 1
            elif seed is None:
                seed = int(os.environ[LHOTSE_PROCESS_SEED]) - 100 * worker.id - 100_000 * rank
        if self._drawn or self._map_style:
            rank, world_size = 0, 1
        if self._drawn:
            seed = self._drawn_seed
        elif isinstance(self._shard_seed, int):
            seed = self._shard_seed
        reader = self._open_reader(
            shuffle=self._shuffle,
            seed=seed or 0,
            rank=rank,
            world_size=world_size,
            split_by_worker=not self._options.get("whole_part", False),
            infinite=not self._finite,
        )
        reader.set_epoch(self.epoch)
        return reader


# With these an example of a reader becomes several, or is read at another time than its neighbours.
_INEXACT = (
    "perturb_speed", "cut_into_windows_duration", "cut_text_into_windows_tokens", "concurrent_bucketing", "noise_path",
)  # fmt: skip


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


def _require_exact(sections: Sequence[Settings], *, in_turn: bool) -> None:
    """Raise ConfigError for settings under which no exact state is possible; with buckets in turn, an epoch of each."""
    for section in sections:
        sources = sources_of(section)
        inexact = [key for key in (*_INEXACT, *["drop_last"] * in_turn) if section.get(key)]
        unmarked = [entry["type"] for entry in entries_of(section) if not type_of(entry).is_marked]
        whole = [entry["type"] for entry in sources if is_divisible(entry)]
        others = [str(entry.get("type")) for entry in sources if entry.get("type") not in ("sharmill", DIVIDED)]
        refuse(
            (inexact, f"resumable=True does not go with {', '.join(inexact)}: what is consumed could not be counted"),
            (unmarked,
             f"resumable=True: type {', '.join(unmarked)} drops or makes examples without saying of which they come, "
             "so that what is consumed could not be counted"),
            (whole,
             f"resumable=True needs data of type {', '.join(whole)} as a stream: set force_iterable_dataset: true"),
            (others,
             f"resumable=True: data of type {', '.join(others)} cannot go on where they were: pipes, slice_length, "
             "extra_fields and types that sharmill does not divide have no place to go back to"),
            code="inexact_state",
        )  # fmt: skip


class CountingDataset(torch.utils.data.Dataset):
    """The batches of another dataset class; the cuts in them are marked as consumed."""

    def __init__(self, dataset: Dataset[Any], sources: Sequence[PartitionedCuts]) -> None:
        self._dataset, self._sources = dataset, sources

    def __getitem__(self, examples: Any) -> Any:
        for example in examples:
            mark_consumed(self._sources, example)
        return self._dataset[examples]


def mark_consumed(sources: Sequence[PartitionedCuts], example: Any) -> None:
    """Mark the cuts of an example as consumed, or as dropped, in the readers that they come from."""
    for part in _parts_of(example):
        if (number := _reader_of(part)) is not None:
            sources[number].reader.mark_consumed([part])


class ResumableBatches(torch.utils.data.IterableDataset):
    """One batch of each part in turn, with the states of the readers that the parts come from.

    Args:
        parts: NeMo's batches of each part, and the sources that they read. A single one is divided by its readers among
            the workers; of several, each worker has some.
        resumes: how often the training was resumed.
    """

    def __init__(self, parts: Sequence[tuple[IterableDatasetWrapper, list[PartitionedCuts]]], resumes: int) -> None:
        self._parts, self._resumes = parts, resumes

    def __iter__(self) -> Iterator[Any]:
        running = [iter(batches) for batches, _ in self._own_parts()]
        while True:
            for batches in running:
                yield next(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's parts."""
        states = [[source.reader.state_dict() for source in sources] for _, sources in self._own_parts()]
        return {"parts": [{"readers": readers, "resumes": self._resumes} for readers in states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the states of these parts, before iterating."""
        for (_, sources), known in zip(self._own_parts(), state.get("parts", [state]), strict=True):
            load_states([source.reader for source in sources], known)

    def _own_parts(self) -> Sequence[tuple[IterableDatasetWrapper, list[PartitionedCuts]]]:
        """Return every n-th part: a loader takes batches of its workers in turn, so the order is that of the parts."""
        info = torch.utils.data.get_worker_info()
        return self._parts if info is None or len(self._parts) == 1 else self._parts[info.id :: info.num_workers]


class _ResumableBuckets(DynamicBucketingSampler):
    """lhotse's sampler, with other draws of buckets after each resume; lhotse repeats its first ones.

    Attributes:
        bucket_seed: the same on all ranks, whose workers of one number so draw the same buckets.
    """

    bucket_seed: int

    def __iter__(self) -> _ResumableBuckets:
        super().__iter__()
        seed = self.bucket_seed + getattr(torch.utils.data.get_worker_info(), "id", 0)
        self.cuts_iter = iter(
            _OldestFirst(
                zip(*map(iter, self.cuts), strict=True),
                duration_bins=self.duration_bins,
                world_size=self.world_size,
                constraint=self.constraint,
                drop_last=self.drop_last,
                buffer_size=self.buffer_size,
                shuffle=self.shuffle,
                rng=self.rng,
                bucket_rng=random.Random(seed) if self.sync_buckets else None,
                diagnostics=self.diagnostics,
            )
        )
        return self


class _OldestFirst(DynamicBucketer):
    """lhotse's buckets, which begin with the examples of earlier epochs than the newest that they were filled with.

    A resume reads again what buffers had held back. Beside new examples, some of it might be held back at every stop.
    The cuts are an iterator.
    """

    buffer_size: int

    def __iter__(self) -> Iterator[CutSet]:
        self.cuts_iter = iter(self.cuts)
        self._collect_cuts_in_buckets(self.buffer_size)
        newest = dict(sorted(_epoch_in(item) for bucket in self.buckets for item in bucket.queue))

        def age(item: tuple[Any]) -> int:
            reader, epoch = _epoch_in(item)
            return newest.get(reader, epoch) - epoch

        for bucket in self.buckets:
            bucket.queue = deque(sorted(bucket.queue, key=age, reverse=True))
        while old := [
            bucket for bucket in self.buckets
            if bucket.queue and age(bucket.queue[0]) > 0 and (not self.drop_last or self._is_ready(bucket))
        ]:  # fmt: skip
            oldest = max(old, key=lambda bucket: age(bucket.queue[0]))
            # It is filled up with newer ones, and given out even if it is not full then.
            batch = next(iter(DurationBatcher(list(oldest.queue), constraint=self.constraint.copy())))
            yield batch
            for _ in batch:
                oldest.get()
            self._collect_cuts_in_buckets(len(batch))
        self.buffer_size = 0  # the buckets are full
        yield from super().__iter__()


class _Bucket:
    """The examples of a sampler, which gets those of one epoch in each iteration.

    Attributes:
        passes: how many epochs of the bucket are one of the training.
    """

    def __init__(self, sampler: Any, passes: int) -> None:
        self.sampler, self.passes = sampler, passes
        self._examples, sampler.cuts = sampler.cuts[0], (CutSet(self),)
        self._groups: Iterator[tuple[int, Iterator[Any]]] = iter(())
        self._next: tuple[int, Iterator[Any]] | None = None

    def find_next(self) -> tuple[int, Iterator[Any]]:
        """Return the epoch that the next iteration has, and its examples; a huge one and none if the data are empty."""
        self._next = self._next or next(self._groups, None)
        if self._next is None:  # at the beginning, or at the end of a finite pass
            self._groups = groupby(self._examples, key=lambda example: _epoch_in((example,))[1])
            self._next = next(self._groups, (sys.maxsize, iter(())))
        return self._next

    def __iter__(self) -> Iterator[Any]:
        _, examples = self.find_next()
        self._next = None
        yield from examples


class _BucketsInTurn:
    """Batches of an epoch of one bucket after the other.

    The places of a bucket's next examples say whether it is still to come, so that a resume goes on with what is left.

    Args:
        seed: of the orders that are drawn for each epoch, as NeMo's RandomizedChainDataset does; None for a fixed one.
        finite: an iteration is one epoch.
    """

    def __init__(self, buckets: Sequence[_Bucket], seed: str | None, *, finite: bool) -> None:
        self._buckets, self._seed, self._finite = buckets, seed, finite

    def __iter__(self) -> Iterator[CutSet]:
        while True:
            epoch = min(bucket.find_next()[0] // bucket.passes for bucket in self._buckets)
            order = [bucket for bucket in self._buckets for _ in range(bucket.passes)]
            if self._seed is not None:
                random.Random(f"{self._seed} {epoch}").shuffle(order)
            for bucket in order:
                if bucket.find_next()[0] < (epoch + 1) * bucket.passes:
                    bucket.sampler.set_epoch(epoch)
                    yield from bucket.sampler
            if self._finite:
                return


class _SemiSorted(DynamicCutSampler):
    """NeMo's semi-sorted batches: of all examples, sorted by length with noise.

    Attributes:
        sort: makes NeMo's sampler for lengths; it divides the batches among ranks, and lhotse's does not.
    """

    sort: Callable[..., Any]

    def __iter__(self) -> _SemiSorted:
        examples = list(self.cuts[0])
        sampler = self.sort(
            durations=[self.constraint.measure_length(example) for example in examples],
            batch_shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=self.seed,
        )
        sampler.set_epoch(self.epoch)
        known = np.random.get_state()
        np.random.seed((self.seed + self.epoch) % 2**32)  # of NeMo's noise, which must be the same on all ranks
        batches = list(sampler) if examples else []
        np.random.set_state(known)
        self.cuts_iter = (CutSet.from_cuts(examples[number] for number in batch) for batch in batches)
        return self


def _epoch_in(item: tuple[Any]) -> tuple[int, int]:
    """Return reader and epoch of an example as buckets hold it."""
    reader, epoch, *_ = place_of(item[0]) or (-1, 0)
    return reader, epoch


# So many examples in a row, and a whole epoch of every dataset, must be dropped before nothing more is hoped for; or so
# many of data that have no epochs.
_MIN_DROPPED: Final = 1000
_MAX_DROPPED: Final = 1_000_000


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
        # The number of examples dropped since the last that passed, and the first and last epoch of each reader.
        count = 0
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for example in self._examples:
            for part in _parts_of(example):
                for audio in getattr(getattr(part, "recording", None), "sources", ()):
                    refuse_command(audio.source)
            if all(passes(example) for passes in self._predicates):
                yield example
                count, first, last = 0, {}, {}
                continue
            if self._dropped is not None:
                self._dropped(example)
            count += 1
            for part in _parts_of(example):
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


def _parts_of(example: Any) -> Iterator[Any]:
    """Yield what readers have marked in an example: itself, its cuts, and those that a cut was joined from."""
    if not isinstance(example, Cut):
        yield example
    for cut in cuts_of(example):
        if isinstance(cut, MixedCut):
            yield from (track.cut for track in cut.tracks)
        else:
            yield cut


def place_of(example: Any) -> tuple[int, ...] | None:
    """Return reader, epoch, group, draw, block and item of an example, or of the first cut that it was made from."""
    for part in _parts_of(example):
        if (reader := _reader_of(part)) is not None:
            return (reader, *part.custom["shar_position"])
    return None


def _reader_of(part: Any) -> int | None:
    return (getattr(part, "custom", None) or {}).get(_READER)


def cuts_of(example: Any) -> list[Cut]:
    """Return the cuts of an example: itself, those of a conversation, or none of a text."""
    if isinstance(example, Cut):
        return [example]
    return example.list_cuts() if hasattr(example, "list_cuts") else []


def get_dataloader(
    cfg: Mapping[str, Any],
    rank: int,
    world_size: int,
    tokenizer: Any = None,
    *,
    dataset: Dataset[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    resumable: bool = False,
    state: Mapping[str, Any] | None = None,
) -> Any:
    """Return the loader of NeMo's ``get_lhotse_dataloader_from_config``, with ``type: sharmill`` in ``input_cfg``.

    Args:
        cfg: NeMo's settings (``LhotseDataLoadingConfig``), plain or of OmegaConf. It is not changed. With
            ``canonical: N`` the global batches are the same on any number of ranks that divides N.
        rank: the data-parallel rank: ranks that work on the same batch (tensor or context parallel) give the same.
        world_size: how many data-parallel ranks there are.
        tokenizer: any callable from text to token ids; with ``prompt_format``, a tokenizer of NeMo.
        dataset: makes a batch of a CutSet: ``dataset[cuts]``. Default: a ``ContextSpeechDataset`` for the codec of the
            entries of type sharmill, which must agree. Audio has the codec's rate; where the entries have no codec it
            has ``sample_rate``, or if that is not set the datasets' own rate.
        device_mesh: with axes ``cp`` or ``tp``: only the first rank along them reads, and the others get its batches.
        resumable: returns a StatefulDataLoader: its ``state_dict()``s of all ranks, put together by
            ``merge_data_states``, are a ``state``. For streaming without end in one order for all ranks.
        state: where to go on, with the same entries, seed and shard seeds, on any number of ranks and workers: each
            example that passes the filters comes once per epoch.

    Raises:
        ConfigError: NeMo is not installed, a key is unknown, or ranks would get samples twice or not at all.

    Example:
        >>> settings = OmegaConf.load("configs/training/tts.yaml")  # doctest: +SKIP
        >>> loader = get_dataloader(settings.train_ds, rank=0, world_size=1, tokenizer=my_tokenizer)  # doctest: +SKIP
        >>> batch = next(iter(loader))  # doctest: +SKIP
    """
    require_package("nemo")
    from nemo.collections.common.data.lhotse.broadcasting import BroadcastingDataLoader, is_dp_source_rank

    from sharmill.training.nemo.input_type import copy_audio

    settings = resolve_settings(cfg)
    num_workers, count = settings.get("num_workers") or 0, settings.pop("canonical", None)
    parts = [(rank, world_size)]
    if count is not None:
        _check_count(count, world_size, num_workers)
        parts = [(part, count) for part in range(rank * count // world_size, (rank + 1) * count // world_size)]
        # NeMo draws by the number of the part alone if it has no workers of its own.
        settings["num_workers"] = 0
    source, resumable = None, resumable or count is not None
    resumes = 0 if state is None else int(state.get("resumes", 0)) + 1
    batches = []
    for part, num_parts in parts:
        prepared = prepare_settings(settings, part, num_parts)
        check_tokenizer(sections_of(prepared), tokenizer)
        if part == parts[0][0]:
            copy_audio(sources_of(prepared))
        made = _default_dataset(prepared, tokenizer) if dataset is None else dataset
        # With the same seeds, samplers and the mixing of datasets would repeat their first draws after each stop, and
        # datasets would not keep to their weights. The readers' own seeds are in their entries, and stay.
        for key in ("seed", "shard_seed"):
            if isinstance(prepared[key], int):
                prepared[key] += _SEEDS_PER_RESUME * resumes
        if count is not None:
            for entry in sources_of(prepared):
                entry["whole_part"] = True
            for section in sections_of(prepared):  # in step, lhotse draws buckets by the number of the worker
                section["bucketing_strategy"] = "fully_randomized"
        if is_dp_source_rank(device_mesh):
            source, ours = _make_loader(prepared, part, num_parts, made, tokenizer, resumable=resumable)
            batches.append((source.dataset, ours))
            if resumable and state is not None:
                load_states([cuts.reader for cuts in ours], state)
    if source is not None and resumable:
        source = StatefulDataLoader(
            ResumableBatches(batches, resumes),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=source.pin_memory,
            worker_init_fn=source.worker_init_fn if count is None else None,
            persistent_workers=num_workers > 0,
        )
    return source if device_mesh is None else BroadcastingDataLoader(source, device_mesh)


def _make_loader(
    settings: Settings, rank: int, world_size: int, dataset: Dataset[Any], tokenizer: Any, *, resumable: bool
) -> tuple[DataLoader[Any], list[PartitionedCuts]]:
    """Return NeMo's loader for prepared settings, and the divided sources that it reads."""
    from nemo.collections.common.data.lhotse.dataloader import get_lhotse_dataloader_from_config

    import sharmill.training.nemo.input_type  # noqa: F401  registers types

    for entry in sources_of(settings):
        if entry.get("type") not in ("sharmill", DIVIDED):
            check_files(str(entry.get("type")), entry)
    sections = sections_of(settings)
    # NeMo does not know these: it takes whole numbers as limits, and lets ranks draw buckets in step.
    limits = [_take_limits(section, tokenizer) for section in sections]
    strategies = [section.pop("bucketing_strategy", None) for section in sections]
    factors = [section.pop("randomization_factor", None) for section in sections]
    in_turn = settings.pop("bucketing_strategy", None)  # at the top of a multi_config
    ours: list[PartitionedCuts] = []
    collecting = _made.set(ours)
    try:
        counting = CountingDataset(dataset, ours) if resumable else dataset
        source = get_lhotse_dataloader_from_config(settings, rank, world_size, counting, tokenizer)
    except AssertionError as error:  # NeMo and lhotse assert what they want of settings
        raise ConfigError(f"NeMo's loader refuses the settings: {error}", code="bad_config_value") from error
    except KeyError as error:  # NeMo takes the records of one manifest apart by shard_id
        raise ConfigError(
            f"a record of the data has no {error}: give tars one manifest each, or each record its shard_id",
            code="bad_manifest",
        ) from error
    finally:
        _made.reset(collecting)
    for cuts in ours:
        cuts.epoch = 0
    sampler = source.dataset.sampler if isinstance(source.dataset, IterableDatasetWrapper) else source.sampler
    dropped = partial(mark_consumed, ours) if resumable else None
    samplers = getattr(sampler, "samplers", [sampler])
    for one, filters, strategy, factor, section in zip(samplers, limits, strategies, factors, sections, strict=True):
        # In place of the filters before the sampler.
        one.cuts = tuple(CutSet(_ReportingFilter(cuts, filters, dropped)) for cuts in one.cuts)
        if strategy == "fully_randomized":
            one.sync_buckets = False
        if resumable and isinstance(one, DynamicBucketingSampler):
            one.__class__, one.bucket_seed = _ResumableBuckets, settings["seed"]  # NeMo names lhotse's class
        if factor is not None:
            from nemo.collections.asr.parts.utils.asr_batching import SemiSortBatchSampler

            one.__class__, one.rank, one.world_size, one.seed = _SemiSorted, 0, 1, settings["seed"]
            one.sort = partial(
                SemiSortBatchSampler, rank, world_size, batch_size=section["batch_size"], randomization_factor=factor
            )
    if in_turn is not None:
        passes = [entry.get("passes", 1) for entry in sources_of(settings)]
        source.dataset.sampler = _BucketsInTurn(
            [_Bucket(*pair) for pair in zip(samplers, passes, strict=True)],
            {"synced_randomized": "", "fully_randomized": f"{settings['seed']} {rank}"}.get(in_turn),
            finite=settings.get("force_finite", False),
        )
    if resumable:
        _require_exact(sections, in_turn=in_turn is not None)
        for cuts in ours:
            cuts.count_only_marked()
    return source, ours


def _take_limits(section: Settings, tokenizer: Any) -> list[Callable[[Any], bool]]:
    """Take the limits of tokens that are fractions out of settings, and return NeMo's filters for them.

    NeMo takes whole numbers only. The filters look at tokens, which a tokenizer has made before.
    """
    from nemo.collections.common.data.lhotse.sampling import TokenPerSecondFilter, TokenPerTokenFilter

    filters = {"min_tps": TokenPerSecondFilter, "min_tpt": TokenPerTokenFilter}
    found = [kind(section.pop(key), math.inf) for key, kind in filters.items() if isinstance(section.get(key), float)]
    return found if tokenizer is not None and section.get("pretokenize", True) else []


def _default_dataset(settings: Settings, tokenizer: Any) -> Dataset[Any]:
    """Make the dataset class for the codec of all sources, or for audio where they have none.

    ``sample_rate`` becomes that of the batches' audio, where it is not set.
    """
    sources, sections = sources_of(settings), sections_of(settings)
    others = [str(source.get("of_type", source.get("type"))) for source in sources if source.get("type") != "sharmill"]
    if others:
        raise ConfigError(
            f"data of type {', '.join(others)} need a dataset= that makes batches of them: a SpeechTextDataset, or "
            "your own",
            code="needs_dataset",
        )
    directories = [entry_directory(source) for source in sources]
    records = [read_dataset(directory) for directory in directories]
    coded = [
        CodecForm.of_dataset(directory, source.get("codec"))
        for source, record, directory in zip(sources, records, directories, strict=True)
        if record.codecs or source.get("codec") is not None
    ]
    with_context = {
        any(field.endswith((CONTEXT_AUDIO, CONTEXT_CODES)) for field in source.get("fields") or record.fields)
        for source, record in zip(sources, records, strict=True)
    }
    asked = {section["sample_rate"] for section in sections if section.get("sample_rate") is not None}
    refuse(
        (len(set(coded)) > 1 or 0 < len(coded) < len(sources),
         "the datasets have codecs of different forms, or none: give dataset="),
        (len(with_context) > 1, "some of the datasets have contexts and others have none: give dataset="),
        (len(asked) > 1 and not coded, "the samplers have different values of sample_rate: give dataset="),
        code="needs_dataset",
    )  # fmt: skip
    # If there are no codes, the rate is that of the settings, of the datasets, or NeMo's.
    rates = asked or {record.sampling_rate for record in records}
    rate = (rates.pop() if len(rates) == 1 else None) or loader_schema().sample_rate
    if coded:
        rate = coded[0].sampling_rate
    for section in sections:
        section.setdefault("sample_rate", rate)
    return ContextSpeechDataset(
        coded[0] if coded else None,
        tokenizer,
        context=with_context.pop(),
        tags=tag_names(settings),
        sampling_rate=int(rate),
    )


def _check_count(count: Any, world_size: int, num_workers: int) -> None:
    """Raise ConfigError where so many parts cannot be divided among the ranks and their workers."""
    refuse((not isinstance(count, int) or count < 1, f"canonical is a number of parts, not {count!r}"))
    readers = world_size * max(1, num_workers)
    allowed = [str(number) for number in range(1, count + 1) if count % number == 0]
    if str(readers) not in allowed:
        raise ConfigError(
            f"canonical: {count} cannot be divided among {readers} readers ({world_size} ranks x {max(1, num_workers)} "
            f"workers): their number must be one of {', '.join(allowed)}",
            code="split_wrong",
        )
