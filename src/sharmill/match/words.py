"""Pairs of texts that have too many words in common, for the selection of contexts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"[\w']+")
_IndexArray = NDArray[np.int64]


def number_words(texts: Iterable[str]) -> list[_IndexArray]:
    """Return the distinct words of each text as numbers, equal ones for equal words; case and punctuation aside.

    >>> [words.tolist() for words in number_words(["Go, go on!", "on we go", ""])]
    [[0, 1], [0, 1, 2], []]
    """
    numbers: dict[str, int] = {}
    found = []
    for text in texts:
        words = {numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text.lower())}
        found.append(np.array(sorted(words), dtype=np.int64))
    return found


class SharedWords:
    """The candidates that share more than a part of the words of each utterance.

    The share is that of the text with fewer distinct words: the common words over its number. A text without words
    shares none.

    Args:
        words: distinct words of each of the N utterances, as ``number_words`` makes them.
        columns: (M,) the candidates among them.
        limit: the greatest share that is allowed.
    """

    def __init__(self, words: Sequence[_IndexArray], columns: _IndexArray, limit: float) -> None:
        from scipy.sparse import csr_array

        self._sizes = np.array([len(own) for own in words], dtype=np.int64)
        flat = np.concatenate([np.empty(0, dtype=np.int64), *words])
        starts = np.concatenate([[0], np.cumsum(self._sizes)])
        shape = (len(words), int(flat.max(initial=-1)) + 1)
        self._rows = csr_array((np.ones(len(flat), dtype=np.int32), flat, starts), shape=shape)
        self._candidates = self._rows[columns].T.tocsr()
        self._candidate_sizes = self._sizes[columns]
        self._limit = limit

    def pairs(self, block: slice) -> tuple[_IndexArray, _IndexArray]:
        """Return the excluded pairs of a block: row in the block, position among the candidates."""
        common = (self._rows[block] @ self._candidates).tocoo()
        row, candidate = common.coords
        fewer = np.minimum(self._sizes[block][row], self._candidate_sizes[candidate])
        excluded = common.data > self._limit * fewer + 1e-9
        return row[excluded], candidate[excluded]
