"""A chain of steps from a source to batches: divided among ranks and workers, and resumed, as our cuts are.

Each step is a generator over examples that know where they came from. So whatever a step holds back, drops or puts
together, the state of a chain has each example as consumed once it was given out, and not before.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from numbers import Integral, Real
from typing import Any, Final, Literal

import torch

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.reading.iteration import ReadOptions, SharReader
from sharmill.shar.reading.shard_source import ShardSource
from sharmill.training.chain import steps
from sharmill.training.chain.guarded import Guarded
from sharmill.training.chain.sources import Items
from sharmill.training.chain.steps import Examples, count_frames
from sharmill.training.parallel import parallel_map

log = logging.getLogger(__name__)

# As large as a shard can be: then it is one block.
_WHOLE_FILES: Final = 1 << 40
# After every so many examples that a filter drops in a row, they are compared with all that there are.
_DROPPED_UNTIL_CHECK: Final = 1000


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
        source: a ``RawList``, ``ShardList`` or ``TextLines``, or any iterable that can be read again.
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
        >>> list(Chain(["b", "a"]).sort(10, key=str).zip(Chain([1, 2, 3])))
        [('a', 1), ('b', 2)]
    """

    def __init__(
        self,
        source: ShardSource | Iterable[Any],
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
        if divide not in ("line", "file"):
            raise ConfigError(f"divide is {divide!r}: it is 'line' or 'file'", code="bad_config_value")
        options = ReadOptions(
            shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, infinite=infinite, mix_shards=mix_shards,
            block_size=_WHOLE_FILES if divide == "file" else None,
        )  # fmt: skip
        shards = source if isinstance(source, ShardSource) else Items(source)
        own = _Source(SharReader(shards, options), shards.num_cuts, options, on_error, max_errors)
        self._sources: tuple[_Source, ...] = (own,)
        self._open: Callable[[], Examples] = own.examples

    def map(self, fn: Callable[[Any], Any]) -> Chain:
        """Apply a function to every example."""
        return self._then(steps.map_examples, fn=self._guarded(fn))

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
        return self._then(steps.parallel_map_examples, fn=self._guarded(fn), options=options)

    def filter(self, keep: Callable[[Any], bool]) -> Chain:
        """Leave out the examples for which a function returns False; they count as consumed."""
        return self._then(steps.filter_examples, keep=self._guarded(keep))

    def shuffle(self, size: int) -> Chain:
        """Draw each example from a buffer of ``size``, by the seed and the epoch of the source."""
        return self._then(steps.shuffle_examples, size=_at_least_1("size", size))

    def sort(self, size: int, key: Callable[[Any], Any] = count_frames, *, reverse: bool = False) -> Chain:
        """Sort every ``size`` examples among themselves."""
        return self._then(steps.sort_examples, size=_at_least_1("size", size), key=key, reverse=reverse)

    def batch(self, size: int) -> Chain:
        """Put every ``size`` examples into a list; the last one of an epoch may be shorter."""
        return self._then(steps.batch_examples, size=_at_least_1("size", size))

    def dynamic_batch(self, max_frames: int, length: Callable[[Any], int] = count_frames) -> Chain:
        """Put examples into lists whose padded length, the longest times their number, is at most ``max_frames``.

        An example that is longer is in a batch of its own.
        """
        _at_least_1("max_frames", max_frames)
        return self._then(steps.dynamic_batch_examples, max_frames=max_frames, length=length)

    def bucket(self, bounds: Sequence[int], sizes: Sequence[int], length: Callable[[Any], int] = count_frames) -> Chain:
        """Put examples of similar lengths into lists: ``sizes[n]`` of those shorter than ``bounds[n]``, and of those
        that reach the last bound as many as the last size says.
        """
        for size in sizes:
            _at_least_1("a size of bucket", size)
        numbers = all(isinstance(bound, Real) for bound in bounds)
        if not numbers or len(sizes) != len(bounds) + 1 or list(bounds) != sorted(set(bounds)):
            raise ConfigError(
                f"bucket has bounds {list(bounds)} and sizes {list(sizes)}: bounds are numbers that rise, and there is "
                "one size more",
                code="bad_config_value",
            )
        return self._then(steps.bucket_examples, bounds=bounds, sizes=sizes, length=length)

    def zip(self, *others: Chain) -> Chain:
        """Make tuples of one example of each chain, such as speech and text.

        Whichever ends first ends the pass; the others go on from there in the next one. With ``infinite=True`` of the
        text, the speech alone makes the epochs.
        """
        sources = [source for chain in (self, *others) for source in chain._sources]
        if len(set(map(id, sources))) < len(sources):
            raise ConfigError("a chain cannot be zipped with itself: make another one", code="bad_config_value")
        if len({(source.options.rank, source.options.world_size) for source in sources}) > 1:
            raise ConfigError("chains that are zipped have the same rank and world_size", code="split_wrong")
        chain = copy.copy(self)
        chain._sources = tuple(sources)
        chain._open = partial(steps.zip_examples, [one._open for one in (self, *others)])
        return chain

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one: needed before each epoch of a DataLoader whose workers end with their epoch."""
        for source in self._sources:
            source.reader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with closing(self._open()) as examples:
            for example in examples:
                steps.consume(example)
                yield example.value
        for source in self._sources:
            source.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sources in this process, for ``load_state_dict`` and ``merge_data_states``."""
        return {"readers": [source.reader.state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state of this part, or merged states, before iterating.

        Raises:
            ConfigError: it is the state of other sources, or of another order.
        """
        readers = state.get("readers")
        if not isinstance(readers, Sequence) or len(readers) != len(self._sources):
            raise ConfigError(f"this is not the state of a chain of {len(self._sources)} sources", code="wrong_state")
        for source, one in zip(self._sources, readers, strict=True):
            source.reader.load_state_dict(one)

    def _then(self, step: Callable[..., Examples], **options: Any) -> Chain:
        chain = copy.copy(self)
        chain._open = partial(steps.follow, self._open, partial(step, **options))
        return chain

    def _guarded(self, fn: Callable[[Any], Any]) -> Guarded:
        return Guarded(fn, catches=any(source.skips for source in self._sources))


class _Source:
    """A source of a chain: its reader, and the errors that it may leave out.

    Attributes:
        draw: what random numbers of the pass are made from: the same from the same state, other ones in each epoch, for
            each reader and after each stop, where the same ones might hold an example back for ever.
    """

    draw: str

    def __init__(
        self,
        reader: SharReader,
        num_examples: Callable[[], int],
        options: ReadOptions,
        on_error: str,
        max_errors: int,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error is {on_error!r}: it is 'raise' or 'skip'", code="bad_config_value")
        if not _is_whole(max_errors) or max_errors < 0:
            raise ConfigError(f"max_errors is {max_errors!r}: it is a whole number from 0", code="bad_config_value")
        self.reader, self.options, self.skips, self._max_errors = reader, options, on_error == "skip", max_errors
        self._num_examples = num_examples
        self._ended = False
        reader.count_only_marked()

    def examples(self) -> Examples:
        self._ended = False
        self.draw = f"{self.options.seed} {json.dumps(self.reader.state_dict())}"
        for example in self.reader:
            for origin in example.origins:
                origin.source = self
            if isinstance(example.value, DamagedShard):
                steps.leave_out(example, example.value)
            else:
                yield example
        self._ended = True

    def count_error(self, error: Exception) -> None:
        """Count an example that is left out; raise where there are too many, or none may be."""
        if not self.skips:
            raise error
        count = self.reader.count_damaged()
        if count > self._max_errors:
            raise DamagedShard(
                f"{error}; more than max_errors={self._max_errors} examples of this rank and worker had errors"
            ) from error
        log.warning("an example is left out (%d of at most %d): %s", count, self._max_errors, error)

    def check_dropped(self, count: int) -> None:
        """Raise ConfigError where a filter drops so many in a row that an endless source has nothing for it."""
        if self.options.infinite and count % _DROPPED_UNTIL_CHECK == 0 and count > 2 * self._num_examples():
            raise ConfigError(
                f"none of {count} examples in a row passes the filter, which is more than two epochs of them",
                code="too_few_cuts",
            )

    def leave(self) -> None:
        """End a pass: if not all was given out, as in a zip with something shorter, the next one goes on from here."""
        if not self._ended or self.reader.num_unmarked:
            self.reader.load_state_dict(self.reader.state_dict())


def _at_least_1(name: str, value: int) -> int:
    if not _is_whole(value) or value < 1:
        raise ConfigError(f"{name} is {value!r}: it is a whole number of at least 1", code="bad_config_value")
    return value


def _is_whole(value: object) -> bool:
    """Return True for whole numbers, NumPy's as well."""
    return isinstance(value, Integral) and not isinstance(value, bool)
