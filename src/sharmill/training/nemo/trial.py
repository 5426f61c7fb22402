"""Trials of a training loader, without loading audio: ``sharmill doctor train.yaml`` and ``sharmill verify-resume``.

A trial makes the first batches of a rank in this process, or those of all ranks in fresh ones.
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

# So many examples are read to count those that pass the filters.
_MAX_COUNTED: Final = 1_000_000
# More than this share of dropped examples is an error.
_MAX_DROPPED_SHARE: Final = 0.25
# Keys that name the data of an entry; the first one that is set counts.
_DATA_KEYS: Final = (
    "dataset", "paths", "source_paths", "manifest_filepath", "shar_path", "cuts_path", "data_dir",
)  # fmt: skip
# The place of an example: its reader, epoch, group, draw, block and item.
Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """An example of a trial.

    Args:
        place: None for data that are not divided.
        seconds: of each of its pieces of audio.
        tokens: of its text, or of all of it in a conversation; 0 where nothing was tokenized.
        bucket: the sampler, and the bucket that it puts the example into; None where it has no buckets.
    """

    place: Place | None
    seconds: list[float]
    tokens: int
    bucket: tuple[int, int | None]


def count_tokens(cut: Cut) -> int:
    """Return the tokens of a cut's prompt and texts; -1 where there is no text."""
    if hasattr(cut, "input_ids"):
        return len(cut.input_ids)
    counts = [len(one.tokens) for one in cut.supervisions if one.text and one.has_custom("tokens")]
    return sum(counts) if counts else -1


def _open_loader(settings: Settings, rank: int, world_size: int, tokenizer: str | None, **options: Any) -> Any:
    loaded = None if tokenizer is None else PromptTokenizer(load_tokenizer(tokenizer))
    return get_dataloader(settings, rank, world_size, loaded, dataset=SeenExamples(settings), **options)


def _try_rank(
    settings: Settings,
    rank: int,
    world_size: int,
    num_batches: int,
    tokenizer: str | None,
    state: Mapping[str, Any] | None,
) -> tuple[list[list[Seen]], Mapping[str, Any]]:
    """Return the batches that a rank gets first, or after a state, and the state of its loader after them."""
    loader = _open_loader(settings, rank, world_size, tokenizer, resumable=True, state=state)
    return list(islice(loader, num_batches)), loader.state_dict()


def _try_ranks(
    settings: Settings, world_size: int, num_batches: int, tokenizer: str | None, state: Mapping[str, Any] | None
) -> tuple[list[list[list[Seen]]], dict[str, Any]]:
    """Return the batches of each rank, and the merged state: in a new Python, which imports NeMo once for all ranks.

    They run one after the other, each in a copy of that process.
    """
    trials = []
    with quiet_nemo():
        import nemo.collections.common.data.lhotse.dataloader  # noqa: F401

        for rank in range(world_size):
            with new_process("fork") as copy:
                one = copy.submit(_try_rank, settings, rank, world_size, num_batches, tokenizer, state)
                trials.append(one.result())
    return [batches for batches, _ in trials], merge_data_states([state for _, state in trials])


def _places(ranks: Sequence[list[list[Seen]]]) -> list[Place]:
    """Return the places of all examples that ranks got."""
    return [seen.place for batches in ranks for batch in batches for seen in batch if seen.place is not None]


class SeenExamples(torch.utils.data.Dataset):
    """Batches of ``Seen``: no audio is loaded.

    Examples of entries that are not divided have no place, and are taken for those of the first sampler.
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
        # Readers have the numbers of the divided entries, across all samplers.
        self._samplers = [
            number for number, section in enumerate(sections) for source in sources_of(section)
            if is_divided(source)
        ]  # fmt: skip

    def __getitem__(self, examples: Any) -> list[Seen]:
        return [self._look_at(example) for example in examples]

    def _look_at(self, example: Any) -> Seen:
        place = place_of(example)
        tokens = 0
        if isinstance(example, Cut):
            tokens = max(0, count_tokens(example))
        elif getattr(example, "context_ids", None) is not None:
            tokens = example.total_length
        number = 0 if place is None else self._samplers[place[0]]
        bins = self._bins[number]
        bucket = self._constraints[number].select_bucket(bins, example=example) if bins else None
        return Seen(place, [cut.duration for cut in cuts_of(example)], tokens, (number, bucket))


def examine(settings: Settings, *, ranks: int, num_batches: int, tokenizer: str | None) -> Iterator[str]:
    """Yield lines about the settings: facts, ``advice: ...``, and ``error: ...`` for what has to be changed.

    The first rank's ``num_batches`` are made, the examples that pass the filters are counted, and no audio is loaded.

    Raises:
        ConfigError: the loader refuses the settings.
    """
    log, warnings = logging.getLogger("sharmill.training.nemo"), BufferingHandler(capacity=1_000_000)
    log.addHandler(warnings)  # in place of standard error, since each loader of the trial warns anew
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
        yield f"{_name(source)}: {_readers(source, prepared, ranks, workers, map_style=map_style)}"
    if (count := settings.get("canonical")) is not None:
        yield f"canonical: {count} parts, so the same global batches on any number of readers that divides {count}"
    if map_style:
        yield (
            "advice: map style: the main process of every rank reads all manifests, minutes for millions of lines; "
            "force_iterable_dataset: true reads them as a stream, which can be resumed"
        )
    yield from _mistaken(prepared)
    try:
        loader = _open_loader(settings, 0, ranks, tokenizer, resumable=True)
        yield "can be resumed exactly, on other numbers of ranks and workers too"
    except ConfigError as error:
        if error.code != "inexact_state":
            raise
        yield f"advice: cannot be resumed: {error}"
        loader = _open_loader(settings, 0, ranks, tokenizer)
    for sentence in dict.fromkeys(record.getMessage() for record in warnings):
        yield f"advice: {sentence}"
    batches = list(islice(loader, num_batches))
    yield from _filling(batches)
    if 0 < len(batches) < num_batches:
        yield f"the epoch of the first rank ends after {len(batches)} batches"
    yield from _buckets(prepared, batches)
    counted = _count(settings, tokenizer)
    for source, (size, passing) in zip(sources, counted, strict=True):
        if passing is None:
            yield f"{_name(source)}: {size or 'unknown'} examples; those that pass the filters are not counted"
        elif dropped := size - passing:
            kind = "error" if dropped > _MAX_DROPPED_SHARE * size else "advice"
            yield (
                f"{kind}: {_name(source)}: {dropped} of {size} examples never come: loosen the limits (min_*, max_*, "
                "keep) or the bounds of the last bucket, which leave them out"
            )
    left = [size if passing is None else passing for size, passing in counted]
    yield from _epochs(sources, left, batches, ranks)
    if batches and not map_style:
        yield from _check_division(settings, prepared, sum(left), batches, ranks, tokenizer)


def _count(settings: Settings, tokenizer: str | None) -> list[tuple[int, int | None]]:
    """Return how many examples each entry has (0 if unknown), and how many pass the filters (None if not counted)."""
    from sharmill.training.nemo.input_type import entry_size

    whole = resolve_settings(settings) | {"force_finite": True, "num_workers": 0, "sampler_fusion": "round_robin"}
    whole.pop("canonical", None)
    for section in sections_of(whole):
        section |= {
            "use_lhotse": is_read_by_lhotse(section),  # without regard to the keys that are changed here
            "force_map_dataset": False, "force_iterable_dataset": True, "drop_last": False,
            "concatenate_samples": False, "use_bucketing": False,  # without estimates of few examples
        }  # fmt: skip
    sources = sources_of(prepare_settings(whole, 0, 1))
    sizes = [entry_size(source) if is_divided(source) else 0 for source in sources]
    if sum(sizes) > _MAX_COUNTED or not all(map(is_divided, sources)):
        return [(size, None) for size in sizes]
    places = {seen.place for batch in _open_loader(whole, 0, 1, tokenizer) for seen in batch if seen.place}
    passing = Counter(reader for reader, epoch, *_ in places if epoch == 0)
    return [(size, passing[number]) for number, size in enumerate(sizes)]


def _has_buckets(section: Settings) -> bool:
    """Return True if NeMo makes buckets for a sampler."""
    return any(section.get(key) for key in ("use_bucketing", "bucket_batch_size", "bucket_duration_bins"))


def _mistaken(prepared: Settings) -> Iterator[str]:
    """Yield settings that have no effect, or make no batch."""
    for section in sections_of(prepared):
        number, bins = section.get("num_buckets"), section.get("bucket_duration_bins") or ()
        if number is not None and not _has_buckets(section) and "use_bucketing" not in section:
            yield f"error: num_buckets: {number} makes no buckets: set use_bucketing: true as well"
        if number is not None and bins and number not in (len(bins), len(bins) + 1):
            yield f"error: num_buckets: {number} has no effect beside {len(bins)} bucket_duration_bins: leave out one"
        coded = [
            _name(source) for source in sources_of(section) if source["type"] == "sharmill" and any(
                field.endswith(TARGET_CODES) for field in
                source.get("fields") or read_dataset(entry_directory(source)).fields
            )
        ]  # fmt: skip
        if section.get("perturb_speed") and coded:
            yield (
                f"error: perturb_speed changes 2 of 3 examples, and codes cannot follow: read audio alone of "
                f"{', '.join(coded)}"
            )


def _held_back(prepared: Settings, size: int, readers: int) -> Iterator[str]:
    """Yield a sentence for each sampler whose buffers hold back more than half of the data."""
    for section in sections_of(prepared):
        shuffled = _has_buckets(section) or prepared["shuffle"]
        keys = ["bucket_buffer_size"] * _has_buckets(section) + ["shuffle_buffer_size"] * shuffled
        held = readers * sum(section.get(key, loader_schema()[key]) or 0 for key in keys)
        if held > size / 2:
            yield (
                f"{readers} readers hold back up to {held} examples ({' + '.join(keys)} each), more than half of "
                f"{size}, so that some come epochs late: lower them"
            )


def _check_division(
    settings: Settings, prepared: Settings, size: int, batches: list[list[Seen]], ranks: int, tokenizer: str | None
) -> Iterator[str]:
    """Yield what goes wrong if so many readers divide the data, as far as their size is known."""
    if not 0 < size <= _MAX_COUNTED:
        return
    readers = ranks * max(1, int(prepared.get("num_workers", 0)))
    in_batch = sum(map(len, batches)) / len(batches)
    if size < readers * in_batch:
        yield (
            f"advice: {readers} readers (ranks x workers) have {size / readers:.1f} of {size} examples each, and "
            f"a batch has {in_batch:.1f}: use fewer"
        )
    if not prepared.get("force_finite", False):
        yield from (f"advice: {sentence}" for sentence in _held_back(prepared, size, readers))
        return
    ends = [sum(1 for _ in _open_loader(settings, rank, ranks, tokenizer)) for rank in range(ranks)]
    if len(set(ends)) > 1:
        yield (
            f"error: the ranks have {min(ends)} to {max(ends)} batches, so that some would wait for ever: "
            "set force_map_dataset: true"
        )


def _name(source: Settings) -> str:
    place = next((source[key] for key in _DATA_KEYS if source.get(key) is not None), "")
    return f"{source.get('of_type', source.get('type'))} {place if isinstance(place, str) else '...'}"


def _readers(source: Settings, prepared: Settings, ranks: int, workers: int, *, map_style: bool) -> str:
    if map_style:
        return f"every rank draws the same order, and takes one batch in {ranks}" if ranks > 1 else "all"
    if not is_divided(source):
        return f"each of {ranks * workers} readers reads all of it, in an order of its own"
    if prepared["shuffle"] and source["shard_seed"] == "trng" and not prepared.get("force_finite", False):
        return f"every rank reads all of it in an order of its own, each worker 1/{workers}"
    return f"one order, of which each of {ranks * workers} readers has its part: every example once per epoch"


def _filling(batches: list[list[Seen]]) -> Iterator[str]:
    if not batches:
        yield "error: no batch: the data end before the first is full"
        return
    sizes = sorted(len(batch) for batch in batches)
    yield f"{len(batches)} batches of {sizes[0]} to {sizes[-1]} examples"
    seconds = [[piece for seen in batch for piece in seen.seconds] for batch in batches]
    tokens = [[float(seen.tokens) for seen in batch if seen.tokens] for batch in batches]
    for name, lengths in (("audio", seconds), ("tokens", tokens)):
        if padded := sum(len(batch) * max(batch, default=0.0) for batch in lengths):
            yield f"{name}: {100 * (1 - sum(map(sum, lengths)) / padded):.1f} % of the batches is padding"


def _buckets(prepared: Settings, batches: list[list[Seen]]) -> Iterator[str]:
    filled = {seen.bucket for batch in batches for seen in batch}
    for number, section in enumerate(sections_of(prepared)):
        bounds = section.get("bucket_duration_bins") or []
        if bounds and section.get("bucket_batch_size") is None:  # else longer examples are left out
            bounds = [*bounds, "the longest"]
        never = [n for n in range(len(bounds)) if (number, n) not in filled]
        if never:
            told = [
                str(bounds[n]) if isinstance(bounds[n], list) else f"{bounds[n - 1] if n else 0} to {bounds[n]}"
                for n in never
            ]
            yield f"advice: buckets that no batch came from: {', '.join(told)}"


def _epochs(sources: list[Settings], sizes: list[int], batches: list[list[Seen]], ranks: int) -> Iterator[str]:
    counts = Counter(seen.place[0] for batch in batches for seen in batch if seen.place is not None)
    divided = [pair for pair in zip(sources, sizes, strict=True) if is_divided(pair[0])]
    for number, (source, size) in enumerate(divided if batches else ()):
        if size:
            per_thousand = 1000 * ranks * counts[number] / len(batches) / size
            yield f"{_name(source)}: {size} examples, {per_thousand:.3g} epochs in 1000 steps"


def stop_and_resume(
    settings: Settings, *, ranks: int, then: int, num_batches: int, num_stops: int, tokenizer: str | None
) -> Iterator[str]:
    """Train without a model: stop after ``num_batches`` of each rank, and go on, ``num_stops`` times; yield lines.

    Every rank is a process of its own each time; odd times there are ``ranks`` of them, even times ``then``. No example
    may come twice in an epoch, and the first resume, done twice by two Pythons, must give the same batches. Epochs that
    end must have as many examples as each other, and as one of a single rank that was never stopped.

    Raises:
        ConfigError: ``wrong_state`` where that is not so; or the settings cannot go on at all.
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
            refuse((differs, "the same state gave other batches in other processes"), code="wrong_state")
            for place in _places(parts):
                if place in seen:
                    raise ConfigError(
                        f"an example of entry {place[0]} came in epoch {place[1]} before stop {seen[place]} and after "
                        f"it once more, on {world_size} ranks",
                        code="wrong_state",
                    )
                seen[place] = turn + 1
            batches = sum(map(len, parts))
            total += batches
            yield f"{world_size} ranks: {batches} batches, {len(_places(parts))} examples"
        unstopped: Counter[tuple[int, ...]] = Counter()
        if any(progress["epoch"] for progress in state["readers"]):
            # As many batches, and some more, since one rank holds back other examples.
            parts, whole = first.submit(_try_ranks, settings, 1, total + num_batches, tokenizer, None).result()
            ended = [reader for reader, progress in enumerate(whole["readers"]) if progress["epoch"]]
            unstopped = Counter(place[:1] for place in _places(parts) if place[0] in ended and place[1] == 0)
    prepared = prepare_settings(settings, 0, ranks)
    with quiet_nemo():
        from sharmill.training.nemo.input_type import entry_size

        size = sum(map(entry_size, sources_of(prepared)))
    readers = max(ranks, then) * max(1, int(prepared.get("num_workers", 0)))
    remedy = next(_held_back(prepared, size, readers), "take more --batches or --stops to compare whole ones")
    yield from _check_epochs(Counter(place[:2] for place in seen), state, unstopped, remedy)


def _check_epochs(
    counted: Counter[tuple[int, ...]], state: Mapping[str, Any], unstopped: Counter[tuple[int, ...]], remedy: str
) -> Iterator[str]:
    """Compare the epochs that ended: which examples an epoch has does not depend on where it was stopped.

    Args:
        counted: the examples of each entry and epoch.
        unstopped: the examples of each entry in an epoch without stops, if one ended.
        remedy: what to do if no epoch ended.
    """
    for reader, progress in enumerate(state["readers"]):
        counts, expected = [counted[reader, epoch] for epoch in range(progress["epoch"])], unstopped[reader,]
        if not counts:
            yield f"entry {reader}: no epoch ended; {remedy}"
            continue
        refuse(
            (expected and set(counts) != {expected},
             f"entry {reader} has {expected} examples in an epoch without stops, and {counts} in those with stops"),
            (len(set(counts)) > 1, f"entry {reader} had {counts[0]} examples in its first epoch and {counts} in all"),
            code="wrong_state",
        )  # fmt: skip
        compared = "as many as without stops" if expected else "not compared with an epoch without stops"
        yield f"entry {reader}: {len(counts)} whole epochs of {counts[0]} examples, none twice, {compared}"
