"""Trial runs of a training loader without audio, for ``sharmill doctor train.yaml`` and ``sharmill verify-resume``.

A trial produces the first batches of one rank in this process, or of all ranks in new processes.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any, Final

import torch
from lhotse import CutSet
from lhotse.cut import Cut

from sharmill.errors import ConfigError, refuse
from sharmill.files.host import new_process
from sharmill.models.nemo_models import quiet_nemo
from sharmill.shar.fields import TARGET_CODES
from sharmill.shar.index import read_dataset
from sharmill.training.nemo.classic import is_read_by_lhotse
from sharmill.training.nemo.entries import Settings, entry_directory, is_divided
from sharmill.training.nemo.loader import get_dataloader, merge_data_states
from sharmill.training.nemo.partition import cuts_of, place_of
from sharmill.training.nemo.settings import (
    is_map_style,
    loader_schema,
    prepare_settings,
    resolve_settings,
    sections_of,
    sources_of,
)
from sharmill.training.tokenizers import PromptTokenizer, load_tokenizer

# Maximum number of examples that are read to count how many pass the filters.
_MAX_COUNTED: Final = 1_000_000
# Maximum fraction of dropped examples; a larger fraction is reported as an error.
_MAX_DROPPED_SHARE: Final = 0.25
# Keys that name the data of an entry; the first one that is set is shown.
_DATA_KEYS: Final = (
    "dataset", "paths", "source_paths", "manifest_filepath", "shar_path", "cuts_path", "data_dir",
)  # fmt: skip
# The position of an example: reader, epoch, group, draw, block and item.
Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeenExample:
    """An example that a trial has seen.

    Attributes:
        place: position of the example; None for data that is not divided among readers.
        seconds: durations of its cuts.
        tokens: number of tokens of its text or of the whole conversation; 0 if nothing was tokenized.
        bucket: numbers of the sampler and of its bucket for the example; the bucket is None if there are no buckets.
    """

    place: Place | None
    seconds: list[float]
    tokens: int
    bucket: tuple[int, int | None]


def count_tokens(cut: Cut) -> int:
    """Return the number of tokens of a cut's prompt and texts, or -1 if it has no text."""
    if hasattr(cut, "input_ids"):
        return len(cut.input_ids)
    counts = [len(one.tokens) for one in cut.supervisions if one.text and one.has_custom("tokens")]
    return sum(counts) if counts else -1


def _open_loader(settings: Settings, rank: int, world_size: int, tokenizer: str | None, **options: Any) -> Any:
    loaded = None if tokenizer is None else PromptTokenizer(load_tokenizer(tokenizer))
    return get_dataloader(settings, rank, world_size, loaded, dataset=SeenDataset(settings), **options)


def _try_rank(
    settings: Settings,
    rank: int,
    world_size: int,
    num_batches: int,
    tokenizer: str | None,
    state: Mapping[str, Any] | None,
) -> tuple[list[list[SeenExample]], Mapping[str, Any]]:
    """Return the next batches of a rank, from the beginning or from a state, and the loader's state after them."""
    loader = _open_loader(settings, rank, world_size, tokenizer, resumable=True, state=state)
    return list(islice(loader, num_batches)), loader.state_dict()


def _try_ranks(
    settings: Settings, world_size: int, num_batches: int, tokenizer: str | None, state: Mapping[str, Any] | None
) -> tuple[list[list[list[SeenExample]]], dict[str, Any]]:
    """Return the batches of each rank and the merged state of all ranks.

    The ranks run one after the other, each in a fork of this process. This process must be new; it imports NeMo once
    for all ranks.
    """
    trials = []
    with quiet_nemo():
        import nemo.collections.common.data.lhotse.dataloader  # noqa: F401

        for rank in range(world_size):
            with new_process("fork") as copy:
                one = copy.submit(_try_rank, settings, rank, world_size, num_batches, tokenizer, state)
                trials.append(one.result())
    return [batches for batches, _ in trials], merge_data_states([state for _, state in trials])


def _places(ranks: Sequence[list[list[SeenExample]]]) -> list[Place]:
    """Return the positions of all examples of all ranks."""
    return [seen.place for batches in ranks for batch in batches for seen in batch if seen.place is not None]


class SeenDataset(torch.utils.data.Dataset):
    """A dataset that turns examples into batches of ``SeenExample`` without loading audio.

    Examples of entries that are not divided have no position and are attributed to the first sampler.
    """

    def __init__(self, settings: Settings) -> None:
        from nemo.collections.common.data.lhotse.dataloader import determine_sampling_constraint

        prepared = prepare_settings(settings, 0, 1)
        sections, defaults = sections_of(prepared), {str(key): value for key, value in loader_schema().items()}
        self._bins = [section.get("bucket_duration_bins") for section in sections]
        self._constraints = [
            determine_sampling_constraint(CutSet(), bins, SimpleNamespace(**defaults | section))[1]
            for bins, section in zip(self._bins, sections, strict=True)
        ]
        # The number of a reader is the position of its entry among the divided entries of all samplers.
        self._samplers = [
            number for number, section in enumerate(sections) for source in sources_of(section)
            if is_divided(source)
        ]  # fmt: skip

    def __getitem__(self, examples: Any) -> list[SeenExample]:
        return [self._describe(example) for example in examples]

    def _describe(self, example: Any) -> SeenExample:
        place = place_of(example)
        tokens = 0
        if isinstance(example, Cut):
            tokens = max(0, count_tokens(example))
        elif getattr(example, "context_ids", None) is not None:
            tokens = example.total_length
        number = 0 if place is None else self._samplers[place[0]]
        bins = self._bins[number]
        bucket = self._constraints[number].select_bucket(bins, example=example) if bins else None
        return SeenExample(place, [cut.duration for cut in cuts_of(example)], tokens, (number, bucket))


def examine(settings: Settings, *, ranks: int, num_batches: int, tokenizer: str | None) -> Iterator[str]:
    """Yield lines about the settings: facts, ``advice: ...``, and ``error: ...`` for settings that must be changed.

    The first ``num_batches`` of the first rank are produced without loading audio, and the examples that pass the
    filters are counted.

    Raises:
        ConfigError: the loader rejects the settings.
    """
    log, warnings = logging.getLogger("sharmill.training.nemo"), BufferingHandler(capacity=1_000_000)
    log.addHandler(warnings)  # collected to remove duplicates, because each loader of the trial warns again
    try:
        yield from _examine(settings, warnings.buffer, ranks=ranks, num_batches=num_batches, tokenizer=tokenizer)
    finally:
        log.removeHandler(warnings)


def _examine(
    settings: Settings, warnings: list[logging.LogRecord], *, ranks: int, num_batches: int, tokenizer: str | None
) -> Iterator[str]:
    prepared = prepare_settings(settings, 0, ranks)
    workers = max(1, int(prepared.get("num_workers", 0)))
    map_style = any(is_map_style(section) for section in sections_of(prepared))
    yield f"{ranks} ranks with {workers} {'worker' if workers == 1 else 'workers'} each"
    sources = sources_of(prepared)
    for source in sources:
        yield f"{_name(source)}: {_describe_readers(source, prepared, ranks, workers, map_style=map_style)}"
    if (count := settings.get("canonical")) is not None:
        yield f"canonical: {count} parts, so global batches are the same on any number of readers that divides {count}"
    if map_style:
        yield (
            "advice: map style: the main process of every rank reads all manifests, which takes minutes for millions "
            "of lines; set force_iterable_dataset: true to read them as a stream that can be resumed"
        )
    yield from _setting_errors(prepared)
    try:
        loader = _open_loader(settings, 0, ranks, tokenizer, resumable=True)
        yield "the loader can be resumed exactly, also on other numbers of ranks and workers"
    except ConfigError as error:
        if error.code != "inexact_state":
            raise
        yield f"advice: the loader cannot be resumed: {error}"
        loader = _open_loader(settings, 0, ranks, tokenizer)
    for sentence in dict.fromkeys(record.getMessage() for record in warnings):
        yield f"advice: {sentence}"
    batches = list(islice(loader, num_batches))
    yield from _padding_report(batches)
    if 0 < len(batches) < num_batches:
        yield f"the epoch of the first rank ends after {len(batches)} batches"
    yield from _buckets(prepared, batches)
    counted = _count(settings, tokenizer)
    for source, (size, passing) in zip(sources, counted, strict=True):
        if passing is None:
            yield f"{_name(source)}: {size or 'unknown'} examples before filters"
        elif dropped := size - passing:
            kind = "error" if dropped > _MAX_DROPPED_SHARE * size else "advice"
            yield (
                f"{kind}: {_name(source)}: {dropped} of {size} examples are always dropped: relax the limits (min_*, "
                "max_*, keep) or the bounds of the last bucket"
            )
    left = [size if passing is None else passing for size, passing in counted]
    yield from _epochs(sources, left, batches, ranks)
    if batches and not map_style:
        yield from _check_division(settings, prepared, sum(left), batches, ranks, tokenizer)


def _count(settings: Settings, tokenizer: str | None) -> list[tuple[int, int | None]]:
    """Return each entry's number of examples (0 if unknown), and how many pass the filters (None if unknown)."""
    from sharmill.training.nemo.input_type import entry_size

    whole = resolve_settings(settings) | {"force_finite": True, "num_workers": 0, "sampler_fusion": "round_robin"}
    whole.pop("canonical", None)
    for section in sections_of(whole):
        section |= {
            "use_lhotse": is_read_by_lhotse(section),  # determined before the keys that it depends on are changed
            "force_map_dataset": False, "force_iterable_dataset": True, "drop_last": False,
            "concatenate_samples": False, "use_bucketing": False,  # bins cannot be estimated from few examples
        }  # fmt: skip
    sources = sources_of(prepare_settings(whole, 0, 1))
    sizes = [entry_size(source) if is_divided(source) else 0 for source in sources]
    if sum(sizes) > _MAX_COUNTED or not all(map(is_divided, sources)):
        return [(size, None) for size in sizes]
    places = {seen.place for batch in _open_loader(whole, 0, 1, tokenizer) for seen in batch if seen.place}
    passing = Counter(reader for reader, epoch, *_ in places if epoch == 0)
    return [(size, passing[number]) for number, size in enumerate(sizes)]


def _has_buckets(section: Settings) -> bool:
    """Return True if a sampler has buckets."""
    return any(section.get(key) for key in ("use_bucketing", "bucket_batch_size", "bucket_duration_bins"))


def _setting_errors(prepared: Settings) -> Iterator[str]:
    """Yield an error for each setting that has no effect, or that cannot be applied to codes."""
    for section in sections_of(prepared):
        number, bins = section.get("num_buckets"), section.get("bucket_duration_bins") or ()
        if number is not None and not _has_buckets(section) and "use_bucketing" not in section:
            yield f"error: num_buckets: {number} has no effect without use_bucketing: true: set that too"
        if number is not None and bins and number not in (len(bins), len(bins) + 1):
            yield f"error: num_buckets: {number} has no effect with {len(bins)} bucket_duration_bins: remove one"
        coded = [
            _name(source) for source in sources_of(section) if source["type"] == "sharmill" and any(
                field.endswith(TARGET_CODES) for field in
                source.get("fields") or read_dataset(entry_directory(source)).fields
            )
        ]  # fmt: skip
        if section.get("perturb_speed") and coded:
            yield (
                f"error: perturb_speed changes 2 of 3 examples, but codes cannot be perturbed: read only audio from "
                f"{', '.join(coded)}"
            )


def _buffer_warnings(prepared: Settings, size: int, readers: int) -> Iterator[str]:
    """Yield a sentence for each sampler whose buffers may hold more than half of the data."""
    for section in sections_of(prepared):
        shuffled = _has_buckets(section) or prepared["shuffle"]
        keys = ["bucket_buffer_size"] * _has_buckets(section) + ["shuffle_buffer_size"] * shuffled
        held = readers * sum(section.get(key, loader_schema()[key]) or 0 for key in keys)
        if held > size / 2:
            yield (
                f"{readers} readers buffer up to {held} examples ({' + '.join(keys)} each), more than half of {size}, "
                "so some examples may come epochs late: lower these settings"
            )


def _check_division(
    settings: Settings,
    prepared: Settings,
    size: int,
    batches: list[list[SeenExample]],
    ranks: int,
    tokenizer: str | None,
) -> Iterator[str]:
    """Yield advice and errors about how readers divide the data, unless its size is unknown or very large."""
    if not 0 < size <= _MAX_COUNTED:
        return
    readers = ranks * max(1, int(prepared.get("num_workers", 0)))
    in_batch = sum(map(len, batches)) / len(batches)
    if size < readers * in_batch:
        yield (
            f"advice: {readers} readers (ranks x workers) have {size / readers:.1f} of {size} examples each, but "
            f"a batch has {in_batch:.1f}: use fewer readers"
        )
    if not prepared.get("force_finite", False):
        yield from (f"advice: {sentence}" for sentence in _buffer_warnings(prepared, size, readers))
        return
    ends = [sum(1 for _ in _open_loader(settings, rank, ranks, tokenizer)) for rank in range(ranks)]
    if len(set(ends)) > 1:
        yield (
            f"error: the ranks have {min(ends)} to {max(ends)} batches, so some ranks would wait forever: set "
            "force_map_dataset: true"
        )


def _name(source: Settings) -> str:
    place = next((source[key] for key in _DATA_KEYS if source.get(key) is not None), "")
    return f"{source.get('of_type', source.get('type'))} {place if isinstance(place, str) else '...'}"


def _describe_readers(source: Settings, prepared: Settings, ranks: int, workers: int, *, map_style: bool) -> str:
    if map_style:
        return f"every rank draws the same order, and takes one of {ranks} batches" if ranks > 1 else "read by one rank"
    if not is_divided(source):
        return f"each of {ranks * workers} readers reads all examples in its own order"
    if prepared["shuffle"] and source["shard_seed"] == "trng" and not prepared.get("force_finite", False):
        return f"every rank reads all examples in its own order, each worker 1/{workers} of them"
    return f"{ranks * workers} readers divide one order among them: every example comes once per epoch"


def _padding_report(batches: list[list[SeenExample]]) -> Iterator[str]:
    if not batches:
        yield "error: no batch, because the data end before the first batch is full: reduce the batch size"
        return
    sizes = sorted(len(batch) for batch in batches)
    yield f"{len(batches)} batches of {sizes[0]} to {sizes[-1]} examples"
    seconds = [[piece for seen in batch for piece in seen.seconds] for batch in batches]
    tokens = [[float(seen.tokens) for seen in batch if seen.tokens] for batch in batches]
    for name, lengths in (("audio", seconds), ("tokens", tokens)):
        if padded := sum(len(batch) * max(batch, default=0.0) for batch in lengths):
            yield f"{name}: {100 * (1 - sum(map(sum, lengths)) / padded):.1f} % of the batches is padding"


def _buckets(prepared: Settings, batches: list[list[SeenExample]]) -> Iterator[str]:
    filled = {seen.bucket for batch in batches for seen in batch}
    for number, section in enumerate(sections_of(prepared)):
        bounds = section.get("bucket_duration_bins") or []
        if bounds and section.get("bucket_batch_size") is None:  # with batch sizes, longer examples are dropped
            bounds = [*bounds, "the longest"]
        never = [n for n in range(len(bounds)) if (number, n) not in filled]
        if never:
            names = [
                str(bounds[n]) if isinstance(bounds[n], list) else f"{bounds[n - 1] if n else 0} to {bounds[n]}"
                for n in never
            ]
            yield f"advice: no batch came from these buckets: {', '.join(names)}"


def _epochs(sources: list[Settings], sizes: list[int], batches: list[list[SeenExample]], ranks: int) -> Iterator[str]:
    counts = Counter(seen.place[0] for batch in batches for seen in batch if seen.place is not None)
    divided = [pair for pair in zip(sources, sizes, strict=True) if is_divided(pair[0])]
    for number, (source, size) in enumerate(divided if batches else ()):
        if size:
            per_thousand = 1000 * ranks * counts[number] / len(batches) / size
            yield f"{_name(source)}: {size} examples, {per_thousand:.3g} epochs in 1000 steps"


def stop_and_resume(
    settings: Settings, *, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None
) -> Iterator[str]:
    """Check that a loader resumes exactly: stop and resume it ``num_stops`` times without a model, and yield a report.

    Each round runs every rank in a new process for ``num_batches``, alternating between ``ranks`` and ``then`` ranks.
    No example may occur twice in an epoch. The first resume runs twice, in two new processes, and both must yield the
    same batches. All completed epochs must have the same number of examples as an uninterrupted epoch on a single rank.

    Raises:
        ConfigError: a check failed (``wrong_state``), or the settings do not allow a resume.
    """
    seen: dict[Place, int] = {}
    state: dict[str, Any] = {}
    total = 0
    with new_process("spawn") as first, new_process("spawn") as second:
        for turn in range(num_stops + 1):
            world_size = then if turn % 2 else ranks
            trial = (settings, world_size, num_batches, tokenizer, state if turn else None)
            parts, state = first.submit(_try_ranks, *trial).result()
            differs = turn == 1 and second.submit(_try_ranks, *trial).result()[0] != parts
            refuse((differs, "the same state gave different batches in another process"), code="wrong_state")
            for place in _places(parts):
                if place in seen:
                    raise ConfigError(
                        f"an example of entry {place[0]} was repeated in epoch {place[1]}: it came before stop "
                        f"{seen[place]} and again later, on {world_size} ranks",
                        code="wrong_state",
                    )
                seen[place] = turn + 1
            batches = sum(map(len, parts))
            total += batches
            yield f"{world_size} ranks: {batches} batches, {len(_places(parts))} examples"
        unstopped: Counter[tuple[int, ...]] = Counter()
        if any(progress["epoch"] for progress in state["readers"]):
            # A single rank buffers different examples, so it may need more batches for the same epochs.
            parts, whole = first.submit(_try_ranks, settings, 1, total + num_batches, tokenizer, None).result()
            ended = [reader for reader, progress in enumerate(whole["readers"]) if progress["epoch"]]
            unstopped = Counter(place[:1] for place in _places(parts) if place[0] in ended and place[1] == 0)
    prepared = prepare_settings(settings, 0, ranks)
    with quiet_nemo():
        from sharmill.training.nemo.input_type import entry_size

        size = sum(map(entry_size, sources_of(prepared)))
    readers = max(ranks, then) * max(1, int(prepared.get("num_workers", 0)))
    remedy = next(_buffer_warnings(prepared, size, readers), "increase --batches or --stops to compare whole epochs")
    yield from _check_epochs(Counter(place[:2] for place in seen), state, unstopped, remedy)


def _check_epochs(
    counted: Counter[tuple[int, ...]], state: Mapping[str, Any], unstopped: Counter[tuple[int, ...]], remedy: str
) -> Iterator[str]:
    """Check that all completed epochs have the same number of examples, with or without stops, and yield a report.

    Args:
        counted: numbers of examples by entry and epoch.
        unstopped: numbers of examples by entry in an epoch without stops, if one was completed.
        remedy: advice for entries without a completed epoch.
    """
    for reader, progress in enumerate(state["readers"]):
        counts, expected = [counted[reader, epoch] for epoch in range(progress["epoch"])], unstopped[reader,]
        if not counts:
            yield f"entry {reader}: no epoch was completed; {remedy}"
            continue
        refuse(
            (expected and set(counts) != {expected},
             f"entry {reader} has {expected} examples in an epoch without stops, but {counts} in epochs with stops"),
            (len(set(counts)) > 1, f"entry {reader} has different numbers of examples per epoch: {counts}"),
            code="wrong_state",
        )  # fmt: skip
        compared = "as many as without stops" if expected else "not compared with an epoch without stops"
        yield f"entry {reader}: {len(counts)} whole epochs of {counts[0]} examples, none twice, {compared}"
