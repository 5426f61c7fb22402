"""Buckets for batches of cuts of similar length, in one dimension (length) or two (length and text tokens).

One dimension is ``lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`` itself. Two dimensions follow
NeMo's ``scripts/speech_recognition/estimate_duration_bins_2d.py``, which has the same rule for both: walk through the
sorted values and begin a new bucket as soon as the one before has more than its share of the total.

The report of ``sharmill bins`` is a YAML file: a histogram as comments, then the keys for NeMo's loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sharmill.errors import ConfigError
from sharmill.shar.index import read_dataset
from sharmill.shar.layout import DATASET_FILE
from sharmill.training.buckets.lengths import Lengths, read_lengths

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
    ratios = tokens / lengths
    kept = _no_outliers(ratios, threshold)
    sorted_tokens = np.sort(tokens[kept])
    max_ratio = float(ratios[kept].max())
    bounds = [*sorted_tokens[_begins(sorted_tokens, parts)], sorted_tokens[-1]]
    return [Bin(bound, int(tokens_bound), max_ratio) for tokens_bound in bounds]


def max_ratio_of(lengths: np.ndarray, tokens: np.ndarray, outlier_threshold: float = 4.0) -> float:
    """Return the largest ratio of tokens to length that is no outlier among all cuts."""
    ratios = tokens / lengths
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
        fits = (index < end) & (tokens / lengths.lengths[members] <= ratio)
        result[members] = np.where(fits, index, -1)
    return result


def _count_buckets(bins: list[float] | list[Bin], *, closed: bool) -> int:
    """Count the buckets that the bins make."""
    return len(bins) if closed or isinstance(bins[0], Bin) else len(bins) + 1


_BAR = 40
_AnyBin = TypeVar("_AnyBin", float, Bin)


@dataclass(frozen=True, kw_only=True)
class BinsOptions:
    """Options of the estimate.

    ``sub_buckets`` makes two dimensions. ``seconds_per_frame`` counts audio in frames of this many seconds, which NeMo
    calls tokens. ``closed`` ends one dimension with the longest cut, as ``bucket_batch_size`` needs it.
    """

    num_buckets: int = 30
    sub_buckets: int | None = None
    seconds_per_frame: float | None = None
    closed: bool = False
    outlier_threshold: float = 4.0


def estimate_report(
    datasets: Sequence[str | Path],
    options: BinsOptions,
    *,
    tokenizer: Sequence[str] = (),
    token_bins: bool = False,
    **reading: Any,
) -> str:
    """Read the cuts of the datasets and describe their bins.

    Args:
        tokenizer: names of tokenizers; see ``load_tokenizers``.
        token_bins: count audio in frames; of the datasets' codec, unless the options say how long they are.
        reading: further options of ``read_lengths``.

    Raises:
        ConfigError: the options do not go together, or see ``read_lengths``.
    """
    if options.sub_buckets is not None and not tokenizer:
        raise ConfigError(
            "sub-buckets are made by number of text tokens: name a --tokenizer, such as 'bytes'",
            code="bad_config_value",
        )
    if token_bins and options.seconds_per_frame is None:
        options = replace(options, seconds_per_frame=_frame_shift([Path(dataset) for dataset in datasets]))
    return report_bins(read_lengths(datasets, tokenizer=tokenizer, **reading), options)


def _frame_shift(datasets: Sequence[Path]) -> float:
    # A Shar of another tool does not say what its codes are.
    known = [read_dataset(dataset) for dataset in datasets if (dataset / DATASET_FILE).exists()]
    codecs = [codec for dataset in known for codec in dataset.codecs]
    shifts = {codec.samples_per_frame / codec.sampling_rate for codec in codecs}
    if len(shifts) != 1:
        names = ", ".join(codec.name for codec in codecs) or "none"
        raise ConfigError(
            f"the codecs are {names}: say how long a frame is with --token-equivalent-duration", code="unknown_codec"
        )
    return shifts.pop()


def report_bins(lengths: Lengths, options: BinsOptions) -> str:
    """Estimate the bins and describe them.

    Raises:
        ConfigError: buckets by number of tokens are asked for, and no cut has a text; or see ``estimate_bins``.
    """
    frames = options.seconds_per_frame
    in_total = frames is not None and options.sub_buckets is None and lengths.tokens is not None
    counted = lengths if frames is None else lengths.in_frames(frames)
    shown = counted.in_total() if in_total else counted
    bins: list[float] | list[Bin]
    if options.sub_buckets is None:
        found = estimate_bins(shown.lengths, options.num_buckets)
        longest = shown.lengths.max().item()
        if not found or (options.closed and found[-1] < longest):
            found.append(longest)
        bins = _distinct(found)
    else:
        if counted.tokens is None:
            raise ConfigError(
                "sub-buckets are made by number of text tokens, and no cut has a text: leave them out",
                code="too_few_cuts",
            )
        two = estimate_bins_2d(
            counted.lengths, counted.tokens, options.num_buckets, options.sub_buckets, options.outlier_threshold
        )
        bins = _distinct(two)
    closed = options.closed or options.sub_buckets is not None
    lines = [
        *_summary(lengths),
        *_histogram(shown, bins, closed=closed),
        "use_bucketing: true",
        f"num_buckets: {_count_buckets(bins, closed=closed)}",
        f"bucket_duration_bins: {[[b.length, b.tokens] if isinstance(b, Bin) else b for b in bins]}",
    ]
    if options.sub_buckets is None and not closed:
        lines.append(f"# bucket_batch_size needs a bin for the longest as well (--closed): {longest}")
    if frames is not None:
        lines += ["use_multimodal_sampling: true", f"token_equivalent_duration: {frames!r}"]
        lines.append(f"measure_total_length: {str(in_total).lower()}")
    lines += _max_ratio(counted, bins, options, "max_tps" if frames is None else "max_tpt")
    return "\n".join(lines) + "\n"


def _distinct(bins: list[_AnyBin]) -> list[_AnyBin]:
    """Leave out those that are as the one before, in which there is never a cut: a common length may end several."""
    return [bound for number, bound in enumerate(bins) if number == 0 or bound != bins[number - 1]]


def _summary(lengths: Lengths) -> Iterator[str]:
    yield f"# {len(lengths.lengths):,} cuts, {lengths.hours:,.2f} hours"
    if lengths.num_discarded:
        yield f"# left out for their duration: {lengths.num_discarded:,}"
    for name, values in (("seconds", lengths.seconds), ("tokens", lengths.tokens)):
        if values is not None:
            points = np.percentile(values, [0, 25, 50, 75, 95, 99, 100])
            names = ("shortest", "25 %", "median", "75 %", "95 %", "99 %", "longest")
            yield f"# {name}: " + ", ".join(f"{n} {p:.2f}" for n, p in zip(names, points, strict=True))
    if lengths.without_text and lengths.tokens is None:
        yield "# no cut has a text: there are no limits of tokens"
    elif lengths.without_text:
        yield f"# without a text, counted as 0 tokens: {lengths.without_text:,}"


def _histogram(lengths: Lengths, bins: list[float] | list[Bin], *, closed: bool) -> Iterator[str]:
    """Yield one line per bucket: its end, tokens in two dimensions, cuts, hours, and a bar of its hours."""
    num_buckets = _count_buckets(bins, closed=closed)
    buckets = assign(lengths, bins, closed=closed)
    hours = [float(lengths.seconds[buckets == number].sum()) / 3600 for number in range(num_buckets)]
    limits = [f"{'up to':>10}", f"{'tokens':>8}"] if isinstance(bins[0], Bin) else [f"{'up to':>10}"]
    yield f"# {' '.join(limits)} {'cuts':>12} {'hours':>10}"
    for number in range(num_buckets):
        bound = bins[number] if number < len(bins) else None
        if isinstance(bound, Bin):
            limits = [f"{_number(bound.length):>10}", f"{bound.tokens:>8}"]
        else:
            limits = [f"{_number(bound):>10}"]
        bar = "#" * round(_BAR * hours[number] / max(hours)) if max(hours) else ""
        count = (buckets == number).sum()
        yield f"# {' '.join(limits)} {count:>12,} {hours[number]:>10.2f} {bar}".rstrip()
    if dropped := int((buckets < 0).sum()):
        yield f"# left out by a loader with these limits, for too many tokens: {dropped:,}"


def _number(length: float | None) -> str:
    """Format seconds or frames; nothing where a bucket has no end."""
    return f"{length:.3f}" if isinstance(length, float) else str(length or "")


def _max_ratio(lengths: Lengths, bins: list[float] | list[Bin], options: BinsOptions, key: str) -> Iterator[str]:
    two = [bound for bound in bins if isinstance(bound, Bin)]
    if two:
        yield f"{key}: [{', '.join(repr(round_up(bound.max_ratio, 2)) for bound in two)}]"
    elif lengths.tokens is not None and options.seconds_per_frame is None:
        yield f"{key}: {round_up(max_ratio_of(lengths.lengths, lengths.tokens, options.outlier_threshold), 2)!r}"
