"""Balancing of items with known costs: packing into bins of similar load, and division into runs of equal cost."""

import heapq
import math
from collections.abc import Iterable

import numpy as np


def pack(costs: Iterable[float], num_bins: int) -> list[list[int]]:
    """Pack items into bins greedily: in order of decreasing cost, each item goes into the bin with the lowest load.

    This is the LPT rule of R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17
    (1969): the load of the fullest bin is at most 4/3 - 1/(3 * num_bins) times the optimum. Ties are broken by the
    lower item index and the lower bin index, so the result depends only on the arguments.

    Args:
        costs: one number per item, in any unit.
        num_bins: number of bins; some stay empty if there are fewer items.

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
    loads = [(0.0, index) for index in range(num_bins)]  # this is already a valid heap
    # ``sorted`` is stable, even with ``reverse``, so items of equal cost stay in the order of their index.
    for item in sorted(range(len(values)), key=values.__getitem__, reverse=True):
        load, index = loads[0]
        bins[index].append(item)
        heapq.heapreplace(loads, (load + values[item], index))
    return bins


def divide_evenly(costs: np.ndarray, number: int) -> list[int]:
    """Divide items, in order, into non-empty runs of nearly equal cost.

    Returns:
        The ``number`` + 1 bounds of the runs. Run n has the items from bound n up to, but not including, bound n + 1.
        Each bound is the position at which the cumulative cost is nearest to an equal share; in case of a tie, the
        first such position.

    >>> divide_evenly(np.array([4.0, 1.0, 1.0, 1.0, 1.0]), 2)
    [0, 1, 5]
    """
    count, runs = len(costs), np.arange(1, number)
    so_far = np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
    wanted = so_far[-1] * runs / number
    after = np.maximum(np.searchsorted(so_far, wanted), 1)
    nearer = so_far[after] - wanted < wanted - so_far[after - 1]
    inner = np.where(nearer, after, after - 1)
    # Keep at least one item per run on each side of a boundary.
    inner = np.maximum.accumulate(np.maximum(inner, 1) - runs) + runs
    inner = np.minimum(inner, count - number + runs)
    return [0, *inner.tolist(), count]
