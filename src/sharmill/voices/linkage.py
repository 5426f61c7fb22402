"""Clusters of voice embeddings: clips that sound like one voice.

The two clusters whose clips have the highest mean similarity are merged, as long as it reaches a limit (average
linkage, UPGMA). This mean is the dot product of the clusters' mean vectors, so clusters of any size are merged from
their means alone. Merges are found by nearest-neighbour chains (F. Murtagh, "A survey of recent advances in
hierarchical clustering algorithms", The Computer Journal 26(4), 1983), which give the same clusters as always merging
the most similar pair.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

# Similarities are rounded to multiples of 2**-24, because the rounding errors of a product depend on the library.
STEPS: Final = 2.0**24
# Maximum number of vectors whose similarities are computed together: a matrix of 128 MiB.
BLOCK: Final = 4096
# Minimum number of clips of a core with which less similar cores are merged.
CORE: Final = 3
# The search ends if the third or a later division leaves more than this share of the clusters, or after this number
# of divisions.
_SHRINKS: Final = 0.99
_MOST_PASSES: Final = 12


def link_average(means: np.ndarray, sizes: np.ndarray, least: float) -> np.ndarray:
    """Cluster vectors by average linkage; return the number of the first vector of each vector's cluster.

    Args:
        means: (N, D) mean of the unit vectors of each item's clips; the mean itself is not normalized.
        sizes: (N,) number of clips of each item.
        least: minimum mean similarity of two clusters that are merged.

    Returns:
        (N,) int64.
    """
    rows = np.asarray(means, np.float64)
    similar = np.rint(rows @ rows.T * STEPS) / STEPS
    np.fill_diagonal(similar, -np.inf)
    sizes, first, chain = np.array(sizes, np.float64), np.arange(len(rows)), list[int]()
    for start in range(len(rows)):
        if first[start] == start and not chain:
            chain.append(start)
        while chain:
            tip = chain[-1]
            near = int(similar[tip].argmax())
            if len(chain) > 1 and similar[tip, chain[-2]] == similar[tip, near]:
                near = chain[-2]  # among equally similar neighbours, the previous one ends the chain
            if similar[tip, near] < least:
                # Merges of other clusters cannot raise this similarity, so this cluster is complete.
                similar[:, chain.pop()] = -np.inf
            elif len(chain) > 1 and near == chain[-2]:
                del chain[-2:]
                _merge(similar, sizes, *sorted((tip, near)))
                first[first == max(tip, near)] = min(tip, near)
                if not chain and min(tip, near) <= start:
                    chain.append(min(tip, near))
            else:
                chain.append(near)
    return first


def _merge(similar: np.ndarray, sizes: np.ndarray, kept: int, gone: int) -> None:
    """Replace two clusters by one in the similarities (N, N) and sizes (N,)."""
    total = sizes[kept] + sizes[gone]
    merged = (sizes[kept] * similar[kept] + sizes[gone] * similar[gone]) / total
    merged[[kept, gone]] = -np.inf
    similar[kept] = similar[:, kept] = merged
    similar[gone] = similar[:, gone] = -np.inf
    sizes[kept] = total


def link_blocks(means: np.ndarray, sizes: np.ndarray, least: float, block: int = BLOCK) -> np.ndarray:
    """Cluster any number of vectors as ``link_average`` does, with memory for one block of similarities.

    More than ``block`` vectors are clustered approximately: a tree of random divisions brings similar vectors into the
    same block. The resulting clusters are divided again by another tree, until few more of them are merged.

    Args:
        means, sizes, least: as for ``link_average``.
        block: maximum number of vectors in a block.
    """
    cluster = np.arange(len(means))
    means, sizes = np.array(means, np.float32), np.array(sizes, np.float64)
    heads = cluster
    for seed in range(_MOST_PASSES):
        found = np.empty_like(heads)
        for rows in divide_similar(means[heads], block, np.random.default_rng(seed)):
            found[rows] = rows[link_average(means[heads[rows]], sizes[heads[rows]], least)]
        heads, merged = _sum_clusters(means, sizes, heads, found)
        cluster = merged[cluster]
        if len(found) <= block or (seed > 1 and len(heads) > _SHRINKS * len(found)):
            break
    return cluster


def link_cores(means: np.ndarray, sizes: np.ndarray, strict: float, least: float) -> np.ndarray:
    """Cluster clips into cores of very similar clips, then merge less similar cores; see ``link_blocks``.

    Cores are merged only if one of them has at least ``CORE`` clips. Otherwise, two of many speakers who happen to
    sound alike would become one cluster.

    Args:
        means, sizes: as for ``link_average``.
        strict: minimum mean similarity of the clips of a core. If it is at most ``least``, the cores are the result.
        least: minimum mean similarity of cores that are merged.
    """
    cores = link_blocks(means, sizes, strict)
    if strict <= least:
        return cores
    heads, numbers = np.unique(cores, return_inverse=True)
    counts = np.bincount(numbers, sizes, len(heads))
    sums = np.zeros((len(heads), means.shape[1]))
    np.add.at(sums, numbers, means * sizes[:, None])
    merged = link_blocks(sums / np.maximum(counts, 1)[:, None], counts, least)
    largest = np.zeros(len(heads))
    np.maximum.at(largest, merged, counts)
    kept = np.where(largest[merged] >= CORE, merged, np.arange(len(heads)))
    return np.asarray(heads[kept][numbers])


def _sum_clusters(
    means: np.ndarray, sizes: np.ndarray, heads: np.ndarray, found: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Store the mean and size of each new cluster at its first member.

    Args:
        heads: (H,) the vector that represents each old cluster.
        found: (H,) for each old cluster, the position in ``heads`` of the first member of its new cluster.

    Returns:
        The vectors that represent the new clusters; and an array (N,) that maps the vector of each old cluster to the
        vector of its new cluster.
    """
    goals, merged = heads[found], np.arange(len(means))
    merged[heads] = goals
    moved = goals != heads
    for gone, kept in zip(heads[moved], goals[moved], strict=True):
        total = sizes[kept] + sizes[gone]
        means[kept] = (sizes[kept] * means[kept] + sizes[gone] * means[gone]) / total
        sizes[kept] = total
    return np.unique(goals), merged


def divide_similar(means: np.ndarray, block: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Divide vectors (N, D) into parts of at most ``block``, and yield the row numbers of each part in ascending order.

    Vectors are divided at the median of their projections on the difference of two random ones.
    """
    parts = [np.arange(len(means))]
    while parts:
        rows = parts.pop()
        if len(rows) <= block:
            yield np.sort(rows)
            continue
        one, other = means[random.choice(rows, 2, replace=False)].astype(np.float64)
        order = np.argsort(np.rint(means[rows] @ (one - other) * STEPS), kind="stable")
        parts += [rows[order[len(rows) // 2 :]], rows[order[: len(rows) // 2]]]
