"""Buckets for batches of cuts of similar length, in one dimension (length) or two (length and text tokens).

In one dimension, ``lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`` estimates the bounds. The
two-dimensional estimate follows NeMo's ``scripts/speech_recognition/estimate_duration_bins_2d.py``, which applies the
same rule to both dimensions: walk through the sorted values, and begin a new bucket as soon as the current one exceeds
its share of the total.

The report of ``sharmill bins`` is YAML: a histogram as comments, followed by settings for NeMo's loader.
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
    """Return at most ``num_buckets - 1`` ascending bounds between buckets, as lhotse estimates them.

    A bound is the longest length of a bucket. lhotse's docstring calls it the shortest length of the next bucket, but
    its samplers put cuts of equal length into the lower bucket.

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
    """Return buckets in ascending order of length, each divided into sub-buckets by the number of tokens.

    A cut that is exactly as long as a bound belongs to the lower bucket, as in loaders. NeMo's script puts such a cut
    into the upper bucket, so NeMo's loader drops it if it has too many tokens for the lower bucket. Cuts whose ratio of
    tokens to length is more than ``outlier_threshold`` standard deviations above the mean of their bucket are ignored;
    ``max_ratio`` is the largest remaining ratio. Buckets that would end at the same length are merged, and the merged
    bucket gets the sub-buckets of all of them. Bounds in seconds are rounded up to 3 decimals, so that the last bound
    includes the longest cut.

    Raises:
        ConfigError: there are fewer than two buckets, no sub-buckets, or fewer cuts than buckets.
    """
    _check(lengths, num_buckets)
    refuse((num_sub_buckets < 1, f"the number of sub-buckets is {num_sub_buckets}; it must be at least 1"))
    order = np.lexsort((tokens, lengths))
    lengths, tokens = lengths[order], tokens[order]
    begins = _part_starts(lengths, num_buckets)
    bounds = [round_up(lengths[index].item(), _DECIMALS) for index in [*begins, -1]]
    # Rounding may add cuts to a bucket, so token limits are estimated from all cuts that a loader would put there.
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
        most = [*counts[_part_starts(counts, num_sub_buckets * share)], counts[-1]]
        bins += [Bucket(bound, int(num_tokens), float(ratios[kept].max())) for num_tokens in most]
        begin, share = end, 1
    return bins


def ratios_of(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the ratios of tokens to lengths (N,); a length of 0, such as that of text without input, counts as 1."""
    return tokens / np.where(lengths > 0, lengths, 1)


def _no_outliers(ratios: np.ndarray, threshold: float) -> np.ndarray:
    """Return a mask (N,) that is False for high outliers; low outliers are harmless."""
    return ratios - ratios.mean() <= threshold * ratios.std()


def _part_starts(sizes: np.ndarray, num_parts: int) -> list[int]:
    """Divide sorted sizes into parts, each of which ends once it exceeds its share of the total.

    Returns:
        The index at which each part except the first starts.
    """
    before = np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
    share = before[-1] / num_parts
    begins: list[int] = []
    begin = 0
    while (begin := int(np.searchsorted(before, before[begin] + share, side="right"))) < len(sizes):
        begins.append(begin)
    return begins


def _check(lengths: np.ndarray, num_buckets: int) -> None:
    refuse((num_buckets < 2, f"the number of buckets is {num_buckets}; it must be at least 2"))
    too_many = f"{num_buckets} buckets are more than the {len(lengths)} cuts; reduce the number with -b"
    refuse((num_buckets > len(lengths), too_many), code="too_few_cuts")


def round_up(value: float, decimals: int) -> float:
    """Round ``value`` up to a number with ``decimals`` decimals.

    >>> round_up(1.2341, 3), round_up(1.234, 3)
    (1.235, 1.234)
    """
    rounded = round(value, decimals)
    return rounded if rounded >= value else round(rounded + 10.0**-decimals, decimals)


def assign(lengths: Lengths, bins: Sequence[Bucket], *, closed: bool) -> np.ndarray:
    """Return the index of each cut's bucket (N,), or -1 if a loader would drop the cut.

    Args:
        closed: there is no bucket for cuts longer than the last bin, as with ``bucket_batch_size`` in NeMo.
    """
    bounds = np.array([bound.length for bound in bins])
    # If several buckets have the same length, this is the first of them; the number of tokens then selects one.
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
    """Read the lengths of the data, and return the report of ``sharmill bins`` as YAML.

    Args:
        sources: folders or URLs of datasets; or manifests, text files, one YAML file with ``input_cfg`` or training
            settings, or one list of manifests with weights.

    Raises:
        ConfigError: the options contradict each other, or the data cannot be read.
    """
    refuse(
        (options.sub_buckets is not None and not options.tokenizer,
         "sub-buckets need the number of text tokens: give a --tokenizer, such as 'bytes'"),
    )  # fmt: skip
    refuse(
        (options.prompt is not None and options.prompt_format is None, "--prompt needs a --prompt-format: give one"),
        (options.prompt_format is not None and not options.tokenizer, "--prompt-format needs a --tokenizer: give one"),
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
            # Like NeMo, count a partial frame as a token.
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
    """Estimate the bins, and return the report on them as YAML.

    Args:
        measure_total_length: one-dimensional token bins count input and output tokens together.

    Raises:
        ConfigError: sub-buckets are requested but no cut has text, or the bins cannot be estimated.
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
                "sub-buckets need the number of text tokens, but no cut has text: remove the option for sub-buckets",
                code="too_few_cuts",
            )
        bins = estimate_bins_2d(
            lengths.lengths, lengths.tokens, options.num_buckets, options.sub_buckets, options.outlier_threshold
        )
        # If some examples have no input, the ratio cannot be limited.
        if (lengths.lengths == 0).any():
            bins = [replace(one, max_ratio=math.inf) for one in bins]
    # Several buckets may end at the same frequent length; all but the first of them would be empty.
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
        lines.append(f"# bucket_batch_size needs one more bin for the longest cuts (--closed): {longest}")
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
        yield f"# excluded by duration: {lengths.num_discarded:,}"
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
        yield "# no cut has text, so tokens are not limited"
    elif lengths.without_text:
        yield f"# without text, counted as 0 tokens: {lengths.without_text:,}"


def _histogram(lengths: Lengths, bins: Sequence[Bucket], *, closed: bool) -> Iterator[str]:
    """Yield one line per bucket: upper bound, tokens (in two dimensions), cuts, hours (for text: length), and a bar."""
    buckets = assign(lengths, bins, closed=closed)
    spoken = bool((lengths.seconds > 0).any())
    amounts = lengths.seconds / 3600 if spoken else lengths.lengths
    sums = [float(amounts[buckets == number].sum()) for number in range(len(bins) + (not closed))]
    tokens_column = f" {'tokens':>8}" if bins[0].num_tokens is not None else ""
    yield f"# {'up to':>10}{tokens_column} {'cuts' if spoken else 'examples':>12} {'hours' if spoken else 'in all':>10}"
    for number, total in enumerate(sums):
        # The last bucket may have no upper bound.
        length = bins[number].length if number < len(bins) else ""
        limits = f"{length:>10.3f}" if isinstance(length, float) else f"{length:>10}"
        if tokens_column:
            limits += f" {bins[number].num_tokens:>8}"
        bar = "#" * round(_BAR_WIDTH * total / (max(sums) or 1))
        amount = f"{total:>10.2f}" if spoken else f"{total:>10,.0f}"
        yield f"# {limits} {(buckets == number).sum():>12,} {amount} {bar}".rstrip()
    if dropped := int((buckets < 0).sum()):
        yield f"# a loader with these limits would drop, for too many tokens: {dropped:,}"


def _max_ratio(lengths: Lengths, bins: Sequence[Bucket], outlier_threshold: float) -> Iterator[str]:
    """Yield the setting that limits tokens per length: one limit per bin in two dimensions, otherwise one number."""
    key = "max_tpt" if lengths.in_tokens else "max_tps"
    if bins[0].num_tokens is not None:
        if math.isfinite(bins[0].max_ratio):
            yield f"{key}: [{', '.join(repr(round_up(bound.max_ratio, 2)) for bound in bins)}]"
        return
    if lengths.tokens is None:
        return
    ratios = lengths.text_ratios if lengths.in_tokens else ratios_of(lengths.tokens, lengths.lengths)
    known = np.zeros(0) if ratios is None else ratios[~np.isnan(ratios)]
    # NeMo's filter would divide by zero for text without input.
    if len(known) and np.isfinite(known).all():
        usual = known[_no_outliers(known, outlier_threshold)]
        yield f"{key}: {round_up(float(usual.max()), 2)!r}"
