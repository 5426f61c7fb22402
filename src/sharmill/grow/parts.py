"""Finished datasets that become parts of a larger one, and the check that they can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sharmill.errors import ConfigError
from sharmill.shar.cut_lines import read_cut_ids
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import CodecRecord, DatasetRecord, ShardRecord
from sharmill.shar.layout import CUTS, Field

# What must be the same in all parts, with the sentence that says what to do where it is not.
_REMEDIES = {
    "fields": "add what is missing, codecs with sharmill run CONFIG encode, or leave one of them out",
    "audio_format": "write one of them again with the other's write.audio_format",
    "sampling_rate": "write one of them again with the other's write.sampling_rate",
    "limits": "contexts were chosen by other limits: match one of them again with the other's",
    "match_precision": "contexts were chosen by other arithmetic: match one of them again with the other's precision",
}
_SAME = {
    "codec": "encode one of them again with the other's model",
    "field": "make the field of one of them again as that of the other",
}


@dataclass(frozen=True)
class SourceDataset:
    """A finished dataset with its index, read once: what is appended to it later does not count."""

    directory: Path
    record: DatasetRecord
    shards: list[ShardRecord]

    @classmethod
    def read(cls, directory: Path) -> SourceDataset:
        """Read the index of a dataset.

        Raises:
            ConfigError: it is not a finished dataset, or another tool wrote its files.
            DamagedShard: its index is damaged, or does not name the files of every shard.
        """
        dataset = ShardedDataset(directory)
        record, shards = dataset.record(), dataset.shards()
        if record.contract != "sharmill":
            raise ConfigError(
                f"{directory} was written by another tool: make a dataset of sharmill's own of it first, or read both "
                "side by side in training",
                code="unlike_datasets",
            )
        dataset.require_complete(record, shards)
        return cls(directory, record, shards)

    def cut_ids(self) -> Iterator[str]:
        """Yield the ids of all cuts, in order.

        Raises:
            DamagedShard: a file of cuts cannot be read.
        """
        for shard in self.shards:
            yield from read_cut_ids(self.directory / shard.fields[CUTS].file)


def require_alike(parts: Sequence[SourceDataset]) -> None:
    """Raise ConfigError, with what differs first, unless the shards of all parts can stand in one dataset.

    A part without shards has no codes, so that its codecs do not count.
    """
    first, *others = [part for part in parts if part.shards] or parts
    for other in others:
        names = [[codec.name for codec in part.record.codecs] for part in (first, other)]
        if names[0] != names[1]:
            raise _unlike(first, other, "codecs", names, _REMEDIES["fields"])
        for key, remedy in _REMEDIES.items():
            values = [getattr(part.record, key) for part in (first, other)]
            if values[0] != values[1]:
                raise _unlike(first, other, key, values, remedy)
        for codec, same in zip(first.record.codecs, other.record.codecs, strict=True):
            _require_same(first, other, "codec", codec, same)
        for field, same_field in zip(first.record.layout, other.record.layout, strict=True):
            _require_same(first, other, "field", field, same_field)


def _require_same(
    first: SourceDataset, other: SourceDataset, what: str, one: CodecRecord | Field, same: CodecRecord | Field
) -> None:
    for key in one.__struct_fields__:
        left, right = getattr(one, key), getattr(same, key)
        # A model may lie in another place; its checksum says whether it is the same. Any device will do.
        if key not in ("model", "devices") and left != right:
            raise _unlike(first, other, f"{key} of the {what} {one.name!r}", [left, right], _SAME[what])


def _unlike(first: SourceDataset, other: SourceDataset, what: str, values: Sequence[Any], remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} differ: {values[0]!r} in {first.directory}, {values[1]!r} in {other.directory}; {remedy}",
        code="unlike_datasets",
    )


def require_distinct_ids(parts: Sequence[SourceDataset]) -> None:
    """Raise ConfigError with a cut id that occurs twice. Of each id, 8 bytes are in memory.

    Raises:
        DamagedShard: a file of cuts cannot be read.
    """
    hashes = np.sort(np.fromiter((hash_text(cut_id) for part in parts for cut_id in part.cut_ids()), np.uint64))
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    seen: dict[str, Path] = {}
    for part in parts if repeated else ():
        for cut_id in part.cut_ids():
            if hash_text(cut_id) not in repeated:
                continue
            # Different ids may have the same hash.
            if cut_id in seen:
                where = f"in {seen[cut_id]} and in {part.directory}" if seen[cut_id] != part.directory else ""
                raise ConfigError(
                    f"the cut {cut_id} is there twice: {where or f'in {part.directory}'}; every cut of a dataset needs "
                    "an id of its own: leave one of the datasets out, or make it anew without these records",
                    code="duplicate_cut",
                )
            seen[cut_id] = part.directory


def hash_text(text: str) -> int:
    """Return 64 bits that tell one text from another."""
    return xxhash.xxh3_64_intdigest(text.encode())
