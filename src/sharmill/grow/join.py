"""Joining of datasets: appending the shards of one to another in place, and merging several into a new one.

Files of existing shards are not changed. ``add_shards`` describes what a killed process leaves behind.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.fence import refuse_reservations
from sharmill.engine.order import make_stages
from sharmill.engine.unit import name_devices
from sharmill.errors import ConfigError, DamagedShard, refuse
from sharmill.files.atomic import (
    NO_LINKS,
    fsync,
    make_folder,
    open_atomic,
    remove,
    remove_if_empty,
    remove_temp_files,
    require_writable,
)
from sharmill.files.checksums import checksum, hash_text
from sharmill.files.disk import stopping_errors
from sharmill.files.locks import FolderLock
from sharmill.files.staging import STAGING_NAME
from sharmill.files.trust import require_trusted_owner
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig
from sharmill.shar.fields import CUTS, DATASET_FILE, SHARDS_FILE
from sharmill.shar.index import (
    DatasetRecord,
    FieldFile,
    ShardRecord,
    changing_index,
    read_dataset,
    read_shards,
    write_dataset,
    write_shards,
)
from sharmill.shar.json_lines import read_cut_ids
from sharmill.shar.tar import open_field
from sharmill.stages.fields import added_fields
from sharmill.write.config import WriteConfig

# Keys of the record whose values must be equal in all datasets to be joined, each with the remedy if they are not.
_REMEDIES = {
    "fields": "add the missing ones (codecs with sharmill run CONFIG encode), or omit one of the datasets",
    "audio_format": "write one of them again with the other's write.audio_format",
    "sampling_rate": "write one of them again with the other's write.sampling_rate",
    "limits": "contexts were chosen with other limits: match one of them again with the other's",
    "match_precision": "contexts were chosen with another precision: match one of them again with the other's",
}


@dataclass(frozen=True)
class SourceDataset:
    """A finished dataset and its index, read once; shards that are appended to it later are ignored."""

    directory: Path
    record: DatasetRecord
    shards: list[ShardRecord]

    @classmethod
    def read(cls, directory: Path, *, any_tool: bool = False) -> "SourceDataset":
        """Read the index of a dataset.

        Args:
            any_tool: also accept datasets that another tool wrote, with any file names.

        Raises:
            ConfigError: the dataset is not finished, a file of its index is a link, or another tool wrote its files.
            DamagedShard: its index is damaged, or does not list the files of every shard.
        """
        require_trusted_owner(directory, [directory / DATASET_FILE, directory / SHARDS_FILE])
        record = read_dataset(directory)
        shards = list(read_shards(directory, record.num_shards))
        refuse(
            (record.contract != "sharmill" and not any_tool,
             f"{directory} was written by another tool: convert it to a dataset of sharmill first, or read both side "
             "by side in training"),
            code="unlike_datasets",
        )  # fmt: skip
        if len(shards) != record.num_shards:
            raise DamagedShard(f"{directory / SHARDS_FILE} lists {len(shards)} shards instead of {record.num_shards}")
        for index, shard in enumerate(shards if record.contract == "sharmill" else ()):
            expected = {field.name: field.path(index) for field in record.layout}
            if shard.index != index or shard.files != expected or expected.keys() != set(record.fields):
                raise DamagedShard(
                    f"{directory / SHARDS_FILE}: line {index + 1} does not list the files of shard {index}; run "
                    f"sharmill validate {directory} for a full list of damage"
                )
        return cls(directory, record, shards)

    def path(self, shard: ShardRecord, field: str) -> Path:
        """Return the path of a shard's file after checking its size and bytes against the index.

        Raises:
            ConfigError: the path is or contains a link, which may lead to files that their owner did not publish.
            DamagedShard: the file differs from the index, or is missing.
        """
        file = shard.fields[field]
        path = self.directory / file.file
        require_trusted_owner(self.directory, [path])
        if not path.is_file() or path.stat().st_size != file.size or checksum(path) != file.xxh3:
            raise DamagedShard(
                f"{path} differs from the index; run sharmill validate {self.directory} for a full list of damage"
            )
        return path

    def cut_ids(self) -> Iterator[str]:
        """Yield the ids of all cuts, in order.

        Raises:
            ConfigError: as for ``path``.
            DamagedShard: as for ``path``, or a file of cuts cannot be read.
        """
        for shard in self.shards:
            yield from read_cut_ids(self.path(shard, CUTS))


def require_alike(parts: Sequence[SourceDataset]) -> None:
    """Raise ConfigError with the first difference, unless the shards of all datasets in ``parts`` fit into one dataset.

    Datasets without shards have no codes, so they are ignored if any other has shards.
    """
    first, *others = [part for part in parts if part.shards] or parts
    for other in others:
        for what, left, right, remedy in _compare(first.record, other.record):
            told = f"{what} differ: {left!r} in {first.directory}, {right!r} in {other.directory}; {remedy}"
            refuse((left != right, told), code="unlike_datasets")


def _compare(first: DatasetRecord, other: DatasetRecord) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the name of each property that must be equal, its two values, and the remedy if they differ."""
    yield "codecs", [codec.name for codec in first.codecs], [codec.name for codec in other.codecs], _REMEDIES["fields"]
    for key, remedy in _REMEDIES.items():
        yield key, getattr(first, key), getattr(other, key), remedy
    for kind, remedy, pairs in (
        ("codec", "encode one of them again with the other's model", zip(first.codecs, other.codecs, strict=True)),
        ("field", "make the field of one of them again like the other's",
         zip(first.layout, other.layout, strict=True)),
    ):  # fmt: skip
        for one, same in pairs:
            # The path of a model may differ, since its checksum identifies it. Any device is accepted. If a field is
            # optional in one dataset, it is optional in the joined one.
            for key in (key for key in one.__struct_fields__ if key not in ("model", "devices", "optional")):
                yield f"{key} of the {kind} {one.name!r}", getattr(one, key), getattr(same, key), remedy


def require_distinct_ids(parts: Sequence[SourceDataset]) -> None:
    """Raise ConfigError if any cut id occurs twice. Memory use is 8 bytes per id.

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
                    f"duplicate cut {cut_id}: {where or f'in {part.directory}'}; cut ids must be "
                    "unique within a dataset: leave one of the datasets out, or rebuild one without these records",
                    code="duplicate_cut",
                )
            seen[cut_id] = part.directory


@dataclass(frozen=True)
class Grown:
    """A dataset to which the shards of other datasets were added.

    Attributes:
        record: the new record of the dataset.
        first, count: the index of the first new shard, and the number of new shards.
        already: True if an earlier append had already added the shards.
        placed: the numbers of files that were ``linked`` and ``copied``.
    """

    record: DatasetRecord
    first: int
    count: int
    already: bool
    placed: dict[str, int]

    def describe(self, dataset: str | Path, new: str | Path) -> str:
        """Return a one-line description of the result of adding the shards of ``new``."""
        last = self.first + self.count - 1
        if not self.count:
            return f"{dataset}: there is nothing new to append"
        if self.already:
            return f"{dataset}: the shards {self.first} to {last} are already those of {new}"
        hours = self.record.target_seconds / 3600
        return (
            f"{dataset}: appended the shards {self.first} to {last}; {self.placed['linked']} files linked, "
            f"{self.placed['copied']} copied; now {self.record.num_cuts} cuts, {hours:.3f} h"
        )


def add_shards(
    directory: Path, kept: Sequence[ShardRecord], like: DatasetRecord, parts: Sequence[SourceDataset], *, copy: bool
) -> Grown:
    """Add the shards of the datasets in ``parts`` after the existing shards of a directory, and write its index.

    First the lines of ``shards.jsonl`` are written, then the files, and last ``dataset.json``, whose number of shards
    is the commit. Lines beyond that number do not belong to the dataset; they name the files that a killed process may
    have left.

    Args:
        kept: the existing shards.
        like: the record of the dataset, except for its totals.
        copy: copy the files; by default they are hard links, or copies if links are not possible.

    Raises:
        ConfigError: an unrelated file has the name of a new one, or a file of a part is a link.
        DamagedShard: a file of a part is missing or differs from the index.
        FatalError: the dataset cannot be written.
    """
    first = len(kept)
    old = [(part, shard) for part in parts for shard in part.shards]
    new = []
    for index, (part, shard) in enumerate(old, first):
        files = [(field, shard.fields[field.name]) for field in part.record.layout]
        moved = {field.name: FieldFile(field.path(index), file.size, file.xxh3) for field, file in files}
        new.append(msgspec.structs.replace(shard, index=index, fields=moved))
    for file in (file for shard in new for file in shard.fields.values()):
        path = directory / file.file
        refuse(
            (os.path.lexists(path) and not (path.is_file() and checksum(path) == file.xxh3),
             f"{path} does not belong to the dataset but has the name of a file of a new shard: move it away"),
            code="foreign_output",
        )  # fmt: skip
        # A killed append left this file, and another run may have replaced the lines that named it.
        path.unlink(missing_ok=True)
    shards = [*kept, *new]
    record = add_up_shards(like, shards, [part.record for part in parts])
    for name in record.fields:
        make_folder(directory / name)
    write_shards(directory, shards)
    are_links: list[bool] = []
    for (part, shard), placed in zip(old, new, strict=True):
        # Place the cuts last.
        for name in sorted(placed.fields, key=lambda name: name == CUTS):
            are_links.append(_place(part.path(shard, name), directory / placed.fields[name].file, copy=copy))
    for name in record.fields:
        fsync(directory / name)
    write_dataset(directory, record)
    return Grown(
        record, first, len(new), already=False, placed={"linked": sum(are_links), "copied": are_links.count(False)}
    )


def _place(source: Path, target: Path, *, copy: bool) -> bool:
    """Link or copy a file; return True for a link."""
    if not copy:
        try:
            # Do not follow a symbolic link that may have been created in the meantime.
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINKS:
                with stopping_errors(target):
                    raise
        else:
            return True
    with open_field(source) as stream, open_atomic(target) as written:
        shutil.copyfileobj(stream, written, 1 << 20)
    return False


def add_up_shards(
    record: DatasetRecord, shards: list[ShardRecord], others: Iterable[DatasetRecord] = ()
) -> DatasetRecord:
    """Return the record of a dataset with the totals of these shards and the devices of all the datasets."""
    datasets = [record, *others]
    codes = [codec for dataset in datasets for codec in dataset.codecs]
    devices = {codec.name: {device for other in codes if other.name == codec.name for device in other.devices}
               for codec in record.codecs}  # fmt: skip
    optional = {field.name for dataset in datasets for field in dataset.layout if field.optional}
    return msgspec.structs.replace(
        record,
        layout=[msgspec.structs.replace(field, optional=field.name in optional) for field in record.layout],
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


def append_dataset(dataset: str | Path, new: str | Path, *, copy: bool = False) -> Grown:
    """Append the shards of a finished dataset to another, after its last shard.

    Nothing is done if an earlier append has already added the same shards.

    Args:
        dataset: the dataset to append to.
        new: the dataset with the new shards, which is not changed. The two datasets must fit together as for
            ``merge_datasets``.
        copy: copy the files; by default they are hard links, or copies if links are not possible.

    Raises:
        ConfigError: the two datasets do not fit together, a cut is in both, another process is working on the dataset,
            or one of its folders is a link.
        DamagedShard: a file of ``new`` differs from its index.

    Example:
        >>> append_dataset("data/speech", "data/speech-2025").count  # doctest: +SKIP
        12
    """
    directory = Path(dataset)
    part = SourceDataset.read(directory)
    addition = SourceDataset.read(Path(new))
    is_itself = directory.resolve() == addition.directory.resolve()
    refuse((is_itself, f"{directory} cannot be appended to itself"), code="bad_usage")
    require_writable(directory)
    require_trusted_owner(
        directory, (directory / name for name in (STAGING_NAME, *part.record.fields, *addition.record.fields))
    )
    with changing_index(directory):
        refuse_reservations(directory)
        part = SourceDataset.read(directory)
        _remove_leftovers(part, addition)
        first = _find(part.shards, addition.shards)
        if first is not None:
            return Grown(part.record, first, len(addition.shards), already=True, placed={"linked": 0, "copied": 0})
        require_alike([part, addition])
        require_distinct_ids([part, addition])
        # A dataset without shards has no codes yet, so take the record of the addition.
        like = part.record if part.shards else msgspec.structs.replace(addition.record, name=part.record.name)
        return add_shards(directory, part.shards, like, [addition], copy=copy)


def merge_datasets(
    sources: Sequence[str | Path], out: str | Path, *, copy: bool = False, name: str | None = None
) -> Grown:
    """Merge several datasets into a new one, which contains all their shards in order.

    The new dataset is written beside ``out`` and then renamed as a whole, so that an incomplete dataset is never
    visible. The next call removes the leftovers of a killed process.

    Args:
        sources: dataset directories with the same fields, codecs, audio format, rate and limits.
        out: the new dataset directory; it must be absent or empty.
        copy: copy the files; by default they are hard links, or copies if links are not possible.
        name: the name of the new dataset; by default the name of its folder.

    Raises:
        ConfigError: a source is not a finished dataset, they differ, a cut occurs twice, or ``out`` is not empty.
        DamagedShard: a file of a source differs from its index.

    Example:
        >>> merge_datasets(["data/librispeech", "data/hifitts"], "data/both").record.num_shards  # doctest: +SKIP
        21
    """
    out = Path(out).resolve()
    parts = [SourceDataset.read(Path(source)) for source in sources]
    refuse((not parts, "give the datasets to merge"), code="bad_usage")
    staging = out.with_name(f".{out.name}{STAGING_NAME}")
    if not staging.exists():
        # If this folder exists, a killed process left it. It is then removed first, even if that process had almost
        # finished.
        _require_free(out, parts)
    require_alike(parts)
    require_distinct_ids(parts)
    make_folder(out.parent)
    require_trusted_owner(out.parent, [staging / "dataset"])
    with stopping_errors(staging):
        staging.mkdir(exist_ok=True)
    try:
        with FolderLock(staging):
            remove(staging / "dataset")
            _require_free(out, parts)
            # Take the fields and codecs from a part that has shards.
            first = next((part for part in parts if part.shards), parts[0]).record
            like = msgspec.structs.replace(first, name=name or out.name)
            merged = add_shards(staging / "dataset", [], like, parts, copy=copy)
            _require_free(out, parts)
            with stopping_errors(out):
                (staging / "dataset").replace(out)
                fsync(out.parent)
    finally:
        remove_if_empty(staging)
    return merged


def _require_free(out: Path, parts: Sequence[SourceDataset]) -> None:
    refuse(
        *(
            (
                out.is_relative_to(part.directory.resolve()),
                f"{out} is inside the dataset {part.directory}: choose another folder",
            )
            for part in parts
        ),
        code="bad_usage",
    )
    refuse(
        (out.exists() and (not out.is_dir() or any(out.iterdir())),
         f"{out} is not empty: choose another folder, empty it yourself, or add to a dataset with sharmill append"),
        code="foreign_output",
    )  # fmt: skip


def require_fitting(config: Config, directory: Path) -> None:
    """Raise ConfigError, before any work, if a configuration's dataset could not be appended to ``directory``."""
    record = SourceDataset.read(directory).record
    refuse(
        (directory.resolve() == Path(config.dataset_dir).resolve(),
         f"append_to and dataset_dir are both {directory}: choose another dataset_dir for the new shards"),
    )  # fmt: skip
    write, codecs = config.section(WriteConfig), config.section(EncodeConfig).codecs
    added = sorted(
        field.name for fields in added_fields(make_stages(config)).values() for field in fields
        if not field.is_published
    )  # fmt: skip
    wanted: dict[str, tuple[Any, Any]] = {
        "write.audio_format": (write.audio_format, record.audio_format),
        "write.sampling_rate": (write.sampling_rate, record.sampling_rate),
        "match": ((config.has_contexts and "given") or None, (record.has_contexts and "given") or None),
        "encode.codecs": (sorted(codec.name for codec in codecs), [c.name for c in record.codecs]),
        "the list of fields of other stages": (added, [field.name for field in record.added_fields]),
    }
    if (match := config.find(MatchConfig)) is not None:
        for key, limit in record.limits.items():
            own = min_similarity(match) if key == "min_similarity" else getattr(match, key, None)
            wanted[f"match.{key}"] = (own, limit)
    refuse(
        *(
            (
                record.num_shards and value != expected,
                f"{key} is {value!r}, but {directory} has {expected!r}: use the same value",
            )
            for key, (value, expected) in wanted.items()
        ),
        code="unlike_datasets",
    )


def _find(shards: list[ShardRecord], wanted: list[ShardRecord]) -> int | None:
    """Return the first index at which ``shards`` contains all wanted shards, in order and byte for byte, or None."""
    found, contents = (
        [{name: file.xxh3 for name, file in shard.fields.items()} for shard in some] for some in (shards, wanted)
    )
    firsts = range(len(found) - len(contents) + 1)
    return next((first for first in firsts if found[first : first + len(contents)] == contents), None)


def _remove_leftovers(part: SourceDataset, addition: SourceDataset) -> None:
    """Remove the files that a killed append has placed after the last shard, but no other files.

    Lines of ``shards.jsonl`` after the last shard's line name these files. A file is removed only if an append would
    give it this name, and if it has the listed checksum. The lines are removed as well.
    """
    directory = part.directory
    placed = [shard for shard in read_shards(directory) if shard.index >= part.record.num_shards]
    for field in (*addition.record.layout, *part.record.layout) if placed else ():
        files = {directory / field.path(shard.index): shard.fields.get(field.name) for shard in placed}
        remove_temp_files(directory / field.name, {path.name for path in files})
        remove(*(path for path, file in files.items() if file and path.is_file() and checksum(path) == file.xxh3))
    if placed:
        write_shards(directory, part.shards)
