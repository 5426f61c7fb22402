"""A sample of the cuts of a dataset: what their audio and codes say, and pairs that are worth hearing.

The same dataset gives the same sample: it is drawn by the checksum of the index. Items that cannot be read are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from sharmill.audio.sound import Sound, measure_sound
from sharmill.errors import DamagedShard, RejectRecord
from sharmill.inspect.stored import StoredCut, read_codes, read_shard, read_stored_audio, read_stored_cut
from sharmill.shar.histograms import CutMeasures, cut_values, sound_values
from sharmill.shar.index import CodecRecord, DatasetRecord, ShardRecord
from sharmill.shar.items import Item, ItemTable
from sharmill.shar.layout import CONTEXT_AUDIO, TARGET_CODES, codes_field

_MAX_SHARDS: Final = 12
_MAX_CUTS_PER_SHARD: Final = 2000
# Of which the audio is decoded, and the codes counted.
_MEASURED: Final = 240
_COUNTED: Final = 3000
_RANDOM_PAIRS: Final = 10
_WORST_PAIRS: Final = 4


@dataclass(frozen=True)
class Pair:
    """A cut to listen to, and the reasons for which it was chosen."""

    stored: StoredCut
    reasons: list[str]
    values: dict[str, float]


@dataclass
class DatasetSample:
    """The finds in a sample of shards.

    Attributes:
        measures: of the cuts in the sampled shards; those of audio are of fewer.
        context_uses: how often each context occurs in these shards, by its id.
        speakers: seconds of target audio by speaker in these shards.
        code_counts: for each codec how often each code was seen (codebooks, codebook size).
        unreadable: how many items could not be read, by what was wrong.
    """

    num_shards: int
    num_cuts: int
    measures: CutMeasures
    context_uses: Counter[str] = field(default_factory=Counter)
    speakers: dict[str, float] = field(default_factory=dict)
    code_counts: dict[str, np.ndarray] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    unreadable: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """Return a phrase that says how large the sample is."""
        return f"a sample of {self.num_cuts:,} cuts in {self.num_shards:,} shards"


def sample_dataset(
    directory: Path, record: DatasetRecord, shards: Sequence[ShardRecord], seed: str, *,
    measures: CutMeasures | None, counted: Collection[str],
) -> DatasetSample:  # fmt: skip
    """Return a sample of a dataset.

    Args:
        seed: the checksum of the index.
        measures: of all cuts, where a run directory has them: they name the extreme cuts, and those of audio are not
            taken from the sample.
        counted: codecs whose codes a run directory has counted, which need not be counted in the sample.
    """
    rng = np.random.default_rng(list(seed.encode()))
    filled = [shard for shard in shards if shard.count]
    chosen = [filled[n] for n in sorted(rng.permutation(len(filled))[:_MAX_SHARDS].tolist())]
    sample = DatasetSample(len(chosen), 0, CutMeasures())
    cuts: list[tuple[ShardRecord, int, dict[str, Any]]] = []
    for shard in chosen:
        try:
            found = list(read_shard(directory, shard))[:_MAX_CUTS_PER_SHARD]
        except DamagedShard as error:
            sample.unreadable[str(error)] += shard.count
            continue
        sample.measures.add(CutMeasures.of([cut_values(cut) for cut in found], shard.index))
        cuts += [(shard, number, cut) for number, cut in enumerate(found)]
    sample.num_cuts = len(cuts)
    _count_names(sample, cuts)
    order = rng.permutation(len(cuts)).tolist()
    if measures is None or not measures.has_sound:
        _measure_audio(sample, directory, record, [cuts[n] for n in sorted(order[:_MEASURED])])
    unknown = [codec for codec in record.codecs if codec.name not in counted]
    _count_codes(sample, directory, unknown, [cuts[n] for n in sorted(order[:_COUNTED])])
    random = [(cuts[n][0].index, cuts[n][1]) for n in order[:_RANDOM_PAIRS]]
    reasons: dict[tuple[int, int], list[str]] = {place: ["random"] for place in random}
    for name, places in _worst(sample, measures, cuts).items():
        for place in places[:_WORST_PAIRS]:
            reasons.setdefault(place, []).append(name)
    by_index = {shard.index: shard for shard in shards}
    for (index, number), names in reasons.items():
        if (of_index := by_index.get(index)) is None:
            # The run directory is not that of this dataset, or its files are damaged.
            sample.unreadable[f"{directory} has no shard {index}, of which the run directory names a cut"] += 1
            continue
        try:
            stored = read_stored_cut(directory, of_index, number)
        except DamagedShard as error:
            sample.unreadable[str(error)] += 1
            continue
        sample.pairs.append(Pair(stored, names, _pair_values(sample, stored, record)))
    return sample


def context_name(cut: Mapping[str, Any]) -> str | None:
    """Return what tells the context of a cut from others."""
    try:
        custom = cut["supervisions"][0]["custom"]
        return f"{custom['context_audio_filepath']} {custom['context_audio_offset']}"
    except (LookupError, TypeError):
        return None


def _count_names(sample: DatasetSample, cuts: Sequence[tuple[ShardRecord, int, dict[str, Any]]]) -> None:
    for _, _, cut in cuts:
        if (name := context_name(cut)) is not None:
            sample.context_uses[name] += 1
        supervisions = cut.get("supervisions")
        if isinstance(supervisions, list) and supervisions and isinstance(supervisions[0], dict):
            seconds = cut_values(cut).get("duration", 0.0)
            speaker = str(supervisions[0].get("speaker"))
            sample.speakers[speaker] = sample.speakers.get(speaker, 0.0) + seconds


def _worst(
    sample: DatasetSample, measures: CutMeasures | None, cuts: Sequence[tuple[ShardRecord, int, dict[str, Any]]]
) -> dict[str, list[tuple[int, int]]]:
    """Return the places, shard and number, of cuts that are worth hearing, by what they are worth it for."""
    of_all = {name: found for name, found in (measures.extremes if measures else {}).items() if found}
    worst = {
        name: [(shard, number) for _, shard, number in found]
        for name, found in (sample.measures.extremes | of_all).items()
    }
    most_used = [name for name, uses in sample.context_uses.most_common(_WORST_PAIRS) if uses > 1]
    first: dict[str | None, tuple[int, int]] = {}
    for shard, number, cut in cuts:
        first.setdefault(context_name(cut), (shard.index, number))
    worst["most used context"] = [first[name] for name in most_used]
    return worst


def _items(
    sample: DatasetSample, directory: Path, field: str, cuts: Sequence[tuple[ShardRecord, int, dict[str, Any]]]
) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield shard and number of cuts, in their order, and their items in a field; each archive is opened once."""
    table: ItemTable | None = None
    opened: ShardRecord | None = None
    try:
        for shard, number, _ in cuts:
            if shard is not opened:
                if table is not None:
                    table.close()
                table, opened = None, shard
                try:
                    table = ItemTable(directory / shard.fields[field].file) if field in shard.fields else None
                except DamagedShard as error:
                    sample.unreadable[str(error)] += 1
            if table is None or number >= len(table):
                continue
            try:
                item = table.item(number)
            except DamagedShard as error:
                sample.unreadable[str(error)] += 1
                continue
            if item.data is not None:
                yield (shard.index, number), item
    finally:
        if table is not None:
            table.close()


def _measure_audio(
    sample: DatasetSample, directory: Path, record: DatasetRecord,
    cuts: Sequence[tuple[ShardRecord, int, dict[str, Any]]],
) -> None:  # fmt: skip
    """Add the measures of the audio of some cuts."""
    found: dict[str, dict[tuple[int, int], Sound]] = {}
    for name in record.audio_fields:
        items = _items(sample, directory, name, cuts)
        found[name] = {place: sound for place, item in items if (sound := _sound_of(sample, item)) is not None}
    targets, contexts = found[record.audio_fields[0]], found.get(CONTEXT_AUDIO, {})
    for index, numbers in groupby(sorted(targets), key=itemgetter(0)):
        rows: dict[int, dict[str, float]] = {
            number: sound_values(targets[index, number], contexts.get((index, number))) for _, number in numbers
        }
        of_shard = [rows.get(number, {}) for number in range(max(rows) + 1)]
        sample.measures.add(CutMeasures.of(of_shard, index))


def _sound_of(sample: DatasetSample, item: Item) -> Sound | None:
    """Return the measures of stored audio, or count it among what cannot be read."""
    try:
        samples, rate = read_stored_audio(item)
    except (DamagedShard, RejectRecord) as error:
        sample.unreadable[f"{item.cut_id}: {error}"] += 1
        return None
    return measure_sound(samples, rate)


def _pair_values(sample: DatasetSample, stored: StoredCut, record: DatasetRecord) -> dict[str, float]:
    """Return the values of a cut that is on the page, those of its audio too."""
    sounds = [
        _sound_of(sample, item) if (item := stored.items.get(name)) is not None and item.data is not None else None
        for name in record.audio_fields
    ]
    return cut_values(stored.cut) | sound_values(sounds[0], sounds[1] if len(sounds) > 1 else None)


def _count_codes(
    sample: DatasetSample, directory: Path, codecs: Sequence[CodecRecord],
    cuts: Sequence[tuple[ShardRecord, int, dict[str, Any]]],
) -> None:  # fmt: skip
    """Count the codes of codecs in the targets."""
    for codec in codecs:
        size = codec.codebook_size
        if codec.num_codebooks * size > 1 << 24:
            continue
        counts = np.zeros((codec.num_codebooks, size), np.int64)
        for _, item in _items(sample, directory, codes_field(codec.name, TARGET_CODES), cuts):
            try:
                codes = read_codes(item)
            except DamagedShard as error:
                sample.unreadable[str(error)] += 1
                continue
            if len(codes) != len(counts) or (codes.size and not 0 <= codes.min() <= codes.max() < size):
                sample.unreadable[f"{item.cut_id}: codes beyond the codebooks"] += 1
                continue
            for row, book in zip(codes, counts, strict=True):
                book += np.bincount(row, minlength=size)
        sample.code_counts[codec.name] = counts
