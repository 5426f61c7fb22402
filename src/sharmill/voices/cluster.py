"""Clusters of voice embeddings: clips that sound like one voice.

Two clusters are merged if the mean similarity of their clips is the highest and at least a limit (average linkage,
UPGMA). The mean similarity of the clips of two clusters is the product of their mean vectors, so clusters of any size
can be merged from their means. Merges are found by nearest-neighbour chains (F. Murtagh, "A survey of recent advances
in hierarchical clustering algorithms", The Computer Journal 26(4), 1983), which give the same clusters as merging the
most similar pair of all.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

# Similarities are rounded to multiples of 2**-24, because the noise of a product depends on the library.
STEPS: Final = 2.0**24
# Maximum number of vectors whose similarities are computed together: a matrix of 128 MiB.
BLOCK: Final = 4096
# A core with this many clips attracts less similar clips.
CORE: Final = 3
# Divisions after the first two that may merge less than 1 % of the clusters before the search ends.
_SHRINKS: Final = 0.99
_MOST_PASSES: Final = 12


def link_average(means: np.ndarray, sizes: np.ndarray, least: float) -> np.ndarray:
    """Return the cluster of each vector by average linkage, as the number of the first vector of the cluster.

    Args:
        means: (N, D) mean of the unit vectors of each item's clips, not normalized itself.
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
                near = chain[-2]  # of equally similar neighbours, the previous one ends the chain
            if similar[tip, near] < least:
                # Merges of others can only lower the similarity, so this cluster is complete.
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
    """Return the clusters of any number of vectors, with memory for one block of similarities.

    More than one block is clustered approximately: similar vectors are brought into the same block by a tree of random
    divisions, and the clusters of all blocks are divided anew, by another tree, until few more are merged.

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
    """Return clusters of which each has a core of very similar clips; see ``link_blocks``.

    Without this, two strangers among many who happen to sound alike would be a cluster.

    Args:
        means, sizes: as for ``link_average``.
        strict: minimum mean similarity of the clips of a core.
        least: minimum mean similarity of clusters that are merged if one of their cores has at least ``CORE`` clips.
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
    """Give the first member of each cluster the mean and the size of the cluster.

    Args:
        heads: (H,) the vectors that stand for clusters so far.
        found: (H,) for each of them, the position in ``heads`` of the first member of its new cluster.

    Returns:
        The vectors that stand for the new clusters; and for each vector (N,), the one that stands for its cluster, if
        it stood for a cluster so far.
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
    """Divide vectors (N, D) into parts of at most ``block``, and yield their numbers, each part in ascending order.

    Each division is at the median of the projections on the difference of two random vectors.
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
