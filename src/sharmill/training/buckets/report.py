"""The report of ``sharmill bins``: a histogram as comments, then the keys for NeMo's loader, as YAML.

Folders of datasets are read whole, by many processes; of other data the loader's own examples are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from sharmill.errors import ConfigError
from sharmill.registry import require_package
from sharmill.shar.index import read_dataset
from sharmill.shar.layout import DATASET_FILE
from sharmill.training.buckets.bins import (
    Bin,
    assign,
    estimate_bins,
    estimate_bins_2d,
    largest_usual,
    max_ratio_of,
    ratios_of,
    round_up,
)
from sharmill.training.buckets.lengths import Lengths, read_lengths

_BAR = 40
_AnyBin = TypeVar("_AnyBin", float, Bin)


def _count_buckets(bins: list[float] | list[Bin], *, closed: bool) -> int:
    """Count the buckets that the bins make."""
    return len(bins) if closed or isinstance(bins[0], Bin) else len(bins) + 1


@dataclass(frozen=True, kw_only=True)
class BinsOptions:
    """Options of the estimate.

    ``sub_buckets`` makes two dimensions. ``seconds_per_frame`` is the length of a frame where audio counts in frames,
    which NeMo calls tokens. ``closed`` ends one dimension with the longest cut, as ``bucket_batch_size`` needs it.
    """

    num_buckets: int = 30
    sub_buckets: int | None = None
    seconds_per_frame: float | None = None
    closed: bool = False
    outlier_threshold: float = 4.0


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """Options for data that are read through the loader.

    ``prompt_format`` and ``prompt`` are a name of NeMo's and the turns before the answer; ``section`` names one sampler
    of a ``multi_config``; ``samples`` is the number of examples to look at.
    """

    prompt_format: str | None = None
    prompt: str | None = None
    section: str | None = None
    samples: int = 100_000


def estimate_report(
    sources: Sequence[str | Path],
    options: BinsOptions,
    *,
    mixture: MixtureOptions | None = None,
    tokenizer: Sequence[str] = (),
    token_bins: bool = False,
    min_duration: float = 0.0,
    max_duration: float = math.inf,
    workers: int | str = "auto",
) -> str:
    """Read the lengths of the data and describe their bins.

    Args:
        sources: folders of datasets; or manifests, files of text, a YAML file of ``input_cfg`` or of a training, or a
            list of manifests with weights.
        tokenizer: names of tokenizers; see ``load_tokenizers``.
        token_bins: count audio in frames; of the datasets' codec, unless the options say how long they are.
        min_duration, max_duration: seconds; what lies outside is left out, and counted.
        workers: processes that read folders.

    Raises:
        ConfigError: the options do not go together, or the data cannot be read.
    """
    mixture = mixture or MixtureOptions()
    if options.sub_buckets is not None and not tokenizer:
        raise ConfigError(
            "sub-buckets are made by number of text tokens: name a --tokenizer, such as 'bytes'",
            code="bad_config_value",
        )
    if mixture.prompt is not None and mixture.prompt_format is None:
        raise ConfigError("--prompt belongs to a --prompt-format", code="bad_usage")
    if mixture.prompt_format is not None and not tokenizer:
        raise ConfigError("--prompt-format needs a --tokenizer", code="bad_usage")
    texts = [str(source) for source in sources]
    if mixture.prompt_format is None and all(Path(text).is_dir() for text in texts):
        if token_bins and options.seconds_per_frame is None:
            options = replace(options, seconds_per_frame=frame_shift([Path(text) for text in texts]))
        lengths = read_lengths(
            texts, tokenizer=tokenizer, min_duration=min_duration, max_duration=max_duration, workers=workers
        )
        if options.seconds_per_frame is not None:
            lengths = lengths.in_frames(options.seconds_per_frame)
        return report_bins(lengths, options)
    require_package("nemo")
    from sharmill.training.buckets.inputs import open_inputs
    from sharmill.training.buckets.mixture import read_mixture

    reading = open_inputs(
        texts, tokenizer, token_bins=token_bins, seconds_per_frame=options.seconds_per_frame,
        prompt_format=mixture.prompt_format, prompt=mixture.prompt, section=mixture.section, samples=mixture.samples,
    )  # fmt: skip
    lengths = read_mixture(reading, min_duration=min_duration, max_duration=max_duration)
    settings = reading.settings
    return report_bins(
        lengths,
        replace(options, seconds_per_frame=settings.get("token_equivalent_duration")),
        prompt_format=settings.get("prompt_format"),
        measure_total_length=settings.get("measure_total_length", True),
    )


def frame_shift(datasets: Sequence[Path]) -> float:
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


def report_bins(
    lengths: Lengths, options: BinsOptions, *, prompt_format: str | None = None, measure_total_length: bool = True
) -> str:
    """Estimate the bins and describe them.

    Args:
        prompt_format: to be told with the bins.
        measure_total_length: one dimension of tokens counts output as well as input.

    Raises:
        ConfigError: buckets by number of tokens are asked for, and no cut has a text; or see ``estimate_bins``.
    """
    in_total = lengths.in_tokens and options.sub_buckets is None and lengths.tokens is not None and measure_total_length
    shown = lengths.in_total() if in_total else lengths
    bins: list[float] | list[Bin]
    if options.sub_buckets is None:
        found = estimate_bins(shown.lengths, options.num_buckets)
        longest = shown.lengths.max().item()
        if not found or (options.closed and found[-1] < longest):
            found.append(longest)
        bins = _distinct(found)
    else:
        if lengths.tokens is None:
            raise ConfigError(
                "sub-buckets are made by number of text tokens, and no cut has a text: leave them out",
                code="too_few_cuts",
            )
        two = estimate_bins_2d(
            lengths.lengths, lengths.tokens, options.num_buckets, options.sub_buckets, options.outlier_threshold
        )
        # Without input, a ratio is no limit.
        bins = _distinct([replace(one, max_ratio=math.inf) for one in two] if (lengths.lengths == 0).any() else two)
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
    if lengths.in_tokens:
        lines.append("use_multimodal_sampling: true")
        if options.seconds_per_frame is not None:
            lines.append(f"token_equivalent_duration: {options.seconds_per_frame!r}")
        lines.append(f"measure_total_length: {str(in_total).lower()}")
    if prompt_format is not None:
        lines.append(f"prompt_format: {prompt_format}")
    lines += _max_ratio(lengths, bins, options.outlier_threshold)
    return "\n".join(lines) + "\n"


def _distinct(bins: list[_AnyBin]) -> list[_AnyBin]:
    """Leave out those that are as the one before, in which there is never a cut: a common length may end several."""
    return [bound for number, bound in enumerate(bins) if number == 0 or bound != bins[number - 1]]


def _summary(lengths: Lengths) -> Iterator[str]:
    if lengths.looked_at is not None:
        yield f"# {lengths.looked_at}"
    count, spoken = len(lengths.lengths), lengths.seconds > 0
    yield (
        f"# {count:,} cuts, {lengths.hours:,.2f} hours"
        if spoken.all()
        else (f"# {count:,} examples, {int(spoken.sum()):,} of them with audio, {lengths.hours:,.2f} hours")
    )
    if lengths.num_discarded:
        yield f"# left out for their duration: {lengths.num_discarded:,}"
    tokens, of_lengths = lengths.tokens, ("shortest", "longest")
    columns = [("seconds", lengths.seconds[spoken], of_lengths)]
    if lengths.in_tokens and lengths.lengths.any():
        columns.append(("frames" if spoken.all() else "input tokens", lengths.lengths, of_lengths))
    if tokens is not None:
        columns.append(("tokens" if spoken.all() else "output tokens", tokens, of_lengths))
        with_input = lengths.lengths > 0
        unit = "second" if not lengths.in_tokens else "frame" if spoken.all() else "input token"
        ratios = ratios_of(tokens[with_input], lengths.lengths[with_input])
        columns.append((f"tokens per {unit}", ratios, ("least", "most")))
    for name, values, (first, last) in columns:
        if len(values):
            points = np.percentile(values, [0, 25, 50, 75, 95, 99, 100])
            names = (first, "25 %", "median", "75 %", "95 %", "99 %", last)
            yield f"# {name}: " + ", ".join(f"{n} {p:.2f}" for n, p in zip(names, points, strict=True))
    if lengths.without_text and tokens is None:
        yield "# no cut has a text: there are no limits of tokens"
    elif lengths.without_text:
        yield f"# without a text, counted as 0 tokens: {lengths.without_text:,}"


def _histogram(lengths: Lengths, bins: list[float] | list[Bin], *, closed: bool) -> Iterator[str]:
    """Yield one line per bucket: its end, tokens in two dimensions, cuts, hours (lengths, of text), and a bar."""
    num_buckets = _count_buckets(bins, closed=closed)
    buckets = assign(lengths, bins, closed=closed)
    spoken = bool((lengths.seconds > 0).any())
    amounts = lengths.seconds / 3600 if spoken else lengths.lengths
    sums = [float(amounts[buckets == number].sum()) for number in range(num_buckets)]
    limits = [f"{'up to':>10}", f"{'tokens':>8}"] if isinstance(bins[0], Bin) else [f"{'up to':>10}"]
    yield f"# {' '.join(limits)} {'cuts' if spoken else 'examples':>12} {'hours' if spoken else 'in all':>10}"
    for number, total in enumerate(sums):
        bound = bins[number] if number < len(bins) else None
        if isinstance(bound, Bin):
            limits = [f"{_number(bound.length):>10}", f"{bound.tokens:>8}"]
        else:
            limits = [f"{_number(bound):>10}"]
        bar = "#" * round(_BAR * total / max(sums)) if max(sums) else ""
        count = (buckets == number).sum()
        amount = f"{total:>10.2f}" if spoken else f"{total:>10,.0f}"
        yield f"# {' '.join(limits)} {count:>12,} {amount} {bar}".rstrip()
    if dropped := int((buckets < 0).sum()):
        yield f"# left out by a loader with these limits, for too many tokens: {dropped:,}"


def _number(length: float | None) -> str:
    """Format seconds or frames; nothing where a bucket has no end."""
    return f"{length:.3f}" if isinstance(length, float) else str(length or "")


def _max_ratio(lengths: Lengths, bins: list[float] | list[Bin], outlier_threshold: float) -> Iterator[str]:
    """Yield the limit of tokens: of each bucket in two dimensions, else of the filter, which passes over speech."""
    key = "max_tpt" if lengths.in_tokens else "max_tps"
    two = [bound for bound in bins if isinstance(bound, Bin)]
    if two and math.isfinite(two[0].max_ratio):
        yield f"{key}: [{', '.join(repr(round_up(bound.max_ratio, 2)) for bound in two)}]"
    elif not two and not lengths.in_tokens and lengths.tokens is not None:
        yield f"{key}: {round_up(max_ratio_of(lengths.lengths, lengths.tokens, outlier_threshold), 2)!r}"
    elif not two and lengths.text_ratios is not None and lengths.tokens is not None:
        of_text = lengths.text_ratios[~np.isnan(lengths.text_ratios)]
        # NeMo's filter divides by the input of every text.
        if np.isfinite(of_text).all():
            yield f"{key}: {round_up(largest_usual(of_text, outlier_threshold), 2)!r}"
