"""Spreads items of known cost over bins so that the fullest bin is as light as possible."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable


def pack(costs: Iterable[float], num_bins: int) -> list[list[int]]:
    """Greedy bin packing: the largest item first, each into the bin with the least load so far.

    This is the LPT rule of R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17
    (1969): the fullest bin holds at most 4/3 - 1/(3 * num_bins) times that of the best possible packing.
    Among equal costs the lower index goes first, among equal loads the lower bin is filled first: the result
    depends on nothing but the arguments.

    Args:
        costs: one number per item, in any unit.
        num_bins: how many bins; some stay empty if there are fewer items.

    Returns:
        ``num_bins`` lists of item indices, each in order of decreasing cost.

    Raises:
        ValueError: ``num_bins`` is less than 1, or a cost is negative or not finite.

    Example:
        >>> pack([3, 7, 2, 4], num_bins=2)
        [[1, 2], [3, 0]]
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    values = [float(cost) for cost in costs]
    for item, cost in enumerate(values):
        if not 0 <= cost < math.inf:
            raise ValueError(f"the cost of item {item} must be finite and not negative, got {cost}")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0.0, index) for index in range(num_bins)]  # a heap from the start
    # `reverse` keeps equal costs in order of their index.
    for item in sorted(range(len(values)), key=values.__getitem__, reverse=True):
        load, index = loads[0]
        bins[index].append(item)
        heapq.heapreplace(loads, (load + values[item], index))
    return bins
