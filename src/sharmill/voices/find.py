"""The voices of a corpus: the clusters of clips that count as voices, and the groups after which they are named."""

from typing import Final

import numpy as np

from sharmill.voices.linkage import CORE, link_blocks

# A cluster of clips in one voice. Clusters and groups are identified by their first line. ``length`` is the norm of the
# mean embedding. Clusters with the same voice have the same ``voice``, the row of the first of them. The voice is named
# after the group ``speaker``, as the ``number``-th one.
VOICE: Final = np.dtype(
    [("cluster", "u4"), ("group", "u4"), ("size", "u4"), ("length", "f4"), ("voice", "u4"), ("is_main", "?"),
     ("speaker", "u4"), ("number", "u4")]
)  # fmt: skip
# The main voices of a group are the clusters with at least this share of the clips of the largest cluster; single clips
# only if no cluster of the group is larger. A smaller cluster is a further voice if it has at least CORE clips.
_MAIN_SHARE: Final = 0.5
# Minimum number of clips of a voice that is compared with clips of other groups, or that groups may have in common.
FEWEST_OF_OTHERS: Final = 2


def find_voices(
    embeddings: np.ndarray, clusters: np.ndarray, groups: np.ndarray, least: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the voices of a corpus, ordered by group, and their directions.

    Args:
        embeddings: (N, D) unit vectors, or zeros for clips without a voice.
        clusters: (N,) the line of the first clip of each clip's cluster.
        groups: (N,) the first line of each clip's group.
        least: minimum mean similarity of clusters that are the same voice.

    Returns:
        (V,) array of dtype ``VOICE``, and (V, D) float32 unit vectors.
    """
    if not len(clusters):
        return np.zeros(0, VOICE), np.zeros((0, embeddings.shape[-1]), np.float32)
    heads, counts = np.unique(clusters, return_counts=True)
    order = np.lexsort((heads, groups[heads]))
    heads, counts = heads[order], counts[order]
    begins = np.flatnonzero(np.diff(groups[heads], prepend=-1))
    in_group = np.diff(begins, append=len(heads))
    largest = np.repeat(np.maximum.reduceat(counts, begins), in_group)
    is_main = (counts >= _MAIN_SHARE * largest) & (counts >= np.minimum(largest, FEWEST_OF_OTHERS))
    # If a group has only one clip, there is nothing to compare it with.
    alone = (counts == 1) & (np.repeat(in_group, in_group) == 1)
    kept = (is_main | (counts >= CORE)) & ~alone
    voices = np.zeros(int(kept.sum()), VOICE)
    voices["cluster"], voices["group"], voices["size"] = heads[kept], groups[heads[kept]], counts[kept]
    voices["is_main"] = is_main[kept]
    means = _sum_rows(embeddings, clusters, voices["cluster"]) / voices["size"][:, None]
    voices["length"] = np.linalg.norm(means, axis=1)
    # Clips of silence, whose embeddings are zeros, have no voice.
    voices, means = voices[voices["length"] > 0], means[voices["length"] > 0]
    _number_voices(voices, means, least)
    return voices, means / voices["length"][:, None]


def _sum_rows(embeddings: np.ndarray, clusters: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Return the sum of the embeddings of each cluster in ``heads``, (V, D) float32, computed in blocks of rows."""
    sums = np.zeros((len(heads), embeddings.shape[1]), np.float32)
    numbers = np.argsort(heads)
    for start in range(0, len(embeddings) if len(heads) else 0, 1 << 16):
        names = clusters[start : start + (1 << 16)]
        order = np.argsort(names, kind="stable")
        begins = np.flatnonzero(np.diff(names[order].astype(np.int64), prepend=-1))
        at = np.searchsorted(heads, names[order][begins], sorter=numbers).clip(max=max(0, len(heads) - 1))
        rows = numbers[at]
        known = heads[rows] == names[order][begins]
        parts = np.add.reduceat(embeddings[start + order].astype(np.float32), begins)
        sums[rows[known]] += parts[known]
    return sums


def _number_voices(voices: np.ndarray, means: np.ndarray, least: float) -> None:
    """Set the voice, speaker and number of each of the ``voices``, from their means (V, D).

    A voice is named after the first group whose largest voice it is; if there is none, after the first group whose main
    voice it is; otherwise after its own group. ``number`` counts the voices that are named after a group, from 1.
    """
    voices["voice"] = np.arange(len(voices))
    large = np.flatnonzero(voices["size"] >= FEWEST_OF_OTHERS)
    voices["voice"][large] = large[link_blocks(means[large], voices["size"][large], least)]
    named: dict[int, tuple[int, int]] = {}
    further: dict[int, int] = {}
    order = np.lexsort((np.arange(len(voices)), -voices["size"].astype(np.int64), voices["group"]))
    is_largest = np.diff(voices["group"][order].astype(np.int64), prepend=-1) > 0
    # The largest voices come first, so that they keep the names of their groups.
    for row in [*order[is_largest].tolist(), *order[~is_largest].tolist()]:
        voice, group = int(voices["voice"][row]), int(voices["group"][row])
        if voice not in named and voices["is_main"][row]:
            further[group] = further.get(group, 0) + 1
            named[voice] = group, further[group]
    for row, (voice, group) in enumerate(zip(voices["voice"].tolist(), voices["group"].tolist(), strict=True)):
        if voice not in named:
            further[group] = further.get(group, 0) + 1
            named[voice] = group, further[group]
        voices["speaker"][row], voices["number"][row] = named[voice]
