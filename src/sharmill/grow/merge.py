"""A new dataset of the shards of others, which stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sharmill.errors import ConfigError
from sharmill.files.locks import FolderLock
from sharmill.files.staging import STAGING_NAME
from sharmill.files.storage import (
    fsync_directory,
    make_folder,
    refuse_strangers,
    remove_if_empty,
    remove_tree,
    stopping_errors,
)
from sharmill.grow.parts import SourceDataset, require_alike, require_distinct_ids
from sharmill.grow.placing import Placed, add_up_shards, place_shard, renumber, seal_folders
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.index import DatasetRecord, write_dataset, write_shards


@dataclass(frozen=True)
class Merged:
    """The dataset that was made, and how its files came there."""

    record: DatasetRecord
    placed: Placed


def merge_datasets(
    sources: Sequence[str | Path], out: str | Path, *, copy: bool = False, name: str | None = None
) -> Merged:
    """Make a dataset whose shards are those of several, in order.

    It is made beside ``out`` and renamed as a whole, so that there is never a part of it. What a killed process has
    left is removed by the next one.

    Args:
        sources: dataset directories with the same fields, codecs, audio format, rate and limits.
        out: the new dataset directory; it must be absent or empty.
        copy: copy the files; by default they are hard links, or copies where no links are possible.
        name: of the new dataset; by default the name of its folder.

    Raises:
        ConfigError: a source is not a finished dataset, they differ, a cut is there twice, or ``out`` is not empty.
        DamagedShard: a file of a source is not what its index says.

    Example:
        >>> merge_datasets(["data/librispeech", "data/hifitts"], "data/both").record.num_shards  # doctest: +SKIP
        21
    """
    out = Path(out).resolve()
    parts = [SourceDataset.read(Path(source)) for source in sources]
    if not parts:
        raise ConfigError("name the datasets to merge", code="bad_usage")
    staging = out.with_name(f".{out.name}{STAGING_NAME}")
    if not staging.exists():
        # Else what a killed process has left goes first, even where it was killed at its very end.
        _require_free(out, parts)
    require_alike(parts)
    require_distinct_ids(parts)
    make_folder(out.parent)
    refuse_strangers(out.parent, [staging / "dataset"])
    with stopping_errors(staging):
        staging.mkdir(exist_ok=True)
    try:
        with FolderLock(staging):
            remove_tree(staging / "dataset")
            _require_free(out, parts)
            merged = _place_all(parts, staging / "dataset", name or out.name, copy=copy)
            _require_free(out, parts)
            with stopping_errors(out):
                (staging / "dataset").replace(out)
                fsync_directory(out.parent)
    finally:
        remove_if_empty(staging)
    return merged


def _require_free(out: Path, parts: Sequence[SourceDataset]) -> None:
    for part in parts:
        if out.is_relative_to(part.directory.resolve()):
            raise ConfigError(f"{out} lies in the dataset {part.directory}: choose another place", code="bad_usage")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} is not empty: choose another place, empty it yourself, or add to a dataset with sharmill append",
            code="foreign_output",
        )


def _place_all(parts: Sequence[SourceDataset], directory: Path, name: str, *, copy: bool) -> Merged:
    placed = Placed()
    shards = []
    for part, shard, new in renumber(parts):
        place_shard(part, shard, new, directory, placed, copy=copy)
        shards.append(new)
    # One that has shards knows the fields and codecs.
    first = next((part for part in parts if part.shards), parts[0]).record
    record = msgspec.structs.replace(add_up_shards(first, shards, [part.record for part in parts]), name=name)
    for field in record.fields:
        make_folder(directory / field)
    seal_folders(directory, record.fields)
    write_shards(directory, shards)
    write_dataset(directory, record)
    # Reads it back: what was written is a dataset.
    ShardedDataset(directory).require_complete(record, ShardedDataset(directory).shards())
    return Merged(record, placed)
