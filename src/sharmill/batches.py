"""Batches for a model: by padded length, with the items made ready ahead in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def padded_batches(lengths: Sequence[float], max_padded: float, *, equal_only: bool = False) -> list[list[int]]:
    """Indices of the items in batches, sorted by length, so that little is padded.

    A batch's number of items times its longest is at most ``max_padded``; an item that is longer is alone.
    ``equal_only`` puts only items of the same length together.
    """
    batches: list[list[int]] = []
    longest = 0.0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = bool(batches) and (len(batches[-1]) + 1) * longest <= max_padded
        if fits and (not equal_only or lengths[index] == longest):
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def map_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    ahead: float,
    weigh: Callable[[Item], float] = lambda item: 1.0,
) -> Iterator[Result]:
    """The results in the order of the items, some of them made before they are asked for.

    Those that wait, or are being made, together weigh at most ``ahead``, unless they are no more than ``threads``.
    Threads serve, since decoding and resampling release the interpreter's lock. An error is raised where its result
    would have come.
    """
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="ahead") as pool:
        pending: deque[tuple[Future[Result], float]] = deque()
        weight = 0.0
        try:
            for item in items:
                pending.append((pool.submit(function, item), weigh(item)))
                weight += pending[-1][1]
                while len(pending) > threads and weight > ahead:
                    future, own = pending.popleft()
                    weight -= own
                    yield future.result()
            while pending:
                yield pending.popleft()[0].result()
        finally:
            for future, _ in pending:
                future.cancel()


def pad(items: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 arrays of shape (samples,) as one zero-padded tensor (batch, samples), and their lengths (batch,)."""
    import torch

    lengths = torch.tensor([len(item) for item in items], dtype=torch.int64)
    padded = torch.zeros(len(items), int(lengths.max()), dtype=torch.float32)
    for row, item in zip(padded, items, strict=True):
        row[: len(item)] = torch.from_numpy(item)
    return padded, lengths
