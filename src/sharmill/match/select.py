"""Selection of the context of every utterance of a speaker group: numbers in, indices out.

Knows nothing of audio, manifests or encoders. The rule is the one of NeMo's
``extend_nemo_manifest_with_context_audio.py`` (normalise, sort every row of the similarity matrix, walk down
until a candidate survives), with more limits, and computed as a masked argmax over blocks of rows of the
matrix product, so that the N x N matrix never exists.

Similarities are compared as whole multiples of 2**-24, the spacing of float32 just below 1, after a product
in float64. The noise of the product (about 1e-16) depends on where a row lies in a block, on the library and
on the device, and without the rounding it would decide between equal candidates. A fixed step rather than
float32 itself, because float32 keeps that noise where a similarity is near 0.
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

_STEPS: Final = 2.0**24  # similarity steps per unit: every multiple of 2**-24 in [-1, 1] is exact in float32
_BLOCK_ELEMENTS: Final = 2**21  # 16 MiB of float64: stays in the cache, yet enough for a fast product
_GPU_BLOCK_ELEMENTS: Final = 2**27  # 1 GiB: few launches, each long enough
_MIN_BLOCK_ROWS: Final = 64  # the candidates are read from memory once per block
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
    """Pick for every utterance the most similar other utterance that may be its context.

    A candidate lasts from ``min_duration`` to ``max_duration`` seconds, is not the utterance itself, does not
    overlap it in the same recording, has another text (where ``texts`` are given), is no copy of it (where
    ``contents`` are given), shares no more than ``max_text_overlap`` of the words, and is no more similar than
    ``max_similarity``. Of equally similar ones the first wins.

    Args:
        embeddings: (N, D), of any scale; a row of zeros has similarity 0 with everything. A numpy array,
            or a torch tensor on any device, where the product is then computed.
        durations: (N,) seconds.
        min_similarity: the least cosine similarity; a similarity that equals it is enough.
        recordings: (N,) integer ids; without them no two utterances share a recording.
        offsets: (N,) seconds from the start of the recording, 0 by default. Segments that touch do not
            overlap; times are rounded to microseconds, so that 0.1 + 0.2 touches 0.3.
        texts: (N,) integer ids; -1 stands for no text, which equals no other.
        contents: (N,) integer ids; utterances of one id have the same samples.
        candidates: (N,) booleans, False for utterances that are nobody's context; all may be one by default.
        words: of each utterance, as ``number_words`` makes them; with ``max_text_overlap``, the greatest share of the
            distinct words of the shorter text that the other may have as well.
        max_similarity: the greatest cosine similarity, against copies whose samples differ a little; a similarity
            that equals it is allowed.
        choice: "best", or "sample" for a seeded draw among the ``sample_size`` best that satisfy all limits.
        block_size: rows per block; changes memory and speed, never the result.

    Returns:
        index: (N,) int64, the context of each utterance, -1 for none.
        similarity: (N,) float32, that of the context. Where there is none: that of the best candidate, which
            is below ``min_similarity``, or -inf if no utterance satisfies the other limits.
        Both of the kind of ``embeddings``; tensors are on the CPU.

    Raises:
        ValueError: shapes that do not agree, embeddings or times that are not finite, an option out of range.

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

    least = max(np.rint(min_similarity * _STEPS), -_STEPS)  # -inf stands for none, and is never enough
    num_enough = (steps >= least).sum(axis=1)
    # One draw per utterance, made here for all of them: it cannot depend on the blocks.
    draws = np.random.default_rng(seed).random(num_rows) if choice == "sample" else np.zeros(num_rows)
    pick = (draws * num_enough).astype(np.int64)
    rows = np.arange(num_rows)
    index = np.where(num_enough > 0, best[rows, pick], -1)
    similarity = (steps[rows, pick] / _STEPS).astype(np.float32)
    return _like(embeddings, index), _like(embeddings, similarity)


def number_words(texts: Iterable[str]) -> list[_IndexArray]:
    """Return the distinct words of each text as numbers, equal ones for equal words; case and punctuation aside.

    >>> [words.tolist() for words in number_words(["Go, go on!", "on we go", ""])]
    [[0, 1], [0, 1, 2], []]
    """
    numbers: dict[str, int] = {}
    found = ({numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text.lower())} for text in texts)
    return [np.array(sorted(words), dtype=np.int64) for words in found]


def _is_tensor(values: Any) -> bool:
    """Return True for a torch tensor; asking so needs no import of torch."""
    return hasattr(values, "detach")


def _like(embeddings: Any, result: NDArray[Any]) -> Any:
    """Return the result as what the embeddings are: a numpy array, or a tensor (on the CPU)."""
    if not _is_tensor(embeddings):
        return result
    from torch import from_numpy

    return from_numpy(result)


def _to_numpy(values: Any, dtype: Any = None) -> NDArray[Any]:
    """Make a numpy array of a sequence, an array or a tensor on any device."""
    if _is_tensor(values):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values, dtype=dtype)


def _times(name: str, values: ArrayLike, num_rows: int, least: float) -> NDArray[np.float64]:
    """Return ``values`` as (num_rows,) float64 seconds; raise ValueError if they are not finite or below ``least``."""
    seconds = _to_numpy(values, np.float64)
    require(seconds.shape == (num_rows,), f"{name} must have shape ({num_rows},), got {seconds.shape}")
    require(bool(np.isfinite(seconds).all() and (seconds >= least).all()), f"{name} must be finite, at least {least} s")
    return seconds


def _ids(name: str, values: ArrayLike, num_rows: int) -> _IndexArray:
    """Return ``values`` as (num_rows,) integers; raise ValueError if they are anything else."""
    ids = _to_numpy(values)
    require(ids.shape == (num_rows,), f"{name} must have shape ({num_rows},), got {ids.shape}")
    require(not num_rows or ids.dtype.kind in "iu", f"{name} must be integers, got {ids.dtype}")
    return ids.astype(np.int64)


def _unit_rows(embeddings: Any) -> Any:
    """Return the rows scaled to unit length, (N, D) float64, where the embeddings are; rows of zeros stay zeros."""
    if _is_tensor(embeddings):
        # Apple's GPUs have no float64.
        rows = (embeddings.cpu() if embeddings.device.type == "mps" else embeddings).detach().double().clone()
    else:
        rows = np.array(embeddings, dtype=np.float64)
    require(rows.ndim == 2, f"embeddings must have shape (N, D), got {tuple(rows.shape)}")
    if 0 in rows.shape:
        return rows
    # In pieces, since a copy of all rows would be half as large again as what is returned.
    step = max(1, _BLOCK_ELEMENTS // rows.shape[1])
    parts = [rows[start : start + step] for start in range(0, len(rows), step)]
    num_broken = sum(int((~(abs(part) < math.inf)).any(1).sum()) for part in parts)  # NaN is not less
    require(not num_broken, f"embeddings must be finite; those of {num_broken} utterances are not")
    for part in parts:
        # Dividing by the largest value first keeps the squares of huge and of tiny values in range.
        largest = abs(part).max(1)
        _divide_rows(part, getattr(largest, "values", largest))  # torch's max has the places too
        _divide_rows(part, (part * part).sum(1) ** 0.5)
    return rows


def _divide_rows(rows: Any, lengths: Any) -> None:
    lengths[lengths == 0] = 1.0
    rows /= lengths[:, None]


@dataclass(frozen=True, kw_only=True)
class _Ranges:
    """The candidates that each utterance must not get: a range, in an order that makes them neighbours.

    Attributes:
        order: (M,) candidates, as positions in the list of all candidates.
        first, stop: (N,) the range ``order[first:stop]`` of each utterance; empty where ``stop <= first``.
        starts, ends: (N,) and (M,), or None: of the range, only candidates whose end lies after the start of
            the utterance are meant.
    """

    order: _IndexArray
    first: _IndexArray
    stop: _IndexArray
    starts: _IndexArray | None = None
    ends: _IndexArray | None = None

    def pairs(self, block: slice) -> tuple[_IndexArray, _IndexArray]:
        """Return the excluded pairs of a block: row in the block, position among the candidates."""
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
    """Collect what must not be picked: the utterance itself, what overlaps it, the same text, the same samples."""
    num_rows = len(seconds)
    exclusions = [_same_ids(np.arange(num_rows), columns)]
    require(offsets is None or recordings is not None, "offsets mean nothing without recordings: pass both or neither")
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
    """Find the candidates of the same recording that overlap each utterance in time."""
    num_rows = len(recordings)
    times = np.rint(np.concatenate([offsets, offsets + seconds]) * _MICROSECONDS)
    # Recording and rank of the time in one integer: order by recording, then by time, without overflow.
    rank = np.unique(times, return_inverse=True)[1].reshape(-1).astype(np.int64)
    recording = np.unique(recordings, return_inverse=True)[1].reshape(-1).astype(np.int64) * (2 * num_rows)
    starts, ends = recording + rank[:num_rows], recording + rank[num_rows:]
    order = np.argsort(starts[columns], kind="stable")
    # In order of start: from `stop` on all begin too late, before `first` all have ended; between them, some.
    latest_end = np.maximum.accumulate(ends[columns][order])
    first = np.searchsorted(latest_end, starts, side="right")
    stop = np.searchsorted(starts[columns][order], ends, side="left")
    return _Ranges(order=order, first=first, stop=stop, starts=starts, ends=ends[columns])


def _same_ids(ids: _IndexArray, columns: _IndexArray, applies: NDArray[np.bool_] | bool = True) -> _Ranges:
    """Find the candidates with the id of each utterance; none for an utterance to which this does not apply."""
    order = np.argsort(ids[columns], kind="stable")
    in_order = ids[columns][order]
    first = np.searchsorted(in_order, ids, side="left")
    stop = np.searchsorted(in_order, ids, side="right")
    return _Ranges(order=order, first=first, stop=np.where(applies, stop, first))


class _SharedWords:
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


def _best_candidates(
    units: Any,
    columns: _IndexArray,
    exclusions: Sequence[_Ranges | _SharedWords],
    most: float,
    num_best: int,
    block_size: int | None,
) -> tuple[_IndexArray, NDArray[np.float64]]:
    """Find the ``num_best`` most similar candidates of every utterance, best first, none above ``most`` steps.

    Args:
        units: (N, D) rows of unit length, an array or a tensor on any device, where the product is then computed.

    Returns:
        best: (N, K) int64 utterances, K = 1 or at most ``num_best``.
        steps: (N, K) float64 similarities in whole steps of 2**-24; -inf where there are no more candidates.
    """
    num_rows, num_columns = len(units), len(columns)
    num_best = max(1, min(num_best, num_columns))
    move = _mover(units)
    best, steps = move(np.full((num_rows, num_best), -1)), move(np.full((num_rows, num_best), -math.inf))
    if num_columns == 0:
        return _to_numpy(best), _to_numpy(steps)
    there = move(columns)
    candidates = units if num_columns == num_rows else units[there]
    if block_size is None:
        elements = _GPU_BLOCK_ELEMENTS if _is_tensor(units) and units.device.type != "cpu" else _BLOCK_ELEMENTS
        block_size = max(_MIN_BLOCK_ROWS, elements // num_columns)
    for start in range(0, num_rows, block_size):
        block = slice(start, min(start + block_size, num_rows))
        # A power of two scales the product exactly.
        scores = (units[block] * _STEPS) @ candidates.T
        scores = (
            scores.round_() if _is_tensor(scores) else np.rint(scores, out=scores)
        )  # in place: memory that is new for each block costs more than the rounding
        for exclusion in exclusions:
            row, candidate = exclusion.pairs(block)
            scores[move(row), move(candidate)] = -math.inf
        if most < _STEPS:
            scores[scores > most] = -math.inf
        each_row = move(np.arange(len(scores)))
        for place in range(num_best):
            at = scores.argmax(1)  # numpy and torch both promise the first of equal ones
            best[block, place], steps[block, place] = there[at], scores[each_row, at]
            scores[each_row, at] = -math.inf
    return _to_numpy(best), _to_numpy(steps) + 0.0  # no -0.0


def _mover(units: Any) -> Callable[[NDArray[Any]], Any]:
    """Return a function that takes numpy arrays to where the embeddings are: nowhere, or to a torch device."""
    if not _is_tensor(units):
        return lambda array: array
    from torch import from_numpy

    return lambda array: from_numpy(np.ascontiguousarray(array)).to(units.device)
