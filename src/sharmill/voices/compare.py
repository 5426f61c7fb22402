"""Similarities of clips to the voices of all speaker groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from sharmill.voices.find import FEWEST_OF_OTHERS
from sharmill.voices.linkage import STEPS

if TYPE_CHECKING:
    from torch import Tensor

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
    hidden = np.flatnonzero(~voices["is_main"] | (voices["size"] < FEWEST_OF_OTHERS))
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
