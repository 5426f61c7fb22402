"""A seeded sample of whole speaker groups, drawn so that its means are those of all records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Of a large group no fewer are taken, where there are so many.
_LEAST_OF_GROUP = 100


@dataclass(frozen=True)
class Sample:
    """Records that were drawn.

    Attributes:
        rows: (M,) int64, the numbers of the records, in increasing order.
        weights: (M,) float64 with sum 1: the share of all records that each stands for.
        num_groups: groups that they are of.
        num_partial: of these groups, those of which only a part was taken.
    """

    rows: np.ndarray
    weights: np.ndarray
    num_groups: int
    num_partial: int


def draw_groups(groups: np.ndarray, size: int, seed: int) -> Sample:
    """Draw records at random and take their groups whole, until there are ``size``.

    A group is drawn as often as its size makes likely, and each drawing of it weighs the same, so that a weighted mean
    over the sample is without bias whatever the sizes of the groups are (M. H. Hansen and W. N. Hurwitz, "On the Theory
    of Sampling from Finite Populations", 1943). Of a group that would fill the sample alone a random part is taken.

    Args:
        groups: (N,) int64, the number of each record's group, from 0.
        size: records wanted; there are fewer where there are no more, and more where a group goes beyond.

    >>> draw_groups(np.array([0, 0, 1, 1, 1]), 100, seed=1).rows.tolist()
    [0, 1, 2, 3, 4]
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    sizes = np.bincount(groups)
    most = max(_LEAST_OF_GROUP, size // max(1, len(sizes)))
    drawn = groups[generator.permutation(len(groups))]
    names, first = np.unique(drawn, return_index=True)
    names = names[np.argsort(first)]  # in the order in which they were drawn
    reached = np.cumsum(np.minimum(sizes[names], most))
    taken = names[: int(np.searchsorted(reached, size)) + 1]
    if len(taken) == len(names):
        hits = sizes.astype(np.float64)  # all are in it, each with its own share
    else:
        hits = np.bincount(drawn[: int(np.sort(first)[len(taken) - 1]) + 1], minlength=len(sizes)).astype(np.float64)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(sizes)
    rows, weights = [], []
    for group in np.sort(taken).tolist():
        members = order[ends[group] - sizes[group] : ends[group]]
        if len(members) > most:
            members = np.sort(generator.permutation(members)[:most])
        rows.append(members)
        weights.append(np.full(len(members), hits[group] / len(members)))
    if not rows:
        return Sample(np.empty(0, np.int64), np.empty(0), 0, 0)
    row, weight = np.concatenate(rows), np.concatenate(weights)
    by_row = np.argsort(row)
    return Sample(
        rows=row[by_row],
        weights=weight[by_row] / weight.sum(),
        num_groups=len(taken),
        num_partial=int((sizes[taken] > most).sum()),
    )
