"""Buckets for batches of cuts of similar length, in one dimension (length) or two (length and text tokens).

One dimension is ``lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`` itself. Two dimensions follow
NeMo's ``scripts/speech_recognition/estimate_duration_bins_2d.py``, which has the same rule for both: walk through the
sorted values and begin a new bucket as soon as the one before has more than its share of the total.

The report of ``sharmill bins`` has a histogram as comments, then the keys for NeMo's loader, as YAML.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np

from sharmill.errors import ConfigError, refuse
from sharmill.registry import require_package
from sharmill.shar.index import open_directory
from sharmill.training.buckets.batch_size import Bucket
from sharmill.training.buckets.lengths import BinsOptions, Lengths, frame_shift, is_dataset, read_lengths

_DECIMALS: Final = 3
_BAR_WIDTH: Final = 40
_PERCENTILES: Final = {"least": 0, "25 %": 25, "median": 50, "75 %": 75, "95 %": 95, "99 %": 99, "most": 100}


def estimate_bins(lengths: np.ndarray, num_buckets: int) -> list[float]:
    """Return the longest of each bucket but the last, ascending: at most ``num_buckets - 1`` lengths, as lhotse does.

    (Its docstring has them as the shortest of the next bucket; its samplers put what is equal into the bucket below.)

    Raises:
        ConfigError: there are fewer than two buckets, or fewer cuts than buckets.
    """
    from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets

    _check(lengths, num_buckets)
    numbers = SimpleNamespace(measure_length=lambda length: length)
    return [value.item() for value in estimate_duration_buckets(lengths, num_buckets, constraint=numbers)]


def estimate_bins_2d(
    lengths: np.ndarray, tokens: np.ndarray, num_buckets: int, num_sub_buckets: int, outlier_threshold: float = 4.0
) -> list[Bucket]:
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
    refuse((num_sub_buckets < 1, f"{num_sub_buckets} sub-buckets; there must be at least 1"))
    order = np.lexsort((tokens, lengths))
    lengths, tokens = lengths[order], tokens[order]
    begins = _begins(lengths, num_buckets)
    bounds = [round_up(lengths[index].item(), _DECIMALS) for index in [*begins, -1]]
    # A loader puts into a bucket whatever is not longer than its bound: its limits of tokens must be made for all that.
    ends = np.searchsorted(lengths, bounds, side="right").tolist()
    bins: list[Bucket] = []
    begin, share = 0, 1
    for number, (bound, end) in enumerate(zip(bounds, ends, strict=True)):
        if bound in bounds[number + 1 : number + 2]:
            share += 1
            continue
        ratios = ratios_of(tokens[begin:end], lengths[begin:end])
        kept = _no_outliers(ratios, outlier_threshold)
        counts = np.sort(tokens[begin:end][kept])
        most = [*counts[_begins(counts, num_sub_buckets * share)], counts[-1]]
        bins += [Bucket(bound, int(num_tokens), float(ratios[kept].max())) for num_tokens in most]
        begin, share = end, 1
    return bins


def ratios_of(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return tokens per length (N,); per token where text has no input, and the length is 0."""
    return tokens / np.where(lengths > 0, lengths, 1)


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
    refuse((num_buckets < 2, f"{num_buckets} buckets; there must be at least 2"))
    too_many = f"{num_buckets} buckets are more than the {len(lengths)} cuts; ask for fewer with -b"
    refuse((num_buckets > len(lengths), too_many), code="too_few_cuts")


def round_up(value: float, decimals: int) -> float:
    """Round, but never below ``value`` as ``round`` may.

    >>> round_up(1.2341, 3), round_up(1.234, 3)
    (1.235, 1.234)
    """
    rounded = round(value, decimals)
    return rounded if rounded >= value else round(rounded + 10.0**-decimals, decimals)


def assign(lengths: Lengths, bins: Sequence[Bucket], *, closed: bool) -> np.ndarray:
    """Return the bucket of each cut (N,), -1 for those that a loader would drop.

    Args:
        closed: there is no bucket for what is longer than the last bin, as with ``bucket_batch_size`` in NeMo.
    """
    bounds = np.array([bound.length for bound in bins])
    # The first of equal lengths; the tokens choose among them.
    first = np.searchsorted(bounds, lengths.lengths, side="left")
    if bins[0].num_tokens is None:
        return np.where(first < len(bins) + (not closed), first, -1)
    assert lengths.tokens is not None
    result = np.full(len(first), -1)
    for begin in np.unique(first[first < len(bins)]):
        end = int(np.searchsorted(bounds, bounds[begin], side="right"))
        members = np.flatnonzero(first == begin)
        tokens = lengths.tokens[members]
        index = begin + np.searchsorted([bound.num_tokens or 0 for bound in bins[begin:end]], tokens, side="left")
        ratio = round_up(bins[begin].max_ratio, 2)
        fits = (index < end) & (ratios_of(tokens, lengths.lengths[members]) <= ratio)
        result[members] = np.where(fits, index, -1)
    return result


def estimate_report(sources: Sequence[str | Path], options: BinsOptions) -> str:
    """Read the lengths of the data and describe their bins.

    Args:
        sources: folders or URLs of datasets; or manifests, files of text, a YAML file of ``input_cfg`` or of a
            training, or a list of manifests with weights.

    Raises:
        ConfigError: the options do not go together, or the data cannot be read.
    """
    refuse(
        (options.sub_buckets is not None and not options.tokenizer,
         "sub-buckets are made by number of text tokens: name a --tokenizer, such as 'bytes'"),
    )  # fmt: skip
    refuse(
        (options.prompt is not None and options.prompt_format is None, "--prompt belongs to a --prompt-format"),
        (options.prompt_format is not None and not options.tokenizer, "--prompt-format needs a --tokenizer"),
        code="bad_usage",
    )
    texts = [str(source) for source in sources]
    if options.prompt_format is None and all(map(is_dataset, texts)):
        if options.token_bins and options.seconds_per_frame is None:
            options = replace(options, seconds_per_frame=frame_shift([open_directory(text) for text in texts]))
        lengths = read_lengths(
            texts, tokenizer=options.tokenizer, min_duration=options.min_duration, max_duration=options.max_duration,
            workers=options.workers,
        )  # fmt: skip
        if options.seconds_per_frame is not None:
            # NeMo counts audio in tokens so: every begun frame is one.
            frames = np.ceil(lengths.seconds / options.seconds_per_frame).astype(np.int64)
            lengths = replace(lengths, lengths=frames, in_tokens=True)
        return report_bins(lengths, options)
    require_package("nemo")
    from sharmill.training.buckets.mixture import read_mixture

    lengths, settings = read_mixture(texts, options)
    frame, prompt_format = settings.get("token_equivalent_duration"), settings.get("prompt_format")
    options = replace(options, seconds_per_frame=frame, prompt_format=prompt_format)
    return report_bins(lengths, options, measure_total_length=settings.get("measure_total_length", True))


def report_bins(lengths: Lengths, options: BinsOptions, *, measure_total_length: bool = True) -> str:
    """Estimate the bins and describe them.

    Args:
        measure_total_length: one dimension of tokens counts output as well as input.

    Raises:
        ConfigError: buckets by number of tokens are asked for, and no cut has a text; or see ``estimate_bins``.
    """
    in_total, shown = False, lengths
    if lengths.in_tokens and options.sub_buckets is None and lengths.tokens is not None and measure_total_length:
        in_total, shown = True, replace(lengths, lengths=lengths.lengths + lengths.tokens)
    if options.sub_buckets is None:
        found = estimate_bins(shown.lengths, options.num_buckets)
        longest = shown.lengths.max().item()
        if not found or (options.closed and found[-1] < longest):
            found.append(longest)
        bins = [Bucket(length) for length in found]
    else:
        if lengths.tokens is None:
            raise ConfigError(
                "sub-buckets are made by number of text tokens, and no cut has a text: leave them out",
                code="too_few_cuts",
            )
        bins = estimate_bins_2d(
            lengths.lengths, lengths.tokens, options.num_buckets, options.sub_buckets, options.outlier_threshold
        )
        # A ratio is no limit if there is no input.
        if (lengths.lengths == 0).any():
            bins = [replace(one, max_ratio=math.inf) for one in bins]
    # A common length may end several buckets; no cut is ever in the later ones.
    bins = list(dict.fromkeys(bins))
    closed = options.closed or options.sub_buckets is not None
    lines = [
        *_summary(lengths),
        *_histogram(shown, bins, closed=closed),
        "use_bucketing: true",
        f"num_buckets: {len(bins) + (not closed)}",
        f"bucket_duration_bins: {[one.bound for one in bins]}",
    ]
    if options.sub_buckets is None and not closed:
        lines.append(f"# bucket_batch_size needs a bin for the longest as well (--closed): {longest}")
    if lengths.in_tokens:
        lines.append("use_multimodal_sampling: true")
        if options.seconds_per_frame is not None:
            lines.append(f"token_equivalent_duration: {options.seconds_per_frame!r}")
        lines.append(f"measure_total_length: {str(in_total).lower()}")
    if options.prompt_format is not None:
        lines.append(f"prompt_format: {options.prompt_format}")
    lines += _max_ratio(lengths, bins, options.outlier_threshold)
    return "\n".join(lines) + "\n"


def _summary(lengths: Lengths) -> Iterator[str]:
    if lengths.looked_at is not None:
        yield f"# {lengths.looked_at}"
    count, spoken = len(lengths.lengths), lengths.seconds > 0
    counted = f"{count:,} cuts" if spoken.all() else f"{count:,} examples, {int(spoken.sum()):,} of them with audio"
    yield f"# {counted}, {math.fsum(lengths.seconds.tolist()) / 3600:,.2f} hours"
    if lengths.num_discarded:
        yield f"# left out for their duration: {lengths.num_discarded:,}"
    tokens = lengths.tokens
    columns = {"seconds": lengths.seconds[spoken]}
    if lengths.in_tokens and lengths.lengths.any():
        columns["frames" if spoken.all() else "input tokens"] = lengths.lengths
    if tokens is not None:
        columns["tokens" if spoken.all() else "output tokens"] = tokens
        with_input = lengths.lengths > 0
        unit = "second" if not lengths.in_tokens else "frame" if spoken.all() else "input token"
        columns[f"tokens per {unit}"] = ratios_of(tokens[with_input], lengths.lengths[with_input])
    for name, values in columns.items():
        if len(values):
            points = zip(_PERCENTILES, np.percentile(values, [*_PERCENTILES.values()]), strict=True)
            yield f"# {name}: " + ", ".join(f"{point} {value:.2f}" for point, value in points)
    if lengths.without_text and tokens is None:
        yield "# no cut has a text: there are no limits of tokens"
    elif lengths.without_text:
        yield f"# without a text, counted as 0 tokens: {lengths.without_text:,}"


def _histogram(lengths: Lengths, bins: Sequence[Bucket], *, closed: bool) -> Iterator[str]:
    """Yield one line per bucket: its end, tokens in two dimensions, cuts, hours (lengths, of text), and a bar."""
    buckets = assign(lengths, bins, closed=closed)
    spoken = bool((lengths.seconds > 0).any())
    amounts = lengths.seconds / 3600 if spoken else lengths.lengths
    sums = [float(amounts[buckets == number].sum()) for number in range(len(bins) + (not closed))]
    tokens_column = f" {'tokens':>8}" if bins[0].num_tokens is not None else ""
    yield f"# {'up to':>10}{tokens_column} {'cuts' if spoken else 'examples':>12} {'hours' if spoken else 'in all':>10}"
    for number, total in enumerate(sums):
        # The last bucket may have no end.
        length = bins[number].length if number < len(bins) else ""
        limits = f"{length:>10.3f}" if isinstance(length, float) else f"{length:>10}"
        if tokens_column:
            limits += f" {bins[number].num_tokens:>8}"
        bar = "#" * round(_BAR_WIDTH * total / (max(sums) or 1))
        amount = f"{total:>10.2f}" if spoken else f"{total:>10,.0f}"
        yield f"# {limits} {(buckets == number).sum():>12,} {amount} {bar}".rstrip()
    if dropped := int((buckets < 0).sum()):
        yield f"# left out by a loader with these limits, for too many tokens: {dropped:,}"


def _max_ratio(lengths: Lengths, bins: Sequence[Bucket], outlier_threshold: float) -> Iterator[str]:
    """Yield the limit of tokens: of each bucket in two dimensions, else of the filter, which passes over speech."""
    key = "max_tpt" if lengths.in_tokens else "max_tps"
    if bins[0].num_tokens is not None:
        if math.isfinite(bins[0].max_ratio):
            yield f"{key}: [{', '.join(repr(round_up(bound.max_ratio, 2)) for bound in bins)}]"
        return
    if lengths.tokens is None:
        return
    ratios = lengths.text_ratios if lengths.in_tokens else ratios_of(lengths.tokens, lengths.lengths)
    known = np.zeros(0) if ratios is None else ratios[~np.isnan(ratios)]
    # NeMo's filter divides by the input of every text.
    if len(known) and np.isfinite(known).all():
        usual = known[_no_outliers(known, outlier_threshold)]
        yield f"{key}: {round_up(float(usual.max()), 2)!r}"
