"""Spread items of known cost over bins so that the fullest bin is as light as possible, or into runs of equal cost."""

import heapq
import math
from collections.abc import Iterable

import numpy as np


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


def divide_evenly(costs: np.ndarray, number: int) -> list[int]:
    """Divide items in their order into runs of nearly equal cost, none of them empty.

    Returns:
        The bounds (number + 1,): run n has the items from bound n to before bound n + 1. They are where the costs so
        far are nearest to equal shares; at the first of two places as near.

    >>> divide_evenly(np.array([4.0, 1.0, 1.0, 1.0, 1.0]), 2)
    [0, 1, 5]
    """
    count, runs = len(costs), np.arange(1, number)
    so_far = np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
    wanted = so_far[-1] * runs / number
    after = np.maximum(np.searchsorted(so_far, wanted), 1)
    nearer = so_far[after] - wanted < wanted - so_far[after - 1]
    inner = np.where(nearer, after, after - 1)
    # At least one item for each run before a bound, and for each behind it.
    inner = np.maximum.accumulate(np.maximum(inner, 1) - runs) + runs
    inner = np.minimum(inner, count - number + runs)
    return [0, *inner.tolist(), count]
