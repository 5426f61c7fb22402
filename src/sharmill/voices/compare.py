"""Voices of a corpus, and the similarities of clips to the voices of all speaker groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from sharmill.voices.cluster import CORE, STEPS, link_blocks

if TYPE_CHECKING:
    from torch import Tensor

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
_FEWEST_OF_OTHERS: Final = 2
_SIDES: Final[tuple[Literal["left"], Literal["right"]]] = ("left", "right")
# Numbers of clips and voices that are compared at a time: 64 MiB of similarities.
_ROWS: Final = 1024
_VOICES: Final = 8192


@dataclass(frozen=True)
class Similarities:
    """Similarities of clips to voices.

    Attributes:
        own: (N,) highest similarity to a main voice of the clip's own group, computed without the clip itself; -inf if
            there is none.
        other: (N,) highest similarity to a main voice of another group; -inf if there is none. Voices of a single clip,
            and voices that the clip's own group has too, are excluded.
        nearest: (N,) row of this other voice in the result of ``find_voices``.
    """

    own: np.ndarray
    other: np.ndarray
    nearest: np.ndarray


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
    is_main = (counts >= _MAIN_SHARE * largest) & (counts >= np.minimum(largest, _FEWEST_OF_OTHERS))
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
    large = np.flatnonzero(voices["size"] >= _FEWEST_OF_OTHERS)
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


def compare_with_voices(
    embeddings: np.ndarray,
    clusters: np.ndarray,
    groups: np.ndarray,
    voices: np.ndarray,
    directions: Tensor,
) -> Similarities:
    """Compare clips with the voices of all groups.

    Args:
        embeddings: (N, D) unit vectors, or zeros for clips without a voice.
        clusters, groups: (N,) cluster and group of each clip, as for ``find_voices``.
        voices: result of ``find_voices``.
        directions: (V, D) directions of the voices, on the device that computes the similarities.
    """
    own, other = np.full(len(embeddings), -np.inf), np.full(len(embeddings), -np.inf)
    nearest, order = np.zeros(len(embeddings), np.int64), np.argsort(groups, kind="stable")
    by_voice = np.argsort(voices["voice"], kind="stable")
    hidden = np.flatnonzero(~voices["is_main"] | (voices["size"] < _FEWEST_OF_OTHERS))
    for start in range(0, len(order), _ROWS):
        rows = order[start : start + _ROWS]
        block = np.asarray(embeddings[rows], np.float64)
        excluded: list[tuple[slice, np.ndarray]] = [(slice(None), hidden)]
        edges = np.flatnonzero(np.diff(groups[rows].astype(np.int64), prepend=-1, append=-1))
        for begin, end in pairwise(edges.tolist()):
            inside = slice(begin, end)
            mine = np.arange(*np.searchsorted(voices["group"], [groups[rows[begin]], groups[rows[begin]] + 1]))
            mine = mine[voices["is_main"][mine]]
            for first in range(0, len(mine), _VOICES):
                some = mine[first : first + _VOICES]
                similar = _without_itself(
                    _product(block[inside], directions[some]), clusters[rows[inside]], voices[some]
                )
                own[rows[inside]] = np.maximum(own[rows[inside]], similar.max(axis=1))
            bounds = (np.searchsorted(voices["voice"], voices["voice"][mine], side, by_voice) for side in _SIDES)
            excluded += [(inside, by_voice[first:last]) for first, last in zip(*bounds, strict=True)]
        for first in range(0, len(voices), _VOICES):
            similar = _product(block, directions[first : first + _VOICES])
            for inside, columns in excluded:
                similar[inside, columns[(columns >= first) & (columns < first + _VOICES)] - first] = -np.inf
            best = similar.argmax(axis=1)
            value = similar[np.arange(len(rows)), best]
            better = value > other[rows]
            other[rows[better]], nearest[rows[better]] = value[better], first + best[better]
    return Similarities(own, other, nearest)


def _product(rows: np.ndarray, directions: Tensor) -> np.ndarray:
    """Return the similarities of rows (N, D) to directions (V, D), in multiples of ``1 / STEPS``."""
    import torch

    similar = torch.from_numpy(rows).to(directions.device) @ directions.double().T
    return similar.mul_(STEPS).round_().div_(STEPS).cpu().numpy()


def _without_itself(similar: np.ndarray, clusters: np.ndarray, voices: np.ndarray) -> np.ndarray:
    """Return similarities (N, V) of clips to voices, computed without the clip itself for the voice of its cluster."""
    sums = voices["size"] * voices["length"].astype(np.float64)
    lengths = np.sqrt(np.maximum(sums**2 - 2 * sums * similar + 1, 1e-12))
    others = np.where(voices["size"] > 1, (sums * similar - 1) / lengths, -np.inf)
    return np.where(clusters[:, None] == voices["cluster"], others, similar)
