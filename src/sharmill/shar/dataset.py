"""A dataset directory as the stages that write it see it: its index, its files, and the codecs added to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sharmill.errors import DamagedShard
from sharmill.shar.index import (
    CodecRecord,
    DatasetRecord,
    FieldFile,
    ShardRecord,
    audio_checksum,
    changing_index,
    read_dataset,
    read_shards,
    write_dataset,
    write_shards,
)
from sharmill.shar.layout import (
    BASE_FIELDS,
    DATASET_FILE,
    SHARDS_FILE,
    codec_fields,
    codec_folder,
    codec_of_folder,
    shard_file,
    sorted_fields,
)
from sharmill.shar.ownership import was_planned_for
from sharmill.storage import STAGING_NAME, remove_tree


class ShardedDataset:
    """A dataset directory of sharmill's own, finished or not.

    Args:
        directory: the dataset directory; it need not exist.

    Example:
        >>> dataset = ShardedDataset(Path("data/librispeech"))
        >>> dataset.file("target_audio", 7).as_posix()
        'data/librispeech/target_audio/recording.000007.tar'
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def index_files(self) -> list[Path]:
        """The files that make a dataset a finished one."""
        return [self.directory / DATASET_FILE, self.directory / SHARDS_FILE]

    def record(self) -> DatasetRecord:
        """Read ``dataset.json``.

        Raises:
            ConfigError: there is no finished dataset, or it is of another format version.
            DamagedShard: the file is damaged.
        """
        return read_dataset(self.directory)

    def shards(self) -> list[ShardRecord]:
        """Read ``shards.jsonl``; raises as ``record`` does."""
        return list(read_shards(self.directory))

    def audio_checksum(self) -> str:
        """Return the checksum of cuts and audio, whatever codes there are."""
        return audio_checksum(self.shards())

    def file(self, field: str, shard: int) -> Path:
        """Return the path of a field's file of one shard."""
        return self.directory / shard_file(field, shard)

    def belongs_to(self, identity: Path, run_dir: Path) -> bool:
        """Return whether it was planned by the plan with this identity file, whose run may change and remove it."""
        return was_planned_for(identity, run_dir, self.directory)

    def is_empty(self) -> bool:
        """Return whether there is no directory, or nothing in it that a stage has published."""
        return not self.directory.exists() or all(path.name == STAGING_NAME for path in self.directory.iterdir())

    def write_index(self, record: DatasetRecord, shards: Sequence[ShardRecord]) -> None:
        """Write the index of cuts and audio, unless it is there and whole: then it may list codecs too, and stays."""
        if not self._has_index_of(record, shards):
            write_shards(self.directory, shards)
            write_dataset(self.directory, record)

    def remove(self) -> None:
        """Remove all files of the dataset, the index first; what others have put beside them stays."""
        for path in (*self.index_files, *(self.directory / name for name in (*BASE_FIELDS, STAGING_NAME))):
            remove_tree(path)
        for codec in self.stored_codecs():
            remove_tree(self.directory / codec_folder(codec))

    def stored_codecs(self) -> list[str]:
        """Return the names of the codecs that have a folder, whether or not the index lists them."""
        if not self.directory.is_dir():
            return []
        folders = sorted(path.name for path in self.directory.iterdir() if path.is_dir())
        return [codec for folder in folders if (codec := codec_of_folder(folder)) is not None]

    def add_codec(self, codec: str, record: CodecRecord | None, files: Sequence[Mapping[str, FieldFile]]) -> None:
        """List the codes of a codec in the index, in the place of what it lists under this name.

        Args:
            codec: its name.
            record: None in a dataset without shards, where nothing tells the codec's facts.
            files: for each shard the files of its fields.
        """
        with changing_index(self.directory):
            shards, dataset = self.shards(), self.record()
            added = [
                msgspec.structs.replace(shard, fields={**shard.fields, **new})
                for shard, new in zip(shards, files, strict=True)
            ]
            write_shards(self.directory, added)
            write_dataset(self.directory, _with_codec(dataset, codec, record))

    def remove_codec(self, codec: str) -> None:
        """Remove the codes of a codec, from the index first, and do nothing where there are none."""
        if codec not in self.stored_codecs():
            return
        with changing_index(self.directory):
            write_dataset(self.directory, _with_codec(self.record(), codec, None))
            write_shards(self.directory, [_without_codec(shard, codec) for shard in self.shards()])
        remove_tree(self.directory / codec_folder(codec))

    def _has_index_of(self, record: DatasetRecord, shards: Sequence[ShardRecord]) -> bool:
        if not all(path.exists() for path in self.index_files):
            return False
        try:
            dataset, found = self.record(), self.shards()
        except DamagedShard:
            return False
        fields = {*BASE_FIELDS, *(field for codec in dataset.codecs for field in codec_fields(codec.name))}
        if set(dataset.fields) != fields or any(set(shard.fields) != fields for shard in found):
            return False
        base = [msgspec.structs.replace(s, fields={field: s.fields[field] for field in BASE_FIELDS}) for s in found]
        return base == list(shards) and msgspec.structs.replace(dataset, fields=record.fields, codecs=[]) == record


def _with_codec(dataset: DatasetRecord, codec: str, record: CodecRecord | None) -> DatasetRecord:
    """Return the record of a dataset with the codec of this name as it is given, or without it."""
    own = codec_fields(codec)
    fields = [field for field in dataset.fields if field not in own] + list(own if record else ())
    codecs = [other for other in dataset.codecs if other.name != codec] + ([record] if record else [])
    codecs.sort(key=lambda listed: listed.name)
    return msgspec.structs.replace(dataset, codecs=codecs, fields=sorted_fields(fields))


def _without_codec(shard: ShardRecord, codec: str) -> ShardRecord:
    kept = {field: file for field, file in shard.fields.items() if field not in codec_fields(codec)}
    return msgspec.structs.replace(shard, fields=kept)
