"""Extensions of lhotse's samplers: resumable buckets, buckets read in turn, semi-sorted epochs, and a reporting filter.

NeMo puts one filter per limit between the data and a sampler. Here a single filter applies all limits and reports
dropped examples, for two reasons. A saved state must count dropped examples as consumed, and an infinite stream without
any suitable example must raise an error rather than be searched forever.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any, Final

import numpy as np
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic import DurationBatcher
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketer
from lhotse.lazy import LazyFilter

from sharmill.errors import refuse
from sharmill.training.codes import epoch_of
from sharmill.training.nemo.entries import Settings
from sharmill.training.nemo.partition import PartitionedCuts, marked_parts, parts_of, place_of
from sharmill.training.nemo.stores import refuse_command

# Maximum numbers of examples dropped in a row. The first limit applies if the dropped examples include a whole epoch of
# every dataset; otherwise the second limit applies.
_MIN_DROPPED: Final = 1000
_MAX_DROPPED: Final = 1_000_000


@dataclass(frozen=True)
class SamplerOptions:
    """Settings of one sampler that NeMo's Lhotse loader does not support, or supports only in part.

    Attributes:
        limits: filters for a fractional ``min_tps`` or ``min_tpt``; NeMo accepts only integers.
        independent_buckets: each rank draws its buckets independently; in NeMo, all ranks draw the same buckets.
        sort: creates NeMo's sampler of semi-sorted batches; None if batches are not semi-sorted.
    """

    limits: list[Callable[[Any], bool]]
    independent_buckets: bool
    sort: Callable[..., Any] | None

    @classmethod
    def take(cls, section: Settings, tokenizer: Any, rank: int, world_size: int) -> SamplerOptions:
        """Remove these settings from the settings of a sampler, and return them as options."""
        from nemo.collections.common.data.lhotse.sampling import TokenPerSecondFilter, TokenPerTokenFilter

        kinds = {"min_tps": TokenPerSecondFilter, "min_tpt": TokenPerTokenFilter}
        fractions = [key for key in kinds if isinstance(section.get(key), float)]
        limits = [kinds[key](section.pop(key), math.inf) for key in fractions]
        # The filters can count the tokens of an example only if it is tokenized before it is sampled.
        counted = tokenizer is not None and section.get("pretokenize", True)
        independent_buckets = section.pop("bucketing_strategy", None) == "fully_randomized"
        factor, sort = section.pop("randomization_factor", None), None
        if factor is not None:
            from nemo.collections.asr.parts.utils.asr_batching import SemiSortBatchSampler

            size = section["batch_size"]
            sort = partial(SemiSortBatchSampler, rank, world_size, batch_size=size, randomization_factor=factor)
        return cls(limits if counted else [], independent_buckets, sort)

    def adapt(self, sampler: Any, seed: int, dropped: Callable[[Any], None] | None) -> None:
        """Apply the options to a sampler of NeMo.

        Args:
            dropped: called with each dropped example; None if the sampler need not be resumable.
        """
        # This filter replaces the filters that NeMo puts in front of the sampler.
        sampler.cuts = tuple(CutSet(_ReportingFilter(cuts, self.limits, dropped)) for cuts in sampler.cuts)
        if self.independent_buckets:
            sampler.sync_buckets = False
        if dropped is not None and isinstance(sampler, DynamicBucketingSampler):
            # NeMo has no option that sets the class of its samplers.
            sampler.__class__, sampler.bucket_seed = _ResumableBuckets, seed
        if self.sort is not None:
            sampler.__class__, sampler.rank, sampler.world_size, sampler.seed = _SemiSortedSampler, 0, 1, seed
            sampler.sort = self.sort


class _ResumableBuckets(DynamicBucketingSampler):
    """lhotse's bucketing sampler with new draws after each resume; lhotse would repeat its first draws.

    Attributes:
        bucket_seed: seed of the draws, the same on all ranks. Workers with the same number draw the same buckets.
    """

    bucket_seed: int

    def __iter__(self) -> _ResumableBuckets:
        super().__iter__()
        seed = self.bucket_seed + getattr(torch.utils.data.get_worker_info(), "id", 0)
        self.cuts_iter = iter(
            _OldestFirstBucketer(
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


class _OldestFirstBucketer(DynamicBucketer):
    """lhotse's buckets, which first deliver the examples of earlier epochs.

    After a resume, examples that had been buffered are read again. If they were mixed with new examples, some might be
    in the buffers at every stop and never be delivered. ``cuts`` must be an iterator.
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
            # Newer examples fill up the batch, which is delivered even if it is still not full.
            batch = next(iter(DurationBatcher(list(oldest.queue), constraint=self.constraint.copy())))
            yield batch
            for _ in batch:
                oldest.get()
            self._collect_cuts_in_buckets(len(batch))
        self.buffer_size = 0  # the buckets are full already
        yield from super().__iter__()


class ManifestBucket:
    """A manifest with a sampler of its own, which receives the examples of one epoch per iteration.

    Args:
        sampler: sampler of the batches.
        source: source of the examples.
        passes: number of epochs of the bucket in one epoch of the training.
    """

    def __init__(self, sampler: DynamicCutSampler, source: PartitionedCuts, passes: int) -> None:
        self.sampler, self.source, self.passes = sampler, source, passes
        self._examples, sampler.cuts = sampler.cuts[0], (CutSet(self),)
        self._groups: Iterator[tuple[int, Iterator[Any]]] = iter(())
        self._next: tuple[int, Iterator[Any]] | None = None

    @cached_property
    def epoch(self) -> int:
        """The bucket's next epoch, which is the same for all readers, even those without examples of this epoch."""
        return int(self.source.reader.state_dict()["epoch"])

    def find_next(self) -> tuple[int, Iterator[Any]]:
        """Return the epoch of the next iteration and its examples; ``sys.maxsize`` and no examples for empty data."""
        self._next = self._next or next(self._groups, None)
        if self._next is None:  # at the beginning, or at the end of a finite pass
            self._groups = groupby(self._examples, key=lambda example: _epoch_in((example,))[1])
            self._next = next(self._groups, (sys.maxsize, iter(())))
        return self._next

    def count_missing_batches(self, epoch: int) -> int:
        """Return how many batches of an epoch this reader lacks, compared with the reader that has the most.

        The number is only known for batches of a fixed size; otherwise it is 0.
        """
        limit: Any = self.sampler.constraint
        size = getattr(limit, "max_cuts", None)
        if size is None or isinstance(self.sampler, DynamicBucketingSampler) or limit != TimeConstraint(None, size):
            return 0
        rest = 0 if self.sampler.drop_last else size - 1
        most, own = ((count + rest) // size for count in self.source.count_left(epoch))
        return most - own

    def __iter__(self) -> Iterator[Any]:
        _, examples = self.find_next()
        self._next = None
        yield from examples


class SequentialBuckets:
    """Batches of all buckets in turn, one epoch of each, in an order that readers share or draw independently.

    With a common order, all readers read the same bucket at every step. A reader that has fewer batches than another
    splits some of its batches in half. The states of the readers determine which part of an epoch is left, so a resumed
    training continues with it.

    Args:
        buckets: the buckets of NeMo's list of lists.
        seed: seed of the order of each epoch, which is drawn as in NeMo's RandomizedChainDataset. None keeps a fixed
            order; an empty string draws an order that is common to all readers.
        finite: end after one epoch.
    """

    def __init__(self, buckets: Sequence[ManifestBucket], seed: str | None, *, finite: bool) -> None:
        self._buckets = buckets
        self._seed, self._finite = seed, finite

    def __iter__(self) -> Iterator[CutSet]:
        behind = 0
        while True:
            epoch = min(bucket.epoch // bucket.passes for bucket in self._buckets)
            order = [bucket for bucket in self._buckets for _ in range(bucket.passes)]
            if self._seed is not None:
                random.Random(f"{self._seed} {epoch}").shuffle(order)
            for bucket in order:
                if bucket.epoch >= (epoch + 1) * bucket.passes:
                    continue
                is_ours = bucket.find_next()[0] <= bucket.epoch
                behind += 0 if self._seed else bucket.count_missing_batches(bucket.epoch)
                bucket.epoch += 1
                bucket.sampler.set_epoch(epoch)
                for batch in bucket.sampler if is_ours else ():
                    if behind and len(batch) > 1:
                        behind -= 1
                        yield CutSet.from_cuts(islice(batch, len(batch) // 2))
                        batch = CutSet.from_cuts(islice(batch, len(batch) // 2, None))
                    yield batch
            if self._finite:
                return


class _SemiSortedSampler(DynamicCutSampler):
    """NeMo's semi-sorted batches, for which all examples of an epoch are sorted by length plus noise.

    Attributes:
        sort: creates NeMo's sampler from the lengths. NeMo's sampler, rather than lhotse's, divides the batches among
            ranks.
    """

    sort: Callable[..., Any]

    def __iter__(self) -> _SemiSortedSampler:
        examples = list(self.cuts[0])
        sampler = self.sort(
            durations=[self.constraint.measure_length(example) for example in examples],
            batch_shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=self.seed,
        )
        sampler.set_epoch(self.epoch)
        known = np.random.get_state()
        # NeMo's noise uses numpy's global generator, and must be the same on all ranks.
        np.random.seed((self.seed + self.epoch) % 2**32)
        batches = list(sampler) if examples else []
        np.random.set_state(known)
        self.cuts_iter = (CutSet.from_cuts(examples[number] for number in batch) for batch in batches)
        return self


def _epoch_in(item: tuple[Any]) -> tuple[int, int]:
    """Return the numbers of the reader and the epoch of an example in a bucket."""
    reader, epoch, *_ = place_of(item[0]) or (-1, 0)
    return reader, epoch


class _ReportingFilter:
    """The examples of a CutSet that pass its outermost filters and further limits.

    Args:
        cuts: a lazy CutSet, possibly with filters.
        limits: further filters.
        dropped: called with each dropped example.
    """

    def __init__(
        self, cuts: CutSet, limits: Sequence[Callable[[Any], bool]], dropped: Callable[[Any], None] | None = None
    ) -> None:
        self._dropped = dropped
        self._predicates = list(limits)
        self._examples: Any = cuts
        while isinstance(outermost := getattr(self._examples, "data", self._examples), LazyFilter):
            self._predicates.insert(0, outermost.predicate)
            # lhotse 2 renamed the attribute.
            self._examples = outermost.source if hasattr(outermost, "source") else outermost.iterator

    def __iter__(self) -> Iterator[Any]:
        # Number of examples dropped since the last one that passed, and their epochs, keyed by reader.
        count = 0
        epochs: defaultdict[int, set[int]] = defaultdict(set)
        for example in self._examples:
            for part in parts_of(example):
                for audio in getattr(getattr(part, "recording", None), "sources", ()):
                    refuse_command(audio.source)
            if all(passes(example) for passes in self._predicates):
                yield example
                count = 0
                epochs.clear()
                continue
            if self._dropped is not None:
                self._dropped(example)
            count += 1
            for reader, part in marked_parts(example):
                epochs[reader].add(epoch_of(part))
            everything = epochs and all(max(seen) > min(seen) + 1 for seen in epochs.values())
            refuse(
                (count >= (_MIN_DROPPED if everything else _MAX_DROPPED),
                 f"the filters dropped {count} examples in a row: relax min_duration, max_duration, max_cer, "
                 "min_context_speaker_similarity, the buckets or your own filters"),
                code="too_few_cuts",
            )  # fmt: skip
