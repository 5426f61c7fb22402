"""Buckets for batches of cuts of similar length, in one dimension (length) or two (length and text tokens).

One dimension is ``lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`` itself. Two dimensions follow
NeMo's ``scripts/speech_recognition/estimate_duration_bins_2d.py``, which has the same rule for both: walk through the
sorted values and begin a new bucket as soon as the one before has more than its share of the total.

``sharmill.training.buckets.report`` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sharmill.errors import ConfigError
from sharmill.training.buckets.lengths import Lengths

_DECIMALS = 3


@dataclass(frozen=True)
class Bin:
    """The upper bounds of a bucket of two dimensions, and the most tokens per second (or frame) of what it takes."""

    length: float
    tokens: int
    max_ratio: float


def estimate_bins(lengths: np.ndarray, num_buckets: int) -> list[float]:
    """Return the longest of each bucket but the last, ascending: at most ``num_buckets - 1`` lengths, as lhotse does.

    (Its docstring has them as the shortest of the next bucket; its samplers put what is equal into the bucket below.)

    Raises:
        ConfigError: there are fewer than two buckets, or fewer cuts than buckets.
    """
    from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets

    _check(lengths, num_buckets)
    found = estimate_duration_buckets(lengths, num_buckets, constraint=_Itself())
    return [value.item() for value in found]


class _Itself:
    """A sampling constraint that measures numbers instead of cuts."""

    def measure_length(self, length: float) -> float:
        return length


def estimate_bins_2d(
    lengths: np.ndarray, tokens: np.ndarray, num_buckets: int, num_sub_buckets: int, outlier_threshold: float = 4.0
) -> list[Bin]:
    """Return the buckets by length, each divided by number of tokens, in ascending order.

    What is exactly as long as a bound counts below it, where loaders put it; NeMo counts it above, and its loader then
    leaves out what has too many tokens for the bucket below. Cuts whose ratio of tokens to length lies more than
    ``outlier_threshold`` standard deviations above the mean of their bucket are left out; ``max_ratio`` is the largest
    of the others. Buckets that would end at the same length are one, with as many more sub-buckets. Bounds of seconds
    are rounded to 3 decimals, but upwards: the last one must take the longest cut.

    Raises:
        ConfigError: there are fewer than two buckets, no sub-bucket, or fewer cuts than buckets.
    """
    _check(lengths, num_buckets)
    if num_sub_buckets < 1:
        raise ConfigError(f"{num_sub_buckets} sub-buckets; there must be at least 1", code="bad_config_value")
    order = np.lexsort((tokens, lengths))
    lengths, tokens = lengths[order], tokens[order]
    begins = _begins(lengths, num_buckets)
    bounds = [round_up(lengths[index].item(), _DECIMALS) for index in [*begins, -1]]
    # A loader puts into a bucket whatever is not longer than its bound: its limits of tokens must be made for all that.
    ends = np.searchsorted(lengths, bounds, side="right").tolist()
    bins: list[Bin] = []
    begin, share = 0, 1
    for number, (bound, end) in enumerate(zip(bounds, ends, strict=True)):
        if bound in bounds[number + 1 : number + 2]:
            share += 1
            continue
        bins += _divide(bound, lengths[begin:end], tokens[begin:end], num_sub_buckets * share, outlier_threshold)
        begin, share = end, 1
    return bins


def _divide(bound: float, lengths: np.ndarray, tokens: np.ndarray, parts: int, threshold: float) -> list[Bin]:
    ratios = ratios_of(tokens, lengths)
    kept = _no_outliers(ratios, threshold)
    sorted_tokens = np.sort(tokens[kept])
    max_ratio = float(ratios[kept].max())
    bounds = [*sorted_tokens[_begins(sorted_tokens, parts)], sorted_tokens[-1]]
    return [Bin(bound, int(tokens_bound), max_ratio) for tokens_bound in bounds]


def max_ratio_of(lengths: np.ndarray, tokens: np.ndarray, outlier_threshold: float = 4.0) -> float:
    """Return the largest ratio of tokens to length that is no outlier among all cuts."""
    return largest_usual(ratios_of(tokens, lengths), outlier_threshold)


def ratios_of(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return tokens per length (N,); per token where text has no input, and the length is 0."""
    ratios: np.ndarray = tokens / np.where(lengths > 0, lengths, 1)
    return ratios


def largest_usual(ratios: np.ndarray, outlier_threshold: float) -> float:
    """Return the largest ratio that is no outlier."""
    return float(ratios[_no_outliers(ratios, outlier_threshold)].max())


def _no_outliers(ratios: np.ndarray, threshold: float) -> np.ndarray:
    """Return a mask (N,) of those that are not too high; low ones never hurt."""
    return ratios - ratios.mean() <= threshold * ratios.std()


def _begins(sizes: np.ndarray, num_parts: int) -> list[int]:
    """Return the begin of each part but the first of sorted sizes: a part ends when it has more than its share."""
    before = np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
    share = before[-1] / num_parts
    begins: list[int] = []
    begin = 0
    while (begin := int(np.searchsorted(before, before[begin] + share, side="right"))) < len(sizes):
        begins.append(begin)
    return begins


def _check(lengths: np.ndarray, num_buckets: int) -> None:
    if num_buckets < 2:
        raise ConfigError(f"{num_buckets} buckets; there must be at least 2", code="bad_config_value")
    if num_buckets > len(lengths):
        raise ConfigError(
            f"{num_buckets} buckets are more than the {len(lengths)} cuts; ask for fewer with -b", code="too_few_cuts"
        )


def round_up(value: float, decimals: int) -> float:
    """Round, but never below ``value`` as ``round`` may.

    >>> round_up(1.2341, 3), round_up(1.234, 3)
    (1.235, 1.234)
    """
    rounded = round(value, decimals)
    return rounded if rounded >= value else round(rounded + 10.0**-decimals, decimals)


def assign(lengths: Lengths, bins: list[float] | list[Bin], *, closed: bool) -> np.ndarray:
    """Return the bucket of each cut (N,), -1 for those that a loader would drop.

    Args:
        closed: there is no bucket for what is longer than the last bin, as with ``bucket_batch_size`` in NeMo.
    """
    if not isinstance(bins[0], Bin):
        index = np.searchsorted(np.array(bins), lengths.lengths, side="left")
        return np.where(index < len(bins) + (not closed), index, -1)
    assert lengths.tokens is not None
    two = [bound for bound in bins if isinstance(bound, Bin)]
    bounds = np.array([bound.length for bound in two])
    # Of equal lengths the first; the tokens choose among them.
    first = np.searchsorted(bounds, lengths.lengths, side="left")
    result = np.full(len(first), -1)
    for begin in np.unique(first[first < len(two)]):
        end = int(np.searchsorted(bounds, bounds[begin], side="right"))
        members = np.flatnonzero(first == begin)
        tokens = lengths.tokens[members]
        index = begin + np.searchsorted([bound.tokens for bound in two[begin:end]], tokens, side="left")
        ratio = round_up(two[begin].max_ratio, 2)
        fits = (index < end) & (ratios_of(tokens, lengths.lengths[members]) <= ratio)
        result[members] = np.where(fits, index, -1)
    return result
