"""A chain of steps from a source to batches: divided among ranks and workers, and resumed, as our cuts are.

Each step is a generator over examples that know where they came from. So whatever a step holds back, drops or puts
together, the state of a chain has each example as consumed once it was given out, and not before.
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
# A function that opens the examples that a step gets.
Before = Callable[[], Examples]
Function = Callable[[Any], Any]


log = logging.getLogger(__name__)

# As large as a shard can be: then it is one block.
_WHOLE_FILES: Final = 1 << 40
# After every so many examples that a filter drops in a row, they are compared with all that there are.
_DROPPED_UNTIL_CHECK: Final = 1000
# The rounds of an epoch, of which each reader has at least one: more than any training has readers.
_ROUNDS: Final = 1 << 16
# These say that the program or the machine is at fault, and every further example would fail as well.
_NEVER_SKIPPED: Final = (MemoryError, ImportError, ConfigError, FatalError)


class _Failure(str):
    """The error of an example, in words."""


def _call(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return what a function makes of a value, or a ``_Failure`` for an error of this value."""
    try:
        return fn(value)
    except _NEVER_SKIPPED:
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, the chain counts it
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


def leave_out(example: Example, error: Exception) -> None:
    """Count an example as consumed and as an error; raise the error where none may be left out."""
    for origin in example.origins:
        origin.source.count_error(error)
    consume(example)


def _names(example: Example) -> str:
    names = [origin.name for origin in example.origins if not isinstance(origin.source, _Turns)]
    return ", ".join(names[:3])


def map_examples(before: Before, fn: Function, options: Mapping[str, Any] | None = None) -> Examples:
    return (Example(result, example.origins) for example, result in _results(before, fn, options))


def filter_examples(before: Before, keep: Function) -> Examples:
    num_dropped = 0
    for example, result in _results(before, keep):
        if result:
            num_dropped = 0
            yield example
            continue
        consume(example)
        num_dropped += 1
        example.origins[0].source.check_dropped(num_dropped)


def _values(before: Before, taken: MutableSequence[Example]) -> Iterator[Any]:
    """Yield the values of examples, and add each example to those that were taken."""
    for example in before():
        taken.append(example)
        yield example.value


def _results(before: Before, fn: Function, options: Mapping[str, Any] | None = None) -> Iterator[tuple[Example, Any]]:
    """Yield examples with their results; leave those out where it is an error.

    Args:
        options: of ``parallel_map``; None calls the function here.
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
                # All results before it were delivered: if nothing is ahead, it is an error of the examples.
                if not ahead:
                    raise
                # The example is named in the message of an error of ours, and in a note of another one.
                if isinstance(error, SharmillError) and not isinstance(error, _NEVER_SKIPPED):
                    raise DamagedShard(f"{_names(ahead[0])}: {error}") from error
                error.add_note(f"at {_names(ahead[0])}")
                raise
            example = ahead.popleft()
            if isinstance(result, _Failure):
                leave_out(example, DamagedShard(f"{_names(example)}: {result}"))
            else:
                yield example, result


def shuffle_examples(before: Before, size: int) -> Examples:
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


def sort_examples(before: Before, size: int | None, key: Callable[[Any], Any], reverse: bool) -> Examples:
    for group in _groups(before, size):
        yield from sorted(group, key=lambda example: key(example.value), reverse=reverse)


def batch_examples(before: Before, size: int) -> Examples:
    yield from map(_joined, _groups(before, size))


def _groups(before: Before, size: int | None) -> Iterator[list[Example]]:
    """Yield every ``size`` examples; without a size, all of them."""
    examples = before()
    while group := list(islice(examples, size)):
        yield group


def _joined(batch: Sequence[Example]) -> Example:
    return Example([example.value for example in batch], tuple(origin for one in batch for origin in one.origins))


def dynamic_batch_examples(before: Before, max_frames: int, length: Callable[[Any], int]) -> Examples:
    batch: list[Example] = []
    longest = 0
    for example in before():
        own = length(example.value)
        if batch and max(longest, own) * (len(batch) + 1) > max_frames:
            yield _joined(batch)
            batch, longest = [], 0
        batch.append(example)
        longest = max(longest, own)
    if batch:
        yield _joined(batch)


def bucket_examples(
    before: Before, bounds: Sequence[int], sizes: Sequence[int], length: Callable[[Any], int]
) -> Examples:
    buckets: list[list[Example]] = [[] for _ in sizes]
    for example in before():
        own = length(example.value)
        number = next((n for n, bound in enumerate(bounds) if own < bound), len(bounds))
        buckets[number].append(example)
        if len(buckets[number]) == sizes[number]:
            yield _joined(buckets[number])
            buckets[number] = []
    yield from (_joined(bucket) for bucket in buckets if bucket)


def apply_function(before: Before, f: Callable[[Iterator[Any]], Iterable[Any]], exact: bool) -> Examples:
    taken: list[Example] = []
    last = _joined(taken)

    for value in f(_values(before, taken)):
        refuse(
            (not taken and (exact or not last.origins),
             f"the function of apply(exact={exact}) gave an example without taking one: with exact=True, it takes at "
             "least one for each that it gives, and otherwise one before the first"),
            code="inexact_state",
        )  # fmt: skip
        last = _joined(taken) if taken else last
        taken.clear()
        yield Example(value, last.origins)
    consume(_joined(taken))


def zip_examples(opens: Sequence[Before]) -> Examples:
    with ExitStack() as stack:
        columns = [stack.enter_context(closing(open_examples())) for open_examples in opens]
        for row in zip(*columns, strict=False):
            yield Example(tuple(one.value for one in row), tuple(origin for one in row for origin in one.origins))


def interleave_examples(opens: Sequence[Before], weights: Sequence[float] | None, seed: int) -> Examples:
    """Yield one example at each turn, whose chain follows from the place of the turn alone.

    Args:
        opens: the chains, and last the turns.
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
    """Examples of a source, and what the steps behind it make of them; an IterableDataset with an exact state.

    Every method that adds a step returns a new chain; iterate over the last one. Hand it to a DataLoader with
    ``batch_size=None``. **The chain itself divides the source** among ``world_size`` ranks and their loader's workers,
    each example to one of them in every epoch: give it whole lists, and no sampler.

    ``StatefulDataLoader.state_dict()`` has every example that was given out, or left out, as consumed. It goes back
    into a loader of as many workers and ranks; for others, ``merge_data_states`` puts the states of all ranks together
    for ``load_state_dict`` of a new chain. What buffers of ``shuffle``, ``sort`` and ``bucket`` held back comes first
    then; without these, a chain goes on with what would have come next.

    Args:
        source: a ``RawList``, ``ShardList`` or ``TextLines``, an iterable, or a function that returns one, which is
            called here to count, and by each worker in each epoch; with another number of items then, it is an error.
            An iterator, such as a generator, is read into memory here.
        shuffle: another order each epoch, from ``seed``: of all examples of a file, ``mix_shards`` files at a time. An
            iterable without random access keeps its order.
        rank, world_size: of the data-parallel process; torch.distributed is not asked for them.
        infinite: begin the next epoch after each; else one iteration is an epoch.
        divide: by ``line``, or by ``file``: then each file, or archive, is read by one reader in an epoch; give at
            least as many as there are readers.
        on_error: ``skip`` leaves out what cannot be read, and examples at which a function of ``map`` or ``filter``
            fails, with a warning and a count in the state; by default they are an error.
        max_errors: at most so many for each rank and worker.

    Raises:
        ConfigError: an option makes no sense, or a file is not there or of another kind.

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
            (divide not in ("line", "file"), f"divide is {divide!r}: it is 'line' or 'file'"),
            (on_error not in ("raise", "skip"), f"on_error is {on_error!r}: it is 'raise' or 'skip'"),
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
        self._open: Before = own.examples

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
        """Apply a function to every example in threads or processes, in order, as ``sharmill.training.parallel_map``.

        In a DataLoader, each of its workers has so many.
        """
        options = {"num_workers": num_workers, "kind": kind, "prefetch": prefetch}
        parallel_map((), fn, **options)  # type: ignore[arg-type]  # wrong options are an error here
        return self._then(map_examples, fn=self._guarded(fn), options=options)

    def filter(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Chain:
        """Leave out the examples for which ``func(example, *args, **kwargs)`` is false; they count as consumed."""
        return self._then(filter_examples, keep=self._guarded(partial(_call_with, func, args, kwargs)))

    def shuffle(self, size: int) -> Chain:
        """Draw each example from a buffer of ``size``, by the seed and the epoch of the source."""
        return self._then(shuffle_examples, size=at_least(1, "size", size))

    def sort(
        self,
        size: int | Callable[[Any], Any] | None = None,
        key: Callable[[Any], Any] = count_frames,
        *,
        reverse: bool = False,
        buffer_size: int | None = None,
    ) -> Chain:
        """Sort every ``size`` examples among themselves; without a size, all that this reader has of an epoch.

        ``sort(key)`` is ``sort(None, key)``. All examples of the epoch are then in memory. ``buffer_size`` is another
        name of the size: ``sort(key, buffer_size=500)``.
        """
        refuse(
            (callable(size) and key is not count_frames,
             "sort(key) takes its other options by name, as in sort(key, buffer_size=500, reverse=True)"),
            (isinstance(size, int) and buffer_size is not None, "sort takes size or buffer_size, which are one option"),
        )  # fmt: skip
        if callable(size):
            key, size = size, None
        size = buffer_size if size is None else size
        if size is not None:
            at_least(1, "size", size)
        refuse(
            (size is None and all(source.options.infinite for source in self._sources),
             "sort without a size needs the end of an epoch, and with infinite=True there is none: give a size, as in "
             "sort(500, key)"),
        )  # fmt: skip
        return self._then(sort_examples, size=size, key=key, reverse=reverse)

    def apply(self, f: Callable[[Iterator[Any]], Iterable[Any]], *, exact: bool = False) -> Chain:
        """Apply a function to the stream: it takes an iterator over examples, and gives examples, as a generator does.

        The chain cannot know what ``f`` holds back, so it has no state: ``state_dict`` raises ConfigError. With
        ``exact=True`` it has one. Then each example that ``f`` gives is made of those that it took since the one
        before, as in filters and batches; others that it took, it drops. An error in ``f`` is always raised.
        """
        chain = self._then(apply_function, f=f, exact=exact)
        chain._is_exact = self._is_exact and exact
        return chain

    def batch(self, batch_size: int, *, wrapper_class: Function | None = None) -> Chain:
        """Put every ``batch_size`` examples into a list; the last one of an epoch may be shorter.

        Args:
            wrapper_class: a class, or a function, that makes the batch of the list.
        """
        chain = self._then(batch_examples, size=at_least(1, "batch_size", batch_size))
        return chain if wrapper_class is None else chain.map(wrapper_class)

    def dynamic_batch(self, max_frames: int, length: Callable[[Any], int] = count_frames) -> Chain:
        """Put examples into lists whose padded length, the longest times their number, is at most ``max_frames``.

        An example that is longer is in a batch of its own.
        """
        at_least(1, "max_frames", max_frames)
        return self._then(dynamic_batch_examples, max_frames=max_frames, length=length)

    def bucket(self, bounds: Sequence[int], sizes: Sequence[int], length: Callable[[Any], int] = count_frames) -> Chain:
        """Put examples of similar lengths into lists: ``sizes[n]`` of those shorter than ``bounds[n]``, and of those
        that reach the last bound as many as the last size says.
        """
        for size in sizes:
            at_least(1, "a size of bucket", size)
        numbers = all(isinstance(bound, Real) for bound in bounds)
        refuse((
            not numbers or len(sizes) != len(bounds) + 1 or list(bounds) != sorted(set(bounds)),
            f"bucket has bounds {list(bounds)} and sizes {list(sizes)}: bounds are numbers that rise, and there is one "
            "size more",
        ))  # fmt: skip
        return self._then(bucket_examples, bounds=bounds, sizes=sizes, length=length)

    def zip(self, *others: Chain) -> Chain:
        """Make tuples of one example of each chain, such as speech and text.

        Whichever ends first ends the pass; the others go on from there in the next one. With ``infinite=True`` of the
        text, the speech alone makes the epochs.
        """
        return self._with(others, zip_examples)

    def interleave(self, *others: Chain, weights: Sequence[float] | None = None, seed: int = 0) -> Chain:
        """Give one example of each chain in turn, or, with ``weights``, draw the chain of each example by these.

        Whichever ends first ends the pass; the others go on from there in the next one, as in ``zip``. Make chains
        ``infinite=True`` of which none is to end it.

        Args:
            weights: a number above 0 for this chain and for each other one.
            seed: of what is drawn.
        """
        count = len(others) + 1
        known = () if weights is None else tuple(weights)
        above_0 = all(isinstance(one, Real) and 0 < one < math.inf for one in known)
        refuse(
            (weights is not None and (len(known) != count or not above_0),
             f"weights of interleave are {list(known)}: give a number above 0 for each of its {count} chains"),
        )  # fmt: skip
        step = partial(interleave_examples, weights=weights, seed=seed)
        return self._with(others, step, _Turns(count, self._sources[0].options))

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, from its beginning; without it, each iteration of a loader is the next epoch."""
        for source in self._sources:
            source.reader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # At once, since a loader may save the states of workers of which nothing was asked yet.
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
        """Return the states of the sources in this process, for ``load_state_dict`` and ``merge_data_states``.

        Raises:
            ConfigError: a function of ``apply`` may hold examples back.
        """
        refuse(
            (
                not self._is_exact,
                "a chain with apply(f) cannot be resumed, since f may hold examples back: give apply(f, exact=True) if "
                "it does not, or use a DataLoader without a state",
            ),
            code="inexact_state",
        )
        return {"readers": [source.reader.state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state of this part, or merged states, before iterating.

        Raises:
            ConfigError: it is the state of other sources, or of another order.
        """
        load_states([source.reader for source in self._sources], state)

    def _with(self, others: Sequence[Chain], step: Callable[..., Examples], *further: _Source) -> Chain:
        _require_chains(others)
        sources = [source for chain in (self, *others) for source in chain._sources]
        ranks = {(source.options.rank, source.options.world_size) for source in sources}
        refuse((len(set(map(id, sources))) < len(sources), "a chain cannot be joined with itself: make another one"))
        refuse((len(ranks) > 1, "chains that are joined have the same rank and world_size"), code="split_wrong")
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
    """Give one example of each chain in turn, as ``Chain.interleave``."""
    _require_chains(chains or (None,))
    return chains[0].interleave(*chains[1:], weights=weights, seed=seed)


def _require_chains(chains: Sequence[Any]) -> None:
    refuse((not all(isinstance(one, Chain) for one in chains), "chains are joined with chains: write Chain(source)"))


class _Source:
    """A source of a chain: its reader, and the errors that it may leave out.

    Attributes:
        max_errors: None where none may be left out.
        draw: what random numbers of the pass are made from: the same from the same state, other ones in each epoch, for
            each reader and after each stop, where the same ones might hold an example back for ever.
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
                leave_out(example, example.value)
            else:
                yield example
        if goes_on and not any_left:
            yield from self.examples()  # the last pass left it at the end of an epoch
        else:
            self._ended = True

    def count_error(self, error: Exception) -> None:
        """Count an example that is left out; raise where there are too many, or none may be."""
        if self.max_errors is None:
            raise error
        count = self.reader.count_damaged()
        if count > self.max_errors:
            raise DamagedShard(
                f"{error}; more than max_errors={self.max_errors} examples of this rank and worker had errors"
            ) from error
        log.warning("an example is left out (%d of at most %d): %s", count, self.max_errors, error)

    def check_dropped(self, count: int) -> None:
        """Raise ConfigError where a filter drops so many in a row that an endless source has nothing for it."""
        refuse(
            (self.options.infinite and count % _DROPPED_UNTIL_CHECK == 0 and count > 2 * self._num_examples(),
             f"none of {count} examples in a row passes the filter, which is more than two epochs of them"),
            code="too_few_cuts",
        )  # fmt: skip

    def leave(self) -> None:
        """End a pass: if not all was given out, as in a zip with something shorter, the next one goes on from here."""
        if not self._ended or self.reader.num_unmarked:
            self.reader.load_state_dict(self.reader.state_dict())
            self._goes_on = True


class _Turns(_Source):
    """The turns of ``interleave``: an endless source of numbers, so that the state has the place in them.

    Args:
        count: of the chains. A block has one turn of each, so that each reader gives all of them in turn.
        options: of a source of the same rank.
    """

    def __init__(self, count: int, options: ReadOptions) -> None:
        own = ReadOptions(rank=options.rank, world_size=options.world_size, infinite=True, block_size=count)
        super().__init__(Items(range(_ROUNDS * count)), own, None)

    def count_error(self, error: Exception) -> None:
        """Count none: it is an error of the example, which the example's own source counts."""
