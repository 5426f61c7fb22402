"""Selection of a context for every utterance of a speaker group, from arrays of embeddings, durations and ids.

This module does not depend on audio, manifests or encoders. The rule is that of NeMo's
``extend_nemo_manifest_with_context_audio.py`` (normalize, sort every row of the similarity matrix, take the first
candidate that passes), with additional limits. It is computed as a masked argmax over blocks of rows of the matrix
product, so the N x N matrix is never stored.

Similarities are computed in float64 and rounded to multiples of 2**-24, the spacing of float32 just below 1. Without
rounding, numerical noise (about 1e-16) would decide between equal candidates. This noise depends on the position of a
row in its block, the library and the device. Rounding to float32 itself would keep this noise for similarities near 0.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharmill.config import require

if TYPE_CHECKING:
    import torch

_Embeddings = TypeVar("_Embeddings", "NDArray[Any]", "torch.Tensor")
_IndexArray = NDArray[np.int64]

_STEPS: Final = 2.0**24  # steps per unit of similarity: every multiple of 2**-24 in [-1, 1] is exact in float32
_BLOCK_ELEMENTS: Final = 2**21  # 16 MiB of float64: small enough for the cache, and large enough for a fast product
_GPU_BLOCK_ELEMENTS: Final = 2**27  # 1 GiB of float64: few kernel launches, each with much work
_MIN_BLOCK_ROWS: Final = 64  # smaller blocks would read the candidates from memory too often
_MICROSECONDS: Final = 1e6
_WORD: Final = re.compile(r"[\w']+")


def select_context(
    embeddings: _Embeddings,
    durations: ArrayLike,
    *,
    min_similarity: float,
    min_duration: float,
    max_duration: float | None = None,
    recordings: ArrayLike | None = None,
    offsets: ArrayLike | None = None,
    texts: ArrayLike | None = None,
    contents: ArrayLike | None = None,
    candidates: ArrayLike | None = None,
    words: Sequence[_IndexArray] | None = None,
    max_text_overlap: float | None = None,
    max_similarity: float | None = None,
    choice: Literal["best", "sample"] = "best",
    sample_size: int = 5,
    seed: int = 0,
    block_size: int | None = None,
) -> tuple[_Embeddings, _Embeddings]:
    """Select the most similar other utterance within the limits as the context of each utterance.

    A candidate must not be the utterance itself, overlap it in the same recording, or last less than ``min_duration``
    or more than ``max_duration`` seconds. The other limits apply if their arguments are given. The first of equally
    similar candidates is selected.

    Args:
        embeddings: (N, D), a numpy array or a torch tensor; products are computed on the tensor's device. Rows need not
            have unit length; a row of zeros has similarity 0 to all others.
        durations: (N,) seconds.
        min_similarity: minimum cosine similarity, inclusive.
        recordings: (N,) integer ids; without them, no two utterances share a recording.
        offsets: (N,) seconds from the start of the recording, 0 by default. Segments that touch do not overlap. Times
            are rounded to microseconds, so that 0.1 + 0.2 touches 0.3.
        texts: (N,) integer ids; candidates with the same id as the utterance are excluded, except for -1, which means
            no text.
        contents: (N,) integer ids of the samples; candidates with the same id as the utterance are excluded as copies.
        candidates: (N,) booleans, False for utterances that must not be contexts; all True by default.
        words: words of each utterance from ``number_words``; needed for ``max_text_overlap``.
        max_text_overlap: maximum fraction of the distinct words of the shorter text that the other text also has.
        max_similarity: maximum cosine similarity, inclusive, to exclude copies whose samples differ slightly.
        choice: "best", or "sample" for a seeded draw among the ``sample_size`` best candidates within all limits.
        block_size: rows per block; affects memory and speed, but not the result.

    Returns:
        index: (N,) int64, index of each utterance's context, or -1 if it has none.
        similarity: (N,) float32, similarity of the context. Without a context, the similarity of the best candidate,
            which is below ``min_similarity``, or -inf if no candidate satisfies the other limits.
        Both are numpy arrays, or tensors on the CPU if ``embeddings`` is a tensor.

    Raises:
        ValueError: shapes do not match, embeddings or times are not finite, or an option is out of range.

    Example:
        >>> voices = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> index, similarity = select_context(voices, [4.0, 5.0, 6.0], min_similarity=0.6, min_duration=3.0)
        >>> index.tolist(), similarity.tolist()
        ([1, 0, -1], [1.0, 1.0, 0.0])
    """
    units = _unit_rows(embeddings)
    num_rows = len(units)
    limits = {
        "min_similarity": min_similarity,
        "max_similarity": max_similarity,
        "min_duration": min_duration,
        "max_duration": max_duration,
    }
    for name, limit in limits.items():
        require(limit is None or not math.isnan(limit), f"{name} is NaN")
    require(choice in ("best", "sample"), f'choice must be "best" or "sample", got {choice!r}')
    require(sample_size >= 1, f"sample_size must be at least 1, got {sample_size}")
    require(block_size is None or block_size >= 1, f"block_size must be at least 1, got {block_size}")
    seconds = _times("durations", durations, num_rows, least=0.0)
    longest = math.inf if max_duration is None else max_duration
    eligible = (seconds >= min_duration) & (seconds <= longest)
    if candidates is not None:
        eligible &= _to_numpy(candidates, np.bool_)
    columns = np.flatnonzero(eligible)
    exclusions: list[_Ranges | _SharedWords] = []
    exclusions += _exclusions(seconds, columns, recordings, offsets, texts, contents)
    if words is not None and max_text_overlap is not None:
        exclusions.append(_SharedWords(words, columns, max_text_overlap))
    most = math.inf if max_similarity is None else np.rint(max_similarity * _STEPS)
    num_best = sample_size if choice == "sample" else 1
    best, steps = _best_candidates(units, columns, exclusions, most, num_best, block_size)

    least = max(np.rint(min_similarity * _STEPS), -_STEPS)  # -inf marks missing candidates, which must not pass
    num_enough = (steps >= least).sum(axis=1)
    # The draws are made for all utterances at once, so that they do not depend on the blocks.
    draws = np.random.default_rng(seed).random(num_rows) if choice == "sample" else np.zeros(num_rows)
    pick = (draws * num_enough).astype(np.int64)
    rows = np.arange(num_rows)
    index = np.where(num_enough > 0, best[rows, pick], -1)
    similarity = (steps[rows, pick] / _STEPS).astype(np.float32)
    return _like(embeddings, index), _like(embeddings, similarity)


def number_words(texts: Iterable[str]) -> list[_IndexArray]:
    """Return the distinct words of each text as sorted numbers; case and punctuation are ignored.

    >>> [words.tolist() for words in number_words(["Go, go on!", "on we go", ""])]
    [[0, 1], [0, 1, 2], []]
    """
    numbers: dict[str, int] = {}
    found = ({numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text.lower())} for text in texts)
    return [np.array(sorted(words), dtype=np.int64) for words in found]


def _is_tensor(values: Any) -> bool:
    """Return True for a torch tensor, without importing torch."""
    return hasattr(values, "detach")


def _like(embeddings: Any, result: NDArray[Any]) -> Any:
    """Return the result as a numpy array or, if the embeddings are a tensor, as a tensor on the CPU."""
    if not _is_tensor(embeddings):
        return result
    from torch import from_numpy

    return from_numpy(result)


def _to_numpy(values: Any, dtype: Any = None) -> NDArray[Any]:
    """Convert a sequence, an array or a tensor on any device to a numpy array."""
    if _is_tensor(values):
        values = values.detach().cpu()
        # Numpy has no bfloat16, so floating-point tensors are converted to float64 first.
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values, dtype=dtype)


def _times(name: str, values: ArrayLike, num_rows: int, least: float) -> NDArray[np.float64]:
    """Return ``values`` as float64 seconds (num_rows,); raise ValueError unless all are finite and >= ``least``."""
    seconds = _to_numpy(values, np.float64)
    require(seconds.shape == (num_rows,), f"{name} must have shape ({num_rows},), got {seconds.shape}")
    require(bool(np.isfinite(seconds).all() and (seconds >= least).all()), f"{name} must be finite, at least {least} s")
    return seconds


def _ids(name: str, values: ArrayLike, num_rows: int) -> _IndexArray:
    """Return ``values`` as int64 (num_rows,); raise ValueError if they are not integers."""
    ids = _to_numpy(values)
    require(ids.shape == (num_rows,), f"{name} must have shape ({num_rows},), got {ids.shape}")
    require(not num_rows or ids.dtype.kind in "iu", f"{name} must be integers, got {ids.dtype}")
    return ids.astype(np.int64)


def _unit_rows(embeddings: Any) -> Any:
    """Return the rows scaled to unit length, float64 (N, D), on the same device; rows of zeros stay zeros."""
    if _is_tensor(embeddings):
        # Apple's GPUs have no float64.
        rows = (embeddings.cpu() if embeddings.device.type == "mps" else embeddings).detach().double().clone()
    else:
        rows = np.array(embeddings, dtype=np.float64)
    require(rows.ndim == 2, f"embeddings must have shape (N, D), got {tuple(rows.shape)}")
    if 0 in rows.shape:
        return rows
    # The rows are processed in parts, since temporary copies of all rows would need too much memory.
    step = max(1, _BLOCK_ELEMENTS // rows.shape[1])
    parts = [rows[start : start + step] for start in range(0, len(rows), step)]
    num_broken = sum(int((~(abs(part) < math.inf)).any(1).sum()) for part in parts)  # also counts rows with NaN
    require(not num_broken, f"embeddings must be finite, but those of {num_broken} utterances are not")
    for part in parts:
        # Dividing by the largest value first prevents overflow and underflow of the squares.
        largest = abs(part).max(1)
        _divide_rows(part, getattr(largest, "values", largest))  # torch's max also returns the indices
        _divide_rows(part, (part * part).sum(1) ** 0.5)
    return rows


def _divide_rows(rows: Any, lengths: Any) -> None:
    lengths[lengths == 0] = 1.0
    rows /= lengths[:, None]


@dataclass(frozen=True, kw_only=True)
class _Ranges:
    """The excluded candidates of each utterance, stored as a range of a sorted list.

    Attributes:
        order: (M,) indices into the list of candidates, in sorted order.
        first, stop: (N,) the range ``order[first:stop]`` of each utterance; empty if ``stop <= first``.
        starts, ends: (N,) starts of the utterances and (M,) ends of the candidates. If given, only candidates of the
            range that end after the start of the utterance are excluded.
    """

    order: _IndexArray
    first: _IndexArray
    stop: _IndexArray
    starts: _IndexArray | None = None
    ends: _IndexArray | None = None

    def pairs(self, block: slice) -> tuple[_IndexArray, _IndexArray]:
        """Return the excluded pairs of a block, as arrays of rows in the block and of indices of candidates."""
        first = self.first[block]
        counts = np.maximum(self.stop[block] - first, 0)
        row = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        candidate = self.order[first[row] + within]
        if self.starts is None or self.ends is None:
            return row, candidate
        meant = self.ends[candidate] > self.starts[block][row]
        return row[meant], candidate[meant]


def _exclusions(
    seconds: NDArray[np.float64],
    columns: _IndexArray,
    recordings: ArrayLike | None,
    offsets: ArrayLike | None,
    texts: ArrayLike | None,
    contents: ArrayLike | None,
) -> list[_Ranges]:
    """Collect the excluded candidates: the utterance itself, overlapping segments, the same text, and copies."""
    num_rows = len(seconds)
    exclusions = [_same_ids(np.arange(num_rows), columns)]
    require(
        offsets is None or recordings is not None, "offsets have no effect without recordings: pass both or neither"
    )
    if recordings is not None:
        at = np.zeros(num_rows) if offsets is None else _times("offsets", offsets, num_rows, least=-math.inf)
        exclusions.append(_overlaps(_ids("recordings", recordings, num_rows), at, seconds, columns))
    if texts is not None:
        ids = _ids("texts", texts, num_rows)
        exclusions.append(_same_ids(ids, columns, applies=ids != -1))
    if contents is not None:
        exclusions.append(_same_ids(_ids("contents", contents, num_rows), columns))
    return exclusions


def _overlaps(
    recordings: _IndexArray, offsets: NDArray[np.float64], seconds: NDArray[np.float64], columns: _IndexArray
) -> _Ranges:
    """Find the candidates from the same recording that overlap each utterance in time."""
    num_rows = len(recordings)
    times = np.rint(np.concatenate([offsets, offsets + seconds]) * _MICROSECONDS)
    # Each integer encodes a recording and the rank of a time, so sorting by it sorts by recording and then by time.
    rank = np.unique(times, return_inverse=True)[1].reshape(-1).astype(np.int64)
    recording = np.unique(recordings, return_inverse=True)[1].reshape(-1).astype(np.int64) * (2 * num_rows)
    starts, ends = recording + rank[:num_rows], recording + rank[num_rows:]
    order = np.argsort(starts[columns], kind="stable")
    # In the order of their starts, candidates from `stop` on begin too late to overlap, and those before `first` end
    # too early. Some candidates in between overlap.
    latest_end = np.maximum.accumulate(ends[columns][order])
    first = np.searchsorted(latest_end, starts, side="right")
    stop = np.searchsorted(starts[columns][order], ends, side="left")
    return _Ranges(order=order, first=first, stop=stop, starts=starts, ends=ends[columns])


def _same_ids(ids: _IndexArray, columns: _IndexArray, applies: NDArray[np.bool_] | bool = True) -> _Ranges:
    """Find the candidates with the same id as each utterance; none for an utterance whose ``applies`` is False."""
    order = np.argsort(ids[columns], kind="stable")
    in_order = ids[columns][order]
    first = np.searchsorted(in_order, ids, side="left")
    stop = np.searchsorted(in_order, ids, side="right")
    return _Ranges(order=order, first=first, stop=np.where(applies, stop, first))


class _SharedWords:
    """Candidates that are excluded because they share too many words with an utterance.

    The overlap is the number of distinct words that both texts have, divided by the number of distinct words of the
    text with fewer. It is 0 if a text has no words.

    Args:
        words: distinct words of each of the N utterances, from ``number_words``.
        columns: (M,) indices of the candidates.
        limit: maximum overlap that is allowed.
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
        """Return the excluded pairs of a block, as arrays of rows in the block and of indices of candidates."""
        common = (self._rows[block] @ self._candidates).tocoo()
        row, candidate = common.coords
        fewer = np.minimum(self._sizes[block][row], self._candidate_sizes[candidate])
        excluded = common.data > self._limit * fewer + 1e-9
        return row[excluded], candidate[excluded]


def _best_candidates(
    units: Any,
    columns: _IndexArray,
    exclusions: Sequence[_Ranges | _SharedWords],
    most: float,
    num_best: int,
    block_size: int | None,
) -> tuple[_IndexArray, NDArray[np.float64]]:
    """Find the ``num_best`` most similar candidates of every utterance, best first.

    Args:
        units: (N, D) rows of unit length, an array or a tensor; products are computed on the tensor's device.
        most: maximum similarity, in steps of 2**-24.

    Returns:
        best: (N, K) int64 indices of utterances, K being at most ``num_best``.
        steps: (N, K) float64 similarities in whole steps of 2**-24; -inf if there are fewer candidates.
    """
    num_rows, num_columns = len(units), len(columns)
    num_best = max(1, min(num_best, num_columns))
    move = _mover(units)
    best, steps = move(np.full((num_rows, num_best), -1)), move(np.full((num_rows, num_best), -math.inf))
    if num_columns == 0:
        return _to_numpy(best), _to_numpy(steps)
    indices = move(columns)
    candidates = units if num_columns == num_rows else units[indices]
    if block_size is None:
        elements = _GPU_BLOCK_ELEMENTS if _is_tensor(units) and units.device.type != "cpu" else _BLOCK_ELEMENTS
        block_size = max(_MIN_BLOCK_ROWS, elements // num_columns)
    for start in range(0, num_rows, block_size):
        block = slice(start, min(start + block_size, num_rows))
        # Scaling by a power of two is exact.
        scores = (units[block] * _STEPS) @ candidates.T
        # Rounding in place avoids an allocation of memory for each block, which would cost more than the rounding.
        scores = scores.round_() if _is_tensor(scores) else np.rint(scores, out=scores)
        for exclusion in exclusions:
            row, candidate = exclusion.pairs(block)
            scores[move(row), move(candidate)] = -math.inf
        if most < _STEPS:
            scores[scores > most] = -math.inf
        each_row = move(np.arange(len(scores)))
        for place in range(num_best):
            at = scores.argmax(1)  # numpy and torch both return the first of equal maxima
            best[block, place], steps[block, place] = indices[at], scores[each_row, at]
            scores[each_row, at] = -math.inf
    return _to_numpy(best), _to_numpy(steps) + 0.0  # turns -0.0 into 0.0


def _mover(units: Any) -> Callable[[NDArray[Any]], Any]:
    """Return a function that moves numpy arrays to the device of the embeddings; no change if these are an array."""
    if not _is_tensor(units):
        return lambda array: array
    from torch import from_numpy

    return lambda array: from_numpy(np.ascontiguousarray(array)).to(units.device)
