"""lhotse's samplers as the loader needs them: resumable buckets, buckets in turn, sorted epochs, and one filter.

NeMo puts a filter for each limit between the data and a sampler. They are put in one place, which reports what they
drop: a saved state must not hold it as still to come, and endless data of which all is dropped would be searched for
ever.
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

# The examples in a row, with a whole epoch of every dataset among them, that may be dropped before it is an error; and
# the number for data without epochs.
_MIN_DROPPED: Final = 1000
_MAX_DROPPED: Final = 1_000_000


@dataclass(frozen=True)
class SamplerOptions:
    """The settings of one sampler that NeMo does not know, or knows less of.

    Attributes:
        limits: filters by fractions of tokens; NeMo takes whole numbers only.
        draws_apart: each rank draws its buckets by itself; NeMo lets ranks draw in step.
        sort: makes NeMo's own sampler of semi-sorted batches; None for other batches.
    """

    limits: list[Callable[[Any], bool]]
    draws_apart: bool
    sort: Callable[..., Any] | None

    @classmethod
    def take(cls, section: Settings, tokenizer: Any, rank: int, world_size: int) -> SamplerOptions:
        """Take the options out of the settings of a sampler."""
        from nemo.collections.common.data.lhotse.sampling import TokenPerSecondFilter, TokenPerTokenFilter

        kinds = {"min_tps": TokenPerSecondFilter, "min_tpt": TokenPerTokenFilter}
        fractions = [key for key in kinds if isinstance(section.get(key), float)]
        limits = [kinds[key](section.pop(key), math.inf) for key in fractions]
        # The filters look at tokens, which a tokenizer has made before.
        counted = tokenizer is not None and section.get("pretokenize", True)
        draws_apart = section.pop("bucketing_strategy", None) == "fully_randomized"
        factor, sort = section.pop("randomization_factor", None), None
        if factor is not None:
            from nemo.collections.asr.parts.utils.asr_batching import SemiSortBatchSampler

            size = section["batch_size"]
            sort = partial(SemiSortBatchSampler, rank, world_size, batch_size=size, randomization_factor=factor)
        return cls(limits if counted else [], draws_apart, sort)

    def adapt(self, sampler: Any, seed: int, dropped: Callable[[Any], None] | None) -> None:
        """Change a sampler of NeMo as the options ask for it.

        Args:
            dropped: is told each example that is dropped; None if the sampler need not be resumable.
        """
        # In place of the filters before the sampler.
        sampler.cuts = tuple(CutSet(_ReportingFilter(cuts, self.limits, dropped)) for cuts in sampler.cuts)
        if self.draws_apart:
            sampler.sync_buckets = False
        if dropped is not None and isinstance(sampler, DynamicBucketingSampler):
            sampler.__class__, sampler.bucket_seed = _ResumableBuckets, seed  # NeMo names lhotse's class
        if self.sort is not None:
            sampler.__class__, sampler.rank, sampler.world_size, sampler.seed = _SemiSorted, 0, 1, seed
            sampler.sort = self.sort


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


class ManifestBucket:
    """The examples of a sampler, which gets those of one epoch in each iteration.

    Args:
        sampler: makes the batches.
        source: has the examples.
        passes: how many epochs of the bucket are one of the training.
    """

    def __init__(self, sampler: DynamicCutSampler, source: PartitionedCuts, passes: int) -> None:
        self.sampler, self.source, self.passes = sampler, source, passes
        self._examples, sampler.cuts = sampler.cuts[0], (CutSet(self),)
        self._groups: Iterator[tuple[int, Iterator[Any]]] = iter(())
        self._next: tuple[int, Iterator[Any]] | None = None

    @cached_property
    def epoch(self) -> int:
        """The bucket's next epoch: the same for all readers, of which some may have nothing of it."""
        return int(self.source.reader.state_dict()["epoch"])

    def find_next(self) -> tuple[int, Iterator[Any]]:
        """Return the epoch that the next iteration has, and its examples; a huge one and none if the data are empty."""
        self._next = self._next or next(self._groups, None)
        if self._next is None:  # at the beginning, or at the end of a finite pass
            self._groups = groupby(self._examples, key=lambda example: _epoch_in((example,))[1])
            self._next = next(self._groups, (sys.maxsize, iter(())))
        return self._next

    def count_behind(self, epoch: int) -> int:
        """Return how many batches fewer this reader has of an epoch than the reader that has most.

        Only for batches of a fixed size that is known; else 0.
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


class BucketsInTurn:
    """Batches of an epoch of one bucket after the other, in an order that all readers have, or each for itself.

    With one order, all readers are in the same bucket at every step: a reader that has fewer batches of it than another
    one gives out some of them in two halves. What is left of an epoch follows from the states of the readers, so that a
    resume goes on with it.

    Args:
        buckets: of NeMo's list of lists.
        seed: of the orders that are drawn for each epoch, as NeMo's RandomizedChainDataset does: empty for orders that
            all readers have, None for a fixed one.
        finite: an iteration is one epoch.
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
                behind += 0 if self._seed else bucket.count_behind(bucket.epoch)
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
        self._examples: Any = cuts
        while isinstance(outermost := getattr(self._examples, "data", self._examples), LazyFilter):
            self._predicates.insert(0, outermost.predicate)
            # lhotse 2 has another name for it.
            self._examples = outermost.source if hasattr(outermost, "source") else outermost.iterator

    def __iter__(self) -> Iterator[Any]:
        # The number of examples dropped since the last that passed, and their epochs by reader.
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
                 f"none of {count} examples in a row passes the filters: loosen min_duration, max_duration, "
                 "max_cer, min_context_speaker_similarity, the buckets or whatever drops them"),
                code="too_few_cuts",
            )  # fmt: skip
