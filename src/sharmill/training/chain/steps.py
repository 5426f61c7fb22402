"""The steps of a chain: generators over examples, which keep the places that each example came from."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NoReturn

from sharmill.errors import DamagedShard, SharmillError
from sharmill.training.chain.guarded import NEVER_SKIPPED, Failure, Guarded
from sharmill.training.chain.sources import Example
from sharmill.training.parallel import parallel_map

Examples = Generator[Example, None, None]


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


def _raise_at(example: Example, error: Exception) -> NoReturn:
    """Raise an error with the example that it was at: in its message where it is ours, else in a note."""
    if isinstance(error, SharmillError) and not isinstance(error, NEVER_SKIPPED):
        raise DamagedShard(f"{_names(example)}: {error}") from error
    error.add_note(f"at {_names(example)}")
    raise error


def _names(example: Example) -> str:
    return ", ".join(origin.name for origin in example.origins[:3])


def _is_good(example: Example, result: Any) -> bool:
    """Return True of a result; leave the example out where it is an error."""
    if isinstance(result, Failure):
        leave_out(example, DamagedShard(f"{_names(example)}: {result}"))
        return False
    return True


def follow(before: Callable[[], Examples], step: Callable[..., Examples]) -> Examples:
    """Return what a step makes of the examples before it."""
    return step(before())


def map_examples(examples: Examples, fn: Guarded) -> Examples:
    for example, result in _results(examples, fn):
        if _is_good(example, result):
            yield Example(result, example.origins)


def filter_examples(examples: Examples, keep: Guarded) -> Examples:
    num_dropped = 0
    for example, result in _results(examples, keep):
        if not _is_good(example, result):
            continue
        if result:
            num_dropped = 0
            yield example
            continue
        consume(example)
        num_dropped += 1
        example.origins[0].source.check_dropped(num_dropped)


def _results(examples: Examples, fn: Guarded) -> Iterator[tuple[Example, Any]]:
    for example in examples:
        try:
            result = fn(example.value)
        except Exception as error:  # noqa: BLE001  it is raised again
            _raise_at(example, error)
        yield example, result


def parallel_map_examples(examples: Examples, fn: Guarded, options: Mapping[str, Any]) -> Examples:
    ahead: deque[Example] = deque()

    def values() -> Iterator[Any]:
        for example in examples:
            ahead.append(example)
            yield example.value

    with closing(iter(parallel_map(values(), fn, **options))) as results:  # type: ignore[type-var]
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except Exception as error:
                # All results before it were delivered: if nothing is ahead, it is an error of the examples.
                if ahead:
                    _raise_at(ahead[0], error)
                raise
            example = ahead.popleft()
            if _is_good(example, result):
                yield Example(result, example.origins)


def shuffle_examples(examples: Examples, size: int) -> Examples:
    rng: random.Random | None = None
    buffer: list[Example] = []
    for example in examples:
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


def sort_examples(examples: Examples, size: int, key: Callable[[Any], Any], reverse: bool) -> Examples:
    for batch in _groups(examples, size):
        yield from sorted(batch, key=lambda example: key(example.value), reverse=reverse)


def batch_examples(examples: Examples, size: int) -> Examples:
    yield from map(_joined, _groups(examples, size))


def _groups(examples: Examples, size: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for example in examples:
        group.append(example)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _joined(batch: Sequence[Example]) -> Example:
    return Example([example.value for example in batch], tuple(origin for one in batch for origin in one.origins))


def dynamic_batch_examples(examples: Examples, max_frames: int, length: Callable[[Any], int]) -> Examples:
    batch: list[Example] = []
    longest = 0
    for example in examples:
        own = length(example.value)
        if batch and max(longest, own) * (len(batch) + 1) > max_frames:
            yield _joined(batch)
            batch, longest = [], 0
        batch.append(example)
        longest = max(longest, own)
    if batch:
        yield _joined(batch)


def bucket_examples(
    examples: Examples, bounds: Sequence[int], sizes: Sequence[int], length: Callable[[Any], int]
) -> Examples:
    buckets: list[list[Example]] = [[] for _ in sizes]
    for example in examples:
        own = length(example.value)
        number = next((n for n, bound in enumerate(bounds) if own < bound), len(bounds))
        buckets[number].append(example)
        if len(buckets[number]) == sizes[number]:
            yield _joined(buckets[number])
            buckets[number] = []
    yield from (_joined(bucket) for bucket in buckets if bucket)


def zip_examples(opens: Sequence[Callable[[], Examples]]) -> Examples:
    columns = [open_examples() for open_examples in opens]
    try:
        for row in zip(*columns, strict=False):
            yield Example(tuple(one.value for one in row), tuple(origin for one in row for origin in one.origins))
    finally:
        for column in columns:
            column.close()
