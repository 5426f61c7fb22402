"""The check that a training's data go on where they were: batches, a stop, and fresh processes that go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sharmill.errors import ConfigError
from sharmill.training.nemo.loader_settings import Settings
from sharmill.training.nemo.trial import Place, fresh_python, places, try_ranks


def stop_and_resume(
    settings: Settings, *, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None
) -> Iterator[str]:
    """Train without a model: stop after ``num_batches`` of each rank, and go on, ``num_stops`` times; yield lines.

    Every rank is a process of its own each time; odd times there are ``ranks`` of them, even times ``then``. No example
    may come twice in an epoch, and the first resume, done twice by two Pythons, must give the same batches. Of the
    epochs that end, the examples must be those of every other such epoch.

    Raises:
        ConfigError: ``wrong_state`` where that is not so; or the settings cannot go on at all.
    """
    seen: dict[Place, int] = {}
    state: dict[str, Any] = {}
    with fresh_python() as first, fresh_python() as second:
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
            yield f"{world_size} ranks: {batches} batches, {len(places(parts))} examples"
    yield from _check_epochs(seen, state)


def _check_epochs(seen: dict[Place, int], state: dict[str, Any]) -> Iterator[str]:
    """Compare the epochs that ended: which examples they had does not depend on where they were stopped."""
    for reader, progress in enumerate(state["readers"]):
        ended = int(progress["epoch"])
        counts = [sum(place[:2] == (reader, epoch) for place in seen) for epoch in range(ended)]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"entry {reader} had {counts[0]} examples in its first epoch and {counts} in all", code="wrong_state"
            )
        if ended:
            yield f"entry {reader}: {ended} whole epochs of {counts[0]} examples, none twice"
        else:
            yield f"entry {reader}: no epoch ended; take more --batches or --stops to compare whole ones"
