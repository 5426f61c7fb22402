"""Chains of processing steps, which turn a source into batches.

A chain is divided among ranks and workers, and resumed, like a reader of cuts. Each step is a generator over examples
that record their origins. An example therefore counts as consumed only when it leaves the chain or is dropped, even if
steps buffer or combine examples.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, Final, Literal

import torch

from sharmill.errors import ConfigError, DamagedShard, FatalError, SharmillError, refuse
from sharmill.shar.fields import POSITION
from sharmill.shar.reading.epoch_reader import ReadOptions
from sharmill.shar.reading.iteration import SharReader
from sharmill.shar.reading.loading import load_states, share_tensors
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.training.chain.sources import Example, Items
from sharmill.training.parallel import at_least, parallel_map

Examples = Generator[Example, None, None]
# A function that starts a new iteration over the examples of the preceding step.
OpenExamples = Callable[[], Examples]
Function = Callable[[Any], Any]


log = logging.getLogger(__name__)

# This block size exceeds the size of any shard, so each shard is one block.
_WHOLE_FILES: Final = 1 << 40
# Number of consecutive examples that a filter drops between two checks for an endless loop.
_DROPPED_UNTIL_CHECK: Final = 1000
# Rounds per epoch of ``_Turns``. Each reader needs at least one round, and no training has this many readers.
_ROUNDS: Final = 1 << 16
# Errors of the program or the machine, which would recur with every further example.
_NEVER_SKIPPED: Final = (MemoryError, ImportError, ConfigError, FatalError)


class _Failure(str):
    """The error message of an example that failed."""


def _call(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return ``fn(value)``, or a ``_Failure`` if this value causes an error."""
    try:
        return fn(value)
    except _NEVER_SKIPPED:
        raise
    except Exception as error:  # noqa: BLE001  the chain counts any error
        return _Failure(str(error) if isinstance(error, SharmillError) else f"{type(error).__name__}: {error}")


def _call_with(fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], value: Any) -> Any:
    return fn(value, *args, **options)


def count_frames(example: Mapping[str, Any]) -> int:
    """Return the number of frames of an example's ``feat`` (frames, mels)."""
    return len(example["feat"])


def consume(example: Example) -> None:
    """Count an example as consumed."""
    for origin in example.origins:
        origin.source.reader.mark_consumed([origin])


def skip_example(example: Example, error: Exception) -> None:
    """Count an example as consumed and as an error; raise the error if examples must not be skipped."""
    for origin in example.origins:
        origin.source.count_error(error)
    consume(example)


def _origin_names(example: Example) -> str:
    names = [origin.name for origin in example.origins if not isinstance(origin.source, _Turns)]
    return ", ".join(names[:3])


def map_examples(before: OpenExamples, fn: Function, options: Mapping[str, Any] | None = None) -> Examples:
    return (Example(result, example.origins) for example, result in _results(before, fn, options))


def filter_examples(before: OpenExamples, keep: Function) -> Examples:
    num_dropped = 0
    for example, result in _results(before, keep):
        if result:
            num_dropped = 0
            yield example
            continue
        consume(example)
        num_dropped += 1
        example.origins[0].source.check_dropped(num_dropped)


def _values(before: OpenExamples, taken: MutableSequence[Example]) -> Iterator[Any]:
    """Yield the values of examples, and append each example to ``taken``."""
    for example in before():
        taken.append(example)
        yield example.value


def _results(
    before: OpenExamples, fn: Function, options: Mapping[str, Any] | None = None
) -> Iterator[tuple[Example, Any]]:
    """Yield each example with the result of ``fn``; skip examples whose result is a ``_Failure``.

    Args:
        options: keyword arguments of ``parallel_map``; with None, the function is called in this thread.
    """
    ahead: deque[Example] = deque()

    values = _values(before, ahead)
    made = (fn(value) for value in values) if options is None else iter(parallel_map(values, fn, **options))
    with closing(made) as results:  # type: ignore[type-var]
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except Exception as error:
                # All earlier results have been delivered. If ``ahead`` is empty, reading the next example raised the
                # error.
                if not ahead:
                    raise
                # An error of sharmill gets the example's name in its message; any other error keeps its message and
                # gets a note with the name.
                if isinstance(error, SharmillError) and not isinstance(error, _NEVER_SKIPPED):
                    raise DamagedShard(f"{_origin_names(ahead[0])}: {error}") from error
                error.add_note(f"at {_origin_names(ahead[0])}")
                raise
            example = ahead.popleft()
            if isinstance(result, _Failure):
                skip_example(example, DamagedShard(f"{_origin_names(example)}: {result}"))
            else:
                yield example, result


def shuffle_examples(before: OpenExamples, size: int) -> Examples:
    rng: random.Random | None = None
    buffer: list[Example] = []
    for example in before():
        rng = rng or random.Random(example.origins[0].source.draw)
        if len(buffer) < size:
            buffer.append(example)
            continue
        place = rng.randrange(size)
        drawn, buffer[place] = buffer[place], example
        yield drawn
    if rng is not None:
        rng.shuffle(buffer)
    yield from buffer


def sort_examples(before: OpenExamples, size: int | None, key: Callable[[Any], Any], reverse: bool) -> Examples:
    for group in _groups(before, size):
        yield from sorted(group, key=lambda example: key(example.value), reverse=reverse)


def batch_examples(before: OpenExamples, size: int) -> Examples:
    yield from map(_join_examples, _groups(before, size))


def _groups(before: OpenExamples, size: int | None) -> Iterator[list[Example]]:
    """Yield lists of ``size`` examples or, if ``size`` is None, one list of all examples."""
    examples = before()
    while group := list(islice(examples, size)):
        yield group


def _join_examples(batch: Sequence[Example]) -> Example:
    return Example([example.value for example in batch], tuple(origin for one in batch for origin in one.origins))


def dynamic_batch_examples(before: OpenExamples, max_frames: int, length: Callable[[Any], int]) -> Examples:
    batch: list[Example] = []
    longest = 0
    for example in before():
        own = length(example.value)
        if batch and max(longest, own) * (len(batch) + 1) > max_frames:
            yield _join_examples(batch)
            batch, longest = [], 0
        batch.append(example)
        longest = max(longest, own)
    if batch:
        yield _join_examples(batch)


def bucket_examples(
    before: OpenExamples, bounds: Sequence[int], sizes: Sequence[int], length: Callable[[Any], int]
) -> Examples:
    buckets: list[list[Example]] = [[] for _ in sizes]
    for example in before():
        own = length(example.value)
        number = next((n for n, bound in enumerate(bounds) if own < bound), len(bounds))
        buckets[number].append(example)
        if len(buckets[number]) == sizes[number]:
            yield _join_examples(buckets[number])
            buckets[number] = []
    yield from (_join_examples(bucket) for bucket in buckets if bucket)


def apply_function(before: OpenExamples, f: Callable[[Iterator[Any]], Iterable[Any]], exact: bool) -> Examples:
    taken: list[Example] = []
    last = _join_examples(taken)

    for value in f(_values(before, taken)):
        refuse(
            (not taken and (exact or not last.origins),
             f"the function of apply(exact={exact}) gave an example without taking one: with exact=True, it must take "
             "at least one for each that it gives, and otherwise one before the first"),
            code="inexact_state",
        )  # fmt: skip
        last = _join_examples(taken) if taken else last
        taken.clear()
        yield Example(value, last.origins)
    consume(_join_examples(taken))


def zip_examples(opens: Sequence[OpenExamples]) -> Examples:
    with ExitStack() as stack:
        columns = [stack.enter_context(closing(open_examples())) for open_examples in opens]
        for row in zip(*columns, strict=False):
            yield Example(tuple(one.value for one in row), tuple(origin for one in row for origin in one.origins))


def interleave_examples(opens: Sequence[OpenExamples], weights: Sequence[float] | None, seed: int) -> Examples:
    """Yield one example per turn; the position of a turn determines which chain the example comes from.

    Args:
        opens: functions that open the chains and, last, the turns.
        weights: one weight per chain for random choices; None takes the chains in turn.
    """
    with ExitStack() as stack:
        *columns, turns = [stack.enter_context(closing(open_examples())) for open_examples in opens]
        for turn in turns:
            number = turn.value % len(columns)
            if weights is not None:
                place = turn.origins[0].custom[POSITION]
                number = random.Random(f"{seed} {place}").choices(range(len(columns)), weights)[0]
            example = next(columns[number], None)
            if example is None:
                return
            yield Example(example.value, example.origins + turn.origins)


class Chain(torch.utils.data.IterableDataset):
    """An IterableDataset that passes the examples of a source through a series of steps and can be resumed exactly.

    Every method that adds a step returns a new chain; iterate over the last one. Pass it to a DataLoader with
    ``batch_size=None``. **The chain itself divides the source** among ``world_size`` ranks and the workers of their
    loaders. In each epoch, every example goes to exactly one of these workers. Give every rank the complete lists, and
    use no sampler.

    ``StatefulDataLoader.state_dict()`` counts every example that was delivered or skipped as consumed. Load the state
    into a loader with the same numbers of workers and ranks. For other numbers, combine the states of all ranks with
    ``merge_data_states``, and pass the result to ``load_state_dict`` of a new chain. A resumed chain continues with the
    next example; examples that were still buffered in ``shuffle``, ``sort`` and ``bucket`` come first.

    Args:
        source: a ``RawList``, ``ShardList`` or ``TextLines``, an iterable, or a function that returns an iterable. A
            function is called once by the constructor, to count the items, and by each worker in each epoch; the number
            of items must not change. The constructor reads an iterator, such as a generator, into memory.
        shuffle: use a different order in each epoch, derived from ``seed``. All examples of ``mix_shards`` files are
            shuffled together. An iterable without random access keeps its order.
        rank, world_size: rank and number of the data-parallel processes; torch.distributed is not queried.
        infinite: continue with the next epoch after each epoch. By default, one iteration is one epoch.
        divide: ``line`` divides the examples among readers. ``file`` assigns each file or archive to one reader per
            epoch; give at least as many files as there are readers.
        on_error: ``skip`` skips examples that cannot be read, or for which a function of ``map`` or ``filter`` fails,
            with a warning and a count in the state. By default, the error is raised.
        max_errors: maximum number of skipped examples per rank and worker.

    Raises:
        ConfigError: an option is invalid, or a file is missing or of the wrong kind.

    Example:
        >>> list(Chain(range(6)).map(lambda number: number * 2).filter(bool).batch(2))
        [[2, 4], [6, 8], [10]]
        >>> list(Chain(["b", "a"]).sort(str).zip(Chain([1, 2, 3])))
        [('a', 1), ('b', 2)]
        >>> list(Chain([1, 2, 3]).interleave(Chain([10, 20])))
        [1, 10, 2, 20, 3]
    """

    def __init__(
        self,
        source: ShardSource | Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        infinite: bool = False,
        divide: Literal["line", "file"] = "line",
        mix_shards: int = 8,
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: int = 100,
    ) -> None:
        refuse(
            (divide not in ("line", "file"), f"divide is {divide!r}: it must be 'line' or 'file'"),
            (on_error not in ("raise", "skip"), f"on_error is {on_error!r}: it must be 'raise' or 'skip'"),
        )
        at_least(0, "max_errors", max_errors)
        options = ReadOptions(
            shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, infinite=infinite, mix_shards=mix_shards,
            block_size=_WHOLE_FILES if divide == "file" else None,
        )  # fmt: skip
        shards = source if isinstance(source, ShardSource) else Items(source)
        own = _Source(shards, options, max_errors if on_error == "skip" else None)
        self._sources: tuple[_Source, ...] = (own,)
        self._is_exact = True
        self._open: OpenExamples = own.examples

    def map(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Chain:
        """Apply ``func(example, *args, **kwargs)`` to every example."""
        return self._then(map_examples, fn=self._guarded(partial(_call_with, func, args, kwargs)))

    def parallel_map(
        self,
        fn: Callable[[Any], Any],
        num_workers: int = 2,
        *,
        kind: Literal["thread", "process"] = "thread",
        prefetch: int | None = None,
    ) -> Chain:
        """Apply a function to every example in threads or processes, in order, like ``sharmill.training.parallel_map``.

        Each worker of a DataLoader starts ``num_workers`` threads or processes of its own.
        """
        options = {"num_workers": num_workers, "kind": kind, "prefetch": prefetch}
        parallel_map((), fn, **options)  # type: ignore[arg-type]  # invalid options raise here, not when iterating
        return self._then(map_examples, fn=self._guarded(fn), options=options)

    def filter(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Chain:
        """Drop the examples for which ``func(example, *args, **kwargs)`` is false; they count as consumed."""
        return self._then(filter_examples, keep=self._guarded(partial(_call_with, func, args, kwargs)))

    def shuffle(self, size: int) -> Chain:
        """Draw each example at random from a buffer of ``size`` examples; the source's seed and state determine the
        draws.
        """
        return self._then(shuffle_examples, size=at_least(1, "size", size))

    def sort(
        self,
        size: int | Callable[[Any], Any] | None = None,
        key: Callable[[Any], Any] = count_frames,
        *,
        reverse: bool = False,
        buffer_size: int | None = None,
    ) -> Chain:
        """Sort consecutive groups of ``size`` examples or, without a size, this reader's examples of a whole epoch.

        ``sort(key)`` is short for ``sort(None, key)``, which holds all examples of the epoch in memory. ``buffer_size``
        is another name for ``size``: ``sort(key, buffer_size=500)``.
        """
        refuse(
            (callable(size) and key is not count_frames,
             "sort(key) takes its other options by name: write sort(key, buffer_size=500, reverse=True)"),
            (isinstance(size, int) and buffer_size is not None,
             "sort got both size and buffer_size, which are the same option: give one of them"),
        )  # fmt: skip
        if callable(size):
            key, size = size, None
        size = buffer_size if size is None else size
        if size is not None:
            at_least(1, "size", size)
        refuse(
            (size is None and all(source.options.infinite for source in self._sources),
             "sort without a size needs the end of an epoch, but there is none with infinite=True: give a size, as in "
             "sort(500, key)"),
        )  # fmt: skip
        return self._then(sort_examples, size=size, key=key, reverse=reverse)

    def apply(self, f: Callable[[Iterator[Any]], Iterable[Any]], *, exact: bool = False) -> Chain:
        """Apply ``f``, such as a generator function, to an iterator over the examples.

        By default, the chain cannot know which examples ``f`` holds back, so ``state_dict`` raises ConfigError. With
        ``exact=True``, the chain has a state. In this case, ``f`` must build each example only from the examples that
        it took since it yielded the previous one, as filters and batches do; examples that it took but did not use
        count as dropped. An error in ``f`` is always raised.
        """
        chain = self._then(apply_function, f=f, exact=exact)
        chain._is_exact = self._is_exact and exact
        return chain

    def batch(self, batch_size: int, *, wrapper_class: Function | None = None) -> Chain:
        """Group consecutive examples into lists of ``batch_size``; the last list of an epoch may be shorter.

        Args:
            wrapper_class: a class or function that turns the list into a batch.
        """
        chain = self._then(batch_examples, size=at_least(1, "batch_size", batch_size))
        return chain if wrapper_class is None else chain.map(wrapper_class)

    def dynamic_batch(self, max_frames: int, length: Callable[[Any], int] = count_frames) -> Chain:
        """Group examples into lists whose padded size (longest length times number of examples) is at most
        ``max_frames``.

        An example longer than ``max_frames`` forms a list of its own.
        """
        at_least(1, "max_frames", max_frames)
        return self._then(dynamic_batch_examples, max_frames=max_frames, length=length)

    def bucket(self, bounds: Sequence[int], sizes: Sequence[int], length: Callable[[Any], int] = count_frames) -> Chain:
        """Group examples of similar lengths into lists.

        Bucket n collects the examples that are shorter than ``bounds[n]`` and at least as long as the previous bound,
        and yields lists of ``sizes[n]`` examples. The last size is for examples that are at least as long as the last
        bound.
        """
        for size in sizes:
            at_least(1, "a size of bucket", size)
        numbers = all(isinstance(bound, Real) for bound in bounds)
        refuse((
            not numbers or len(sizes) != len(bounds) + 1 or list(bounds) != sorted(set(bounds)),
            f"bucket has bounds {list(bounds)} and sizes {list(sizes)}: bounds must be increasing numbers, with one "
            "size more than bounds",
        ))  # fmt: skip
        return self._then(bucket_examples, bounds=bounds, sizes=sizes, length=length)

    def zip(self, *others: Chain) -> Chain:
        """Combine one example from each chain, such as speech and text, into a tuple.

        An iteration ends as soon as one chain ends; in the next iteration, the other chains continue where they
        stopped. If one chain has ``infinite=True``, the others define the epochs.
        """
        return self._with(others, zip_examples)

    def interleave(self, *others: Chain, weights: Sequence[float] | None = None, seed: int = 0) -> Chain:
        """Yield one example from each chain in turn or, with ``weights``, each example from a randomly drawn chain.

        As in ``zip``, an iteration ends as soon as one chain ends, and the other chains continue where they stopped.
        Give a chain ``infinite=True`` if it must not end the iteration.

        Args:
            weights: one positive number per chain, beginning with this chain.
            seed: seed of the draws.
        """
        count = len(others) + 1
        known = () if weights is None else tuple(weights)
        above_0 = all(isinstance(one, Real) and 0 < one < math.inf for one in known)
        refuse(
            (weights is not None and (len(known) != count or not above_0),
             f"weights of interleave are {list(known)}: give a positive number for each of its {count} chains"),
        )  # fmt: skip
        step = partial(interleave_examples, weights=weights, seed=seed)
        return self._with(others, step, _Turns(count, self._sources[0].options))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of ``epoch``; by default, each iteration is the next epoch."""
        for source in self._sources:
            source.reader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # The pass begins here rather than in the generator, because a loader may save a worker's state before it
        # requests the first example.
        for source in self._sources:
            source.reader.begin_pass(next_epoch=True)
        return self._examples()

    def _examples(self) -> Iterator[Any]:
        with closing(self._open()) as examples:
            for example in examples:
                consume(example)
                yield share_tensors(example.value)
        for source in self._sources:
            source.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this process's sources, for ``load_state_dict`` and ``merge_data_states``.

        Raises:
            ConfigError: the chain has an ``apply`` without ``exact=True``.
        """
        refuse(
            (
                not self._is_exact,
                "a chain with apply(f) cannot be resumed, since f may hold examples back: use apply(f, exact=True) if "
                "it does not, or a DataLoader without a state",
            ),
            code="inexact_state",
        )
        return {"readers": [source.reader.state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this rank and worker, or merged states, before iterating.

        Raises:
            ConfigError: the state belongs to other sources or to a different order.
        """
        load_states([source.reader for source in self._sources], state)

    def _with(self, others: Sequence[Chain], step: Callable[..., Examples], *further: _Source) -> Chain:
        _require_chains(others)
        sources = [source for chain in (self, *others) for source in chain._sources]
        ranks = {(source.options.rank, source.options.world_size) for source in sources}
        refuse((len(set(map(id, sources))) < len(sources), "a chain cannot be joined with itself: create a second one"))
        refuse((len(ranks) > 1, "chains that are joined must have the same rank and world_size"), code="split_wrong")
        chain = copy.copy(self)
        chain._sources = (*sources, *further)
        chain._open = partial(step, [*(one._open for one in (self, *others)), *(one.examples for one in further)])
        chain._is_exact = all(one._is_exact for one in (self, *others))
        return chain

    def _then(self, step: Callable[..., Examples], **options: Any) -> Chain:
        chain = copy.copy(self)
        chain._open = partial(step, self._open, **options)
        return chain

    def _guarded(self, fn: Function) -> Function:
        catches = any(source.max_errors is not None for source in self._sources)
        return partial(_call, fn) if catches else fn


def interleave(*chains: Chain, weights: Sequence[float] | None = None, seed: int = 0) -> Chain:
    """Yield one example from each chain in turn; see ``Chain.interleave``."""
    _require_chains(chains or (None,))
    return chains[0].interleave(*chains[1:], weights=weights, seed=seed)


def _require_chains(chains: Sequence[Any]) -> None:
    refuse(
        (not all(isinstance(one, Chain) for one in chains),
         "a chain can only be joined with other chains: wrap each source as Chain(source)")
    )  # fmt: skip


class _Source:
    """A source of a chain, with its reader and its count of skipped examples.

    Attributes:
        max_errors: maximum number of skipped examples; None raises the first error.
        draw: seed of the random numbers of a pass, derived from the reader's state. The seed differs between epochs,
            readers and resumed passes, since repeated draws might hold the same example back forever.
    """

    draw: str

    def __init__(self, shards: ShardSource, options: ReadOptions, max_errors: int | None) -> None:
        self.reader, self.options, self.max_errors = SharReader(shards, options), options, max_errors
        self._num_examples = shards.num_cuts
        self._ended = self._goes_on = False
        self.reader.count_only_marked()

    def examples(self) -> Examples:
        goes_on, any_left = self._goes_on, False
        self._ended = self._goes_on = False
        self.draw = f"{self.options.seed} {json.dumps(self.reader.state_dict())}"
        for example in self.reader:
            any_left = True
            for origin in example.origins:
                origin.source = self
            if isinstance(example.value, DamagedShard):
                skip_example(example, example.value)
            else:
                yield example
        if goes_on and not any_left:
            yield from self.examples()  # the previous pass stopped exactly at the end of an epoch
        else:
            self._ended = True

    def count_error(self, error: Exception) -> None:
        """Count a skipped example; raise if there are too many, or if examples must not be skipped."""
        if self.max_errors is None:
            raise error
        count = self.reader.count_damaged()
        if count > self.max_errors:
            raise DamagedShard(
                f"{error}; more than max_errors={self.max_errors} examples of this rank and worker had errors"
            ) from error
        log.warning("skipped an example (%d of at most %d): %s", count, self.max_errors, error)

    def check_dropped(self, count: int) -> None:
        """Raise ConfigError if a filter drops more than two epochs of an infinite source in a row."""
        refuse(
            (self.options.infinite and count % _DROPPED_UNTIL_CHECK == 0 and count > 2 * self._num_examples(),
             f"the filter dropped {count} examples in a row, more than two epochs: relax the filter"),
            code="too_few_cuts",
        )  # fmt: skip

    def leave(self) -> None:
        """End a pass; if examples are left, as after a zip with a shorter chain, the next pass continues from here."""
        if not self._ended or self.reader.num_unmarked:
            self.reader.load_state_dict(self.reader.state_dict())
            self._goes_on = True


class _Turns(_Source):
    """The turns of ``interleave``: an infinite source of numbers whose position is part of the chain's state.

    Args:
        count: number of chains. Each block has one turn of every chain, so each reader visits all chains in turn.
        options: options of another source of the chain, which provide the rank and world size.
    """

    def __init__(self, count: int, options: ReadOptions) -> None:
        own = ReadOptions(rank=options.rank, world_size=options.world_size, infinite=True, block_size=count)
        super().__init__(Items(range(_ROUNDS * count)), own, None)

    def count_error(self, error: Exception) -> None:
        """Count nothing, because the example's own source counts the error."""
