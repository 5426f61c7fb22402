"""Advice about the settings of a training: who reads what, how batches are filled, and what cannot go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sharmill.errors import ConfigError
from sharmill.training.nemo.classic import FATES, IGNORED
from sharmill.training.nemo.loader import get_dataloader
from sharmill.training.nemo.loader_settings import (
    DIVIDED,
    Settings,
    is_map_style,
    prepare_settings,
    sections_of,
    sources_of,
)
from sharmill.training.nemo.trial import Seen, try_rank
from sharmill.training.tokenizers import PromptTokenizer, load_tokenizer


def examine(settings: Settings, *, ranks: int, num_batches: int, tokenizer: str | None) -> Iterator[str]:
    """Yield lines about the settings; only the first rank's ``num_batches`` are made, and no audio is loaded.

    Raises:
        ConfigError: the loader refuses the settings.
    """
    for section in sections_of(settings):
        if ignored := [key for key in section if FATES.get(key, "").startswith(IGNORED)]:
            yield f"ignored: {', '.join(ignored)}"
    prepared = prepare_settings({key: settings[key] for key in settings if key != "canonical"}, 0, ranks)
    workers = max(1, int(prepared.get("num_workers", 0)))
    map_style = any(is_map_style(section) for section in sections_of(prepared))
    yield f"{ranks} ranks with {workers} {'worker' if workers == 1 else 'workers'} each"
    sources = sources_of(prepared)
    for source in sources:
        yield f"{_name(source)}: {_readers(source, prepared, ranks, workers, map_style=map_style)}"
    if (count := settings.get("canonical")) is not None:
        yield f"canonical: {count} parts, so the same global batches on any number of readers that divides {count}"
    if map_style:
        yield (
            "map style: the main process of every rank reads all manifests, minutes for millions of lines; "
            "force_iterable_dataset: true reads them as a stream, which can be resumed"
        )
    yield _resuming(settings, ranks, tokenizer)
    batches = try_rank(settings, 0, ranks, num_batches, tokenizer).batches
    yield from _filling(batches)
    if 0 < len(batches) < num_batches:
        yield f"the epoch of the first rank ends after {len(batches)} batches"
    yield from _buckets(prepared, batches)
    yield from _epochs(settings, sources, batches, ranks)


def _name(source: Settings) -> str:
    place = next((source[key] for key in ("dataset", "paths", "source_paths", "manifest_filepath", "shar_path",
                                          "cuts_path", "data_dir") if source.get(key) is not None), "")  # fmt: skip
    return f"{source.get('of_type', source.get('type'))} {place if isinstance(place, str) else '...'}"


def _readers(source: Settings, prepared: Settings, ranks: int, workers: int, *, map_style: bool) -> str:
    if map_style:
        return f"every rank draws the same order, and takes one batch in {ranks}" if ranks > 1 else "all"
    if source["type"] not in ("sharmill", DIVIDED):
        return f"each of {ranks * workers} readers reads all of it, in an order of its own"
    if prepared["shuffle"] and source["shard_seed"] == "trng" and not prepared.get("force_finite", False):
        return f"every rank reads all of it in an order of its own, each worker 1/{workers}"
    return f"one order, of which each of {ranks * workers} readers has its part: every example once per epoch"


def _resuming(settings: Settings, ranks: int, tokenizer: str | None) -> str:
    try:
        get_dataloader(settings, 0, ranks, None if tokenizer is None else PromptTokenizer(load_tokenizer(tokenizer)),
                       dataset=object(), resumable=True)  # type: ignore[arg-type]  # fmt: skip
    except ConfigError as error:
        if error.code != "inexact_state":
            raise
        return f"cannot be resumed: {error}"
    return "can be resumed exactly, on other numbers of ranks and workers too"


def _filling(batches: list[list[Seen]]) -> Iterator[str]:
    if not batches:
        yield "no batch: the data end before the first is full"
        return
    sizes = sorted(len(batch) for batch in batches)
    yield f"{len(batches)} batches of {sizes[0]} to {sizes[-1]} examples"
    seconds = [[piece for seen in batch for piece in seen.seconds] for batch in batches]
    tokens = [[float(seen.tokens) for seen in batch if seen.tokens] for batch in batches]
    for name, lengths in (("audio", seconds), ("tokens", tokens)):
        if padded := sum(len(batch) * max(batch, default=0.0) for batch in lengths):
            yield f"{name}: {100 * (1 - sum(map(sum, lengths)) / padded):.1f} % of the batches is padding"


def _buckets(prepared: Settings, batches: list[list[Seen]]) -> Iterator[str]:
    first = 0
    for section in sections_of(prepared):
        bins, count = section.get("bucket_duration_bins"), len(sources_of(section))
        own = range(first, first + count)
        first += count
        if not bins:
            continue
        seen = [one for batch in batches for one in batch if one.place is None or one.place[0] in own]
        if isinstance(bins[0], list):
            filled = Counter(_bucket_in_two(bins, one.size) for one in seen)
            never = [str(bound) for number, bound in enumerate(bins) if not filled[number]]
        else:
            filled = Counter(sum(one.length > bound for bound in bins) for one in seen)
            closed = section.get("bucket_batch_size") is not None  # then longer examples are left out
            never = [f"{bins[n - 1] if n else 0} to {bins[n] if n < len(bins) else 'the longest'}"
                     for n in range(len(bins) + (not closed)) if not filled[n]]  # fmt: skip
        if never:
            yield f"buckets that no batch came from: {', '.join(never)}"


def _bucket_in_two(bins: list[list[float]], size: tuple[float, int]) -> int:
    """Return the number of the first bucket that has room for an example."""
    return next((n for n, bound in enumerate(bins) if size[0] <= bound[0] and size[1] <= bound[1]), len(bins))


def _epochs(settings: Settings, sources: list[Settings], batches: list[list[Seen]], ranks: int) -> Iterator[str]:
    from sharmill.training.nemo.input_type import entry_sizes

    counts = Counter(seen.place[0] for batch in batches for seen in batch if seen.place is not None)
    divided = [source for source in sources if source["type"] in ("sharmill", DIVIDED)]
    for number, (source, size) in enumerate(zip(divided, entry_sizes(divided), strict=True)):
        if not batches or not size:
            continue
        per_thousand = 1000 * ranks * counts[number] / len(batches) / size
        yield f"{_name(source)}: {size} examples, {per_thousand:.3g} epochs in 1000 steps"
