"""The report of ``sharmill bins``: a histogram as comments, then the keys for NeMo's loader, together a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sharmill.errors import ConfigError
from sharmill.shar.index import read_dataset
from sharmill.shar.layout import DATASET_FILE
from sharmill.training.buckets.bins import (
    Bin,
    assign,
    close,
    estimate_bins,
    estimate_bins_2d,
    max_ratio_of,
    num_buckets_of,
    round_up,
)
from sharmill.training.buckets.lengths import Lengths, read_lengths

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
        bins = _distinct(close(found, shown.lengths) if options.closed or not found else found)
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
    lines = [*_summary(lengths), *_histogram(shown, bins, closed=closed), *_keys(bins, closed=closed)]
    if options.sub_buckets is None and not closed:
        longest = shown.lengths.max().item()
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
    num_buckets = num_buckets_of(bins, closed=closed)
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


def _keys(bins: list[float] | list[Bin], *, closed: bool) -> Iterator[str]:
    values = [f"[{b.length!r}, {b.tokens}]" if isinstance(b, Bin) else repr(b) for b in bins]
    yield "use_bucketing: true"
    yield f"num_buckets: {num_buckets_of(bins, closed=closed)}"
    yield f"bucket_duration_bins: [{', '.join(values)}]"


def _max_ratio(lengths: Lengths, bins: list[float] | list[Bin], options: BinsOptions, key: str) -> Iterator[str]:
    two = [bound for bound in bins if isinstance(bound, Bin)]
    if two:
        yield f"{key}: [{', '.join(repr(round_up(bound.max_ratio, 2)) for bound in two)}]"
    elif lengths.tokens is not None and options.seconds_per_frame is None:
        yield f"{key}: {round_up(max_ratio_of(lengths.lengths, lengths.tokens, options.outlier_threshold), 2)!r}"
