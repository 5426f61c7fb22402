"""Shards of one dataset appended to another, in place: old files stay as they are.

The new files come first, then ``shards.jsonl``, and last ``dataset.json``, which counts the shards: that is the commit.
Readers take as many lines of ``shards.jsonl`` as it counts, so whatever a killed append leaves is the old dataset or
the new one. A note in the staging folder says which shards were being placed; the next append removes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.reservations import refuse_reservations
from sharmill.errors import ConfigError
from sharmill.files.staging import STAGING_NAME
from sharmill.files.storage import (
    PROBE,
    make_folder,
    refuse_strangers,
    remove_asides,
    remove_if_empty,
    remove_tree,
    require_writable,
    write_atomic,
)
from sharmill.files.stored import NOT_JSON, read_stored
from sharmill.grow.parts import SourceDataset, require_alike, require_distinct_ids
from sharmill.grow.placing import Placed, add_up_shards, place_shard, renumber, seal_folders
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig
from sharmill.shar.index import DatasetRecord, ShardRecord, changing_index, write_dataset, write_shards
from sharmill.write.config import WriteConfig
from sharmill.write.fields import added_fields

NOTE_NAME = "append.json"


# More were never placed by one append; a note that says so would have them looked for one by one.
_MAX_SHARDS: Final = 10_000_000


class _Note(msgspec.Struct, frozen=True):
    """The shards that an append is placing: the index of the first one, how many there are, and their fields."""

    first: int
    count: int
    fields: list[str]


@dataclass(frozen=True)
class Appended:
    """The outcome of an append.

    Attributes:
        record: of the dataset now.
        first, count: which shards are the new ones.
        already: an earlier append had added them.
    """

    record: DatasetRecord
    first: int
    count: int
    already: bool = False
    placed: Placed = field(default_factory=Placed)

    def describe(self, dataset: str | Path, new: str | Path) -> str:
        """Return what became of the shards of ``new``, in one line."""
        last = self.first + self.count - 1
        if not self.count:
            return f"{dataset}: there is nothing new to append"
        if self.already:
            return f"{dataset}: the shards {self.first} to {last} are those of {new} already"
        return (
            f"{dataset}: appended the shards {self.first} to {last}; {self.placed.linked} files linked, "
            f"{self.placed.copied} copied; now {self.record.num_cuts} cuts, {self.record.target_seconds / 3600:.3f} h"
        )


def append_dataset(dataset: str | Path, new: str | Path, *, copy: bool = False) -> Appended:
    """Append the shards of a finished dataset to another, behind its last shard.

    Nothing is done where an earlier append has added the same shards.

    Args:
        dataset: the dataset that grows.
        new: the dataset with the new shards, which stays as it is; it must agree with the other as for a merge.
        copy: copy the files; by default they are hard links, or copies where no links are possible.

    Raises:
        ConfigError: the two do not fit, a cut is in both, another process is at work on the dataset, or a folder of it
            is a link.
        DamagedShard: a file of ``new`` is not what its index says.

    Example:
        >>> append_dataset("data/speech", "data/speech-2025").count  # doctest: +SKIP
        12
    """
    directory = Path(dataset)
    part = SourceDataset.read(directory)
    addition = SourceDataset.read(Path(new))
    if directory.resolve() == addition.directory.resolve():
        raise ConfigError(f"{directory} cannot be appended to itself", code="bad_usage")
    require_writable(directory)
    names = (STAGING_NAME, *part.record.fields, *addition.record.fields)
    refuse_strangers(directory, (directory / name for name in names))
    with changing_index(directory):
        refuse_reservations(directory)
        part = SourceDataset.read(directory)
        _remove_leftovers(part)
        first = _find(part.shards, addition.shards)
        if first is not None:
            return Appended(part.record, first, len(addition.shards), already=True)
        require_alike([part, addition])
        require_distinct_ids([part, addition])
        return _append(part, addition, copy=copy)


def require_fitting(config: Config, directory: Path) -> None:
    """Raise ConfigError, before any work, where the dataset of a configuration could not be appended to another."""
    record = SourceDataset.read(directory).record
    if directory.resolve() == Path(config.dataset_dir).resolve():
        raise ConfigError(
            f"append_to and dataset_dir are both {directory}: give the new shards a dataset_dir of their own",
            code="bad_config_value",
        )
    write, codecs = config.section(WriteConfig), config.section(EncodeConfig).codecs
    added = sorted(
        field.name for fields in added_fields(config).values() for field in fields
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
    for key, (value, expected) in wanted.items() if record.num_shards else ():
        if value != expected:
            raise ConfigError(
                f"{key} is {value!r}, but {directory} has {expected!r}: set it to that", code="unlike_datasets"
            )


def _append(part: SourceDataset, addition: SourceDataset, *, copy: bool) -> Appended:
    directory, first = part.directory, len(part.shards)
    # A dataset without shards has no codes yet.
    like = part.record if part.shards else msgspec.structs.replace(addition.record, name=part.record.name)
    added = list(renumber([addition], first))
    for _, _, shard in added:
        for file in shard.fields.values():
            if (directory / file.file).exists():
                raise ConfigError(
                    f"{directory / file.file} is no part of the dataset, and in the way of a new shard: move it away",
                    code="foreign_output",
                )
    note = directory / STAGING_NAME / NOTE_NAME
    make_folder(note.parent)
    write_atomic(note, msgspec.json.encode(_Note(first, len(added), like.fields)))
    placed = Placed()
    for _, old, new in added:
        place_shard(addition, old, new, directory, placed, copy=copy)
    seal_folders(directory, like.fields)
    shards = [*part.shards, *(new for _, _, new in added)]
    record = add_up_shards(like, shards, [addition.record])
    write_shards(directory, shards)
    write_dataset(directory, record)
    _forget(directory)
    return Appended(record, first, len(added), placed=placed)


def _find(shards: list[ShardRecord], wanted: list[ShardRecord]) -> int | None:
    """Return the index from which on the wanted shards are there, byte for byte, or None."""
    found = [_content(shard) for shard in shards]
    contents = [_content(shard) for shard in wanted]
    for first in range(len(found) - len(contents) + 1):
        if found[first : first + len(contents)] == contents:
            return first
    return None


def _content(shard: ShardRecord) -> dict[str, str]:
    return {name: file.xxh3 for name, file in shard.fields.items()}


def _remove_leftovers(part: SourceDataset) -> None:
    """Remove what a killed append has placed behind the last shard; nothing of the dataset, and nothing of others."""
    directory = part.directory
    remove_asides(directory, {PROBE})
    path = directory / STAGING_NAME / NOTE_NAME
    if path.exists():
        note = _read_note(path, part.record)
        for field in part.record.layout:
            placed = range(note.first, note.first + note.count) if field.name in note.fields else ()
            files = [field.path(index) for index in placed]
            remove_asides(directory / field.name, {Path(file).name for file in files})
            for index, file in enumerate(files, note.first):
                if index >= part.record.num_shards:
                    remove_tree(directory / file)
        # Lines that are not committed go last: they say nothing to readers.
        write_shards(directory, part.shards)
        _forget(directory)
    remove_asides(directory / STAGING_NAME, {NOTE_NAME})
    remove_if_empty(directory / STAGING_NAME)


def _read_note(path: Path, dataset: DatasetRecord) -> _Note:
    """Read the note of a killed append; raise ConfigError where it is none, or names what no append to this places."""
    try:
        note = msgspec.json.decode(read_stored(path), type=_Note)
        problem = "" if set(note.fields) <= set(dataset.fields) and note.count <= _MAX_SHARDS else "other fields"
    except NOT_JSON as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"{path} is no note of an append ({problem}): move it away", code="foreign_output")
    return note


def _forget(directory: Path) -> None:
    remove_tree(directory / STAGING_NAME / NOTE_NAME)
    remove_if_empty(directory / STAGING_NAME)
