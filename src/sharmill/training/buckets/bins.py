"""Buckets for batches of cuts of similar length, in one dimension (length) or two (length and text tokens).

One dimension is ``lhotse.dataset.sampling.dynamic_bucketing.estimate_duration_buckets`` itself. Two dimensions follow
NeMo's ``scripts/speech_recognition/estimate_duration_bins_2d.py``, which has the same rule for both: walk through the
sorted values and begin a new bucket as soon as the one before has more than its share of the total.

The report of ``sharmill bins`` has a histogram as comments, then the keys for NeMo's loader, as YAML. Folders of
datasets are read whole, by many processes; of other data the loader's own examples are looked at.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from sharmill.errors import ConfigError, DamagedShard, refuse
from sharmill.files.location import Location, is_url
from sharmill.registry import require_package
from sharmill.shar.fields import DATASET_FILE
from sharmill.shar.index import open_directory, read_dataset
from sharmill.shar.json_lines import read_cuts
from sharmill.shar.reading.shard_source import open_shard_source
from sharmill.training.buckets.batch_size import Bucket
from sharmill.training.parallel import parallel_map
from sharmill.training.tokenizers import load_tokenizers, tokenize

_DECIMALS = 3


@dataclass(frozen=True)
class Lengths:
    """Lengths of N cuts, or of other examples.

    Attributes:
        seconds: (N,) of audio; 0 for text.
        lengths: (N,): the seconds as float64, or frames (of text: input tokens) as int64.
        tokens: (N,), of their texts (of text: output tokens); None if they were not counted, or no cut has a text.
        text_ratios: (N,) output tokens per input token of text, infinite without input, NaN for cuts; None if all are.
        without_text: number of the cuts without a text, whose tokens are 0; 0 if they were not counted.
        num_discarded: number of other cuts, which lay outside the limits.
        looked_at: words about the sample that they are; None where datasets were read as a whole.
        in_tokens: lengths are frames and input tokens.
    """

    seconds: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray | None
    text_ratios: np.ndarray | None = None
    without_text: int = 0
    num_discarded: int = 0
    looked_at: str | None = None
    in_tokens: bool = False

    @classmethod
    def of_counts(
        cls,
        seconds: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
        *,
        counted: bool,
        limits: tuple[float, float],
        text_ratios: np.ndarray | None = None,
    ) -> "Lengths":
        """Make them of columns (N,), leaving out what has less or more seconds; text has no seconds and stays.

        Args:
            tokens: -1 where there is no text.
            counted: tokens were counted.
            limits: the least and the most seconds.

        Raises:
            ConfigError: nothing is left.
        """
        kept = ((seconds >= limits[0]) & (seconds <= limits[1])) | (seconds == 0)
        if not kept.any():
            raise ConfigError(
                f"none of the {len(kept)} cuts has {limits[0]:g} to {limits[1]:g} seconds", code="too_few_cuts"
            )
        tokens = tokens[kept]
        return cls(
            seconds=seconds[kept],
            lengths=lengths[kept],
            tokens=np.maximum(tokens, 0) if counted and (tokens >= 0).any() else None,
            text_ratios=None if text_ratios is None else text_ratios[kept],
            without_text=int((tokens < 0).sum()) if counted else 0,
            num_discarded=int((~kept).sum()),
        )


def read_lengths(
    datasets: Sequence[str | Path],
    *,
    tokenizer: Sequence[str] = (),
    min_duration: float = 0.0,
    max_duration: float = math.inf,
    workers: int | str = "auto",
) -> Lengths:
    """Read the lengths of all cuts of these datasets, in no particular order.

    Args:
        tokenizer: names as ``load_tokenizers`` takes them; tokens are counted if there are any.
        min_duration, max_duration: seconds; cuts outside are left out, and counted.
        workers: processes, or ``auto`` for one per core.

    Raises:
        ConfigError: there is no finished dataset nor a Shar of another tool, or no such tokenizer, or no cut is left.
        DamagedShard: a file of cuts is not as it should be.
    """
    sources = [open_shard_source(open_directory(dataset), [], None) for dataset in datasets]
    shards = [source.files(number) for source in sources for number in range(source.num_shards)]
    files = [(shard.cuts, shard.count) for shard in shards]
    if tokenizer:
        _load_once(tuple(tokenizer))  # A wrong name is an error of this process, in one line.
    measure = partial(_measure, tokenizer=tuple(tokenizer))
    workers = min(len(os.sched_getaffinity(0)) if workers == "auto" else int(workers), len(files))
    parts = list(parallel_map(files, measure, workers, kind="process") if workers > 1 else map(measure, files))
    refuse((not parts, f"there are no cuts in {', '.join(map(str, datasets))}"), code="too_few_cuts")
    durations = np.concatenate([part[0] for part in parts])
    tokens = np.concatenate([part[1] for part in parts])
    return Lengths.of_counts(durations, durations, tokens, counted=bool(tokenizer), limits=(min_duration, max_duration))


# A process that reads many files loads them once.
_load_once = cache(load_tokenizers)


def _measure(file: tuple[Path, int | None], tokenizer: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Read durations, and numbers of tokens (-1 without a text), of one file (path, number of cuts if known)."""
    path, count = file
    durations, tokens = [], []
    for cut in read_cuts(path):
        try:
            durations.append(cut["duration"])
            supervisions = cut.get("supervisions", ()) if tokenizer else ()
            texts = [(one["text"], one.get("language")) for one in supervisions if one.get("text")]
            counts = [len(tokenize(_load_once(tokenizer), *one, cut["id"])) for one in texts]
            tokens.append(sum(counts) if counts else -1)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedShard(f"{path}: {cut.get('id')!r} is not a cut: {error!r}") from error
        if not (isinstance(durations[-1], (int, float)) and 0 < durations[-1] < math.inf):
            raise DamagedShard(f"{path}: the duration of {cut.get('id')!r} is {durations[-1]!r}")
    if count is not None and len(durations) != count:
        raise DamagedShard(f"{path}: there are {len(durations)} cuts instead of {count}")
    return np.array(durations, dtype=np.float64), np.array(tokens, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class BinsOptions:
    """Options of ``sharmill bins``.

    Attributes:
        sub_buckets: divide each bucket into so many by number of text tokens.
        tokenizer: names of tokenizers; see ``load_tokenizers``.
        token_bins: count audio in frames, which NeMo calls tokens.
        seconds_per_frame: the length of a frame; by default that of the datasets' codec.
        closed: end one dimension with the longest cut, as ``bucket_batch_size`` needs it.
        min_duration, max_duration: seconds; what lies outside is left out, and counted.
        prompt_format, prompt: a name of NeMo's, and the turns before the answer.
        section: one sampler of a ``multi_config``.
        samples: the number of examples to look at, of data that are no folders of datasets.
        workers: processes that read folders.
    """

    num_buckets: int = 30
    sub_buckets: int | None = None
    tokenizer: Sequence[str] = ()
    token_bins: bool = False
    seconds_per_frame: float | None = None
    closed: bool = False
    min_duration: float = 0.0
    max_duration: float = math.inf
    outlier_threshold: float = 4.0
    prompt_format: str | None = None
    prompt: str | None = None
    section: str | None = None
    samples: int = 100_000
    workers: int | str = "auto"


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


_BAR = 40


def estimate_report(sources: Sequence[str | Path], options: BinsOptions) -> str:
    """Read the lengths of the data and describe their bins.

    Args:
        sources: folders or URLs of datasets; or manifests, files of text, a YAML file of ``input_cfg`` or of a
            training, or a list of manifests with weights.

    Raises:
        ConfigError: the options do not go together, or the data cannot be read.
    """
    if options.sub_buckets is not None and not options.tokenizer:
        raise ConfigError(
            "sub-buckets are made by number of text tokens: name a --tokenizer, such as 'bytes'",
            code="bad_config_value",
        )
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


def is_dataset(source: str) -> bool:
    """Return True if a source is the folder of a dataset, or a URL that does not end as that of a file."""
    return Path(source).is_dir() or (is_url(source) and not Path(source).suffix)


def frame_shift(datasets: Sequence[Location]) -> float:
    # A Shar of another tool does not say what its codes are.
    codecs = [codec for path in datasets if (path / DATASET_FILE).exists() for codec in read_dataset(path).codecs]
    shifts = {codec.samples_per_frame / codec.sampling_rate for codec in codecs}
    names = ", ".join(codec.name for codec in codecs) or "none"
    if len(shifts) != 1:
        raise ConfigError(
            f"the codecs are {names}: say how long a frame is with --token-equivalent-duration", code="unknown_codec"
        )
    return shifts.pop()


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
    # Bins that are as the one before, in which there is never a cut, are left out: a common length may end several.
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
    tokens, columns = lengths.tokens, {"seconds": lengths.seconds[spoken]}
    if lengths.in_tokens and lengths.lengths.any():
        columns["frames" if spoken.all() else "input tokens"] = lengths.lengths
    if tokens is not None:
        columns["tokens" if spoken.all() else "output tokens"] = tokens
        with_input = lengths.lengths > 0
        unit = "second" if not lengths.in_tokens else "frame" if spoken.all() else "input token"
        columns[f"tokens per {unit}"] = ratios_of(tokens[with_input], lengths.lengths[with_input])
    for name, values in columns.items():
        if len(values):
            points = np.percentile(values, [0, 25, 50, 75, 95, 99, 100])
            names = ("least", "25 %", "median", "75 %", "95 %", "99 %", "most")
            yield f"# {name}: " + ", ".join(f"{n} {p:.2f}" for n, p in zip(names, points, strict=True))
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
    in_two = bins[0].num_tokens is not None
    limits = f"{'up to':>10} {'tokens':>8}" if in_two else f"{'up to':>10}"
    yield f"# {limits} {'cuts' if spoken else 'examples':>12} {'hours' if spoken else 'in all':>10}"
    for number, total in enumerate(sums):
        # The last bucket may have no end.
        length = bins[number].length if number < len(bins) else ""
        limits = f"{length:>10.3f}" if isinstance(length, float) else f"{length:>10}"
        if in_two:
            limits += f" {bins[number].num_tokens:>8}"
        bar = "#" * round(_BAR * total / max(sums)) if max(sums) else ""
        count = (buckets == number).sum()
        amount = f"{total:>10.2f}" if spoken else f"{total:>10,.0f}"
        yield f"# {limits} {count:>12,} {amount} {bar}".rstrip()
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
