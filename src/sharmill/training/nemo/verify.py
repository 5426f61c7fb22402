"""The check that a training's data go on where they were: batches, a stop, and fresh processes that go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sharmill.errors import ConfigError
from sharmill.training.nemo.loader_settings import Settings
from sharmill.training.nemo.trial import Place, check_ranks, fresh_python, places, try_ranks


def stop_and_resume(
    settings: Settings, *, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None
) -> Iterator[str]:
    """Train without a model: stop after ``num_batches`` of each rank, and go on, ``num_stops`` times; yield lines.

    Every rank is a process of its own each time; odd times there are ``ranks`` of them, even times ``then``. No example
    may come twice in an epoch, and the first resume, done twice by two Pythons, must give the same batches. Epochs that
    end must have as many examples as each other, and as one of a single rank that was never stopped.

    Raises:
        ConfigError: ``wrong_state`` where that is not so; or the settings cannot go on at all.
    """
    seen: dict[Place, int] = {}
    state: dict[str, Any] = {}
    total = 0
    with fresh_python() as first, fresh_python() as second:
        check_ranks(first, settings, (ranks, then))
        for turn in range(num_stops + 1):
            world_size = then if turn % 2 else ranks
            before = state if turn else None
            parts, state = try_ranks(first, settings, world_size, num_batches, tokenizer, before)
            if turn == 1:
                again, _ = try_ranks(second, settings, world_size, num_batches, tokenizer, before)
                if [part.batches for part in again] != [part.batches for part in parts]:
                    raise ConfigError("the same state gave other batches in other processes", code="wrong_state")
            for place in places(parts):
                if place in seen:
                    raise ConfigError(
                        f"an example of entry {place[0]} came in epoch {place[1]} before stop {seen[place]} and after "
                        f"it once more, on {world_size} ranks",
                        code="wrong_state",
                    )
                seen[place] = turn + 1
            batches = sum(len(part.batches) for part in parts)
            total += batches
            yield f"{world_size} ranks: {batches} batches, {len(places(parts))} examples"
        unstopped = [0] * len(state["readers"])
        if any(progress["epoch"] for progress in state["readers"]):
            # As many batches, and some more, since one rank holds back other examples.
            parts, whole = try_ranks(first, settings, 1, total + num_batches, tokenizer, None)
            unstopped = [
                _count(places(parts), reader, 0) if progress["epoch"] else 0
                for reader, progress in enumerate(whole["readers"])
            ]
    yield from _check_epochs(seen, state, unstopped)


def _check_epochs(seen: Iterable[Place], state: dict[str, Any], unstopped: Sequence[int]) -> Iterator[str]:
    """Compare the epochs that ended: which examples they had does not depend on where they were stopped.

    Args:
        unstopped: of each entry, the examples of an epoch without stops; 0 where none ended.
    """
    for reader, (progress, expected) in enumerate(zip(state["readers"], unstopped, strict=True)):
        counts = [_count(seen, reader, epoch) for epoch in range(int(progress["epoch"]))]
        if not counts:
            yield f"entry {reader}: no epoch ended; take more --batches or --stops to compare whole ones"
            continue
        if expected and set(counts) != {expected}:
            raise ConfigError(
                f"entry {reader} has {expected} examples in an epoch without stops, and {counts} in those with stops",
                code="wrong_state",
            )
        if len(set(counts)) > 1:
            raise ConfigError(
                f"entry {reader} had {counts[0]} examples in its first epoch and {counts} in all", code="wrong_state"
            )
        compared = "as many as without stops" if expected else "not compared with an epoch without stops"
        yield f"entry {reader}: {len(counts)} whole epochs of {counts[0]} examples, none twice, {compared}"


def _count(found: Iterable[Place], reader: int, epoch: int) -> int:
    return sum(place[:2] == (reader, epoch) for place in found)
