"""Files of finished shards under another index: as hard links or as copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sharmill.engine.unit import name_devices
from sharmill.errors import DamagedShard
from sharmill.files.storage import NO_LINKS, fsync_directory, make_folder, open_atomic, stopping_errors
from sharmill.grow.parts import SourceDataset
from sharmill.shar.index import DatasetRecord, FieldFile, ShardRecord
from sharmill.shar.layout import CUTS
from sharmill.shar.tar import open_field


@dataclass
class Placed:
    """The number of files that were linked, and of those that were copied."""

    linked: int = 0
    copied: int = 0


def renumber(
    parts: Iterable[SourceDataset], first: int = 0
) -> Iterator[tuple[SourceDataset, ShardRecord, ShardRecord]]:
    """Yield each shard of the parts: its part, its record there, and its record under the next index from ``first``."""
    index = first
    for part in parts:
        for shard in part.shards:
            files = [(field, shard.fields[field.name]) for field in part.record.layout]
            fields = {field.name: FieldFile(field.path(index), file.size, file.xxh3) for field, file in files}
            yield part, shard, msgspec.structs.replace(shard, index=index, fields=fields)
            index += 1


def place_shard(
    part: SourceDataset, shard: ShardRecord, new: ShardRecord, directory: Path, placed: Placed, *, copy: bool
) -> None:
    """Put the files of a shard into a dataset directory under their new names, the cuts last.

    Raises:
        DamagedShard: a file is not there, or has another size than the index says.
        FatalError: it cannot be written.
    """
    for name in sorted(new.fields, key=lambda name: name == CUTS):
        source, target = part.directory / shard.fields[name].file, directory / new.fields[name].file
        size = source.stat().st_size if source.is_file() else None
        if size != shard.fields[name].size:
            found = "it is not there" if size is None else f"{size} bytes instead of {shard.fields[name].size}"
            raise DamagedShard(f"{source}: {found}; sharmill validate {part.directory} tells all damage")
        _place(source, target, placed, copy=copy)


def seal_folders(directory: Path, fields: Iterable[str]) -> None:
    """Make the files that were placed in the folders of fields outlast a loss of power."""
    for name in fields:
        fsync_directory(directory / name)


def _place(source: Path, target: Path, placed: Placed, *, copy: bool) -> None:
    make_folder(target.parent)
    if not copy:
        try:
            # A link to the file itself, also where the source is a symbolic link.
            os.link(source.resolve(), target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                with stopping_errors(target):
                    raise
        else:
            placed.linked += 1
            return
    with open_field(source) as stream, open_atomic(target) as written:
        shutil.copyfileobj(stream, written, 1 << 20)
    placed.copied += 1


def add_up_shards(
    record: DatasetRecord, shards: list[ShardRecord], others: Iterable[DatasetRecord] = ()
) -> DatasetRecord:
    """Return the record of a dataset with the totals of these shards, and the devices of the other datasets as well."""
    datasets = [record, *others]
    codes = [codec for dataset in datasets for codec in dataset.codecs]
    devices = {codec.name: {device for other in codes if other.name == codec.name for device in other.devices}
               for codec in record.codecs}  # fmt: skip
    return msgspec.structs.replace(
        record,
        codecs=[msgspec.structs.replace(codec, devices=sorted(devices[codec.name])) for codec in record.codecs],
        match_devices=name_devices(
            kind
            for dataset in datasets
            for kind in dataset.match_devices or (["cpu"] if dataset.context_seconds else [])
        ),
        num_shards=len(shards),
        num_cuts=sum(shard.count for shard in shards),
        target_seconds=round(sum(shard.target_seconds for shard in shards), 3),
        context_seconds=round(sum(shard.context_seconds for shard in shards), 3),
    )
