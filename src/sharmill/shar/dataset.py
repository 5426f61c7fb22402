"""A dataset directory that stages write to: its files, as listed in the index or found in the folders."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.files.atomic import remove, remove_if_empty, remove_temp_files
from sharmill.files.checksums import checksum
from sharmill.files.locks import LOCK_NAME
from sharmill.files.staging import STAGING_NAME, PublishedFile
from sharmill.files.trust import require_trusted_owner
from sharmill.shar.fields import (
    CUTS,
    DATASET_FILE,
    INDEX_PACK_FILE,
    SHARDS_FILE,
    TARGET_CODES,
    Field,
    base_fields,
    codec_fields,
    codec_of_field,
    published_field,
    sidecar_files,
    sorted_fields,
)
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


class ShardedDataset:
    """A dataset directory written by sharmill, finished or not.

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
        """The files of the index; a dataset that has both is finished."""
        return [self.directory / DATASET_FILE, self.directory / SHARDS_FILE]

    def record(self) -> DatasetRecord:
        """Read ``dataset.json``.

        Raises:
            ConfigError: there is no finished dataset, or its format version is not supported.
            DamagedShard: the file is damaged.
        """
        return read_dataset(self.directory)

    def shards(self) -> list[ShardRecord]:
        """Read the lines of ``shards.jsonl`` that ``dataset.json`` counts; raises the same errors as ``record``."""
        return list(read_shards(self.directory, self.record().num_shards))

    def audio_checksum(self) -> str:
        """Return the checksum of cuts and audio, which does not depend on codes."""
        return audio_checksum(self.shards(), (CUTS, *self.record().audio_fields))

    def file(self, field: str, shard: int) -> Path:
        """Return the path of a field's file for one shard.

        Raises:
            ConfigError: the dataset does not have this field, or is not finished.
        """
        found = published_field(field) or self.record().fields_by_name.get(field)
        if found is None:
            raise ConfigError(f"{self.directory} has no field {field!r}", code="unknown_field")
        return self.directory / found.path(shard)

    def is_empty(self) -> bool:
        """Return True if the directory is missing, or has no files besides sharmill's lock and staging files."""
        if not self.directory.exists():
            return True
        own = (STAGING_NAME, LOCK_NAME)
        found = (p for p in self.directory.iterdir() if not p.name.startswith(own))
        return all(path.is_dir() and not path.is_symlink() and _has_no_files(path) for path in found)

    def is_made_of(self, fields: Sequence[str], files: Iterable[PublishedFile]) -> bool:
        """Return True if the stored files of these fields are among ``files``; other fields do not matter.

        For a field in the index, every entry must be among ``files``, with the same name, size and checksum. For a
        field that the index does not list, such as context audio in a dataset without contexts, the names of its files
        on disk must be among those of ``files``. If the index lists none of the fields, at least one file on disk must
        also have the expected checksum.
        """
        known = {FieldFile(file.name, file.size, file.xxh3) for file in files}
        try:
            shards = list(read_shards(self.directory))
        except (ConfigError, DamagedShard):
            shards = None
        listed = {field for field in fields if any(field in shard.fields for shard in shards or ())}
        others = {name for field in fields if field not in listed for name in self._stored(field)}
        if not others <= {file.file for file in known}:
            return False
        if shards is not None and not shards:
            return not known
        if listed:
            return all(shard.fields.get(field) in known for shard in shards or () for field in listed)
        paths = ((self.directory / file.file, file) for file in known if file.file in others)
        return any(
            path.is_file() and path.stat().st_size == file.size and checksum(path) == file.xxh3 for path, file in paths
        )

    def write_index(self, record: DatasetRecord, shards: Sequence[ShardRecord]) -> None:
        """Write the index of cuts and audio. An intact index of the same data is kept, as it may also list codecs."""
        with changing_index(self.directory):
            if not self._has_index_of(record, shards):
                write_shards(self.directory, shards)
                write_dataset(self.directory, record)

    def remove(self, num_shards: int | None, added: Sequence[Field] = ()) -> None:
        """Remove all files of a dataset, the index first. Other files in its folders are kept.

        Args:
            num_shards: the number of shards to remove; None for all shards found.
            added: fields that stages may have added. They are removed as well, since the index that would list them may
                be gone.

        Raises:
            ConfigError: the folder of a field is a link or belongs to an untrusted user; in this case nothing is
                removed.
        """
        with suppress(ConfigError, DamagedShard):
            added = [*added, *self.record().added_fields]
        codes = [field for codec in self.stored_codecs() for field in codec_fields(codec)]
        fields = [*added, *codes, *base_fields(contexts=True)]
        require_trusted_owner(self.directory, (self.directory / field.name for field in fields))
        remove(*self.index_files)
        self._remove_files(fields, num_shards)

    def has_files(self, fields: Iterable[str]) -> bool:
        """Return True if the folder of any of these fields contains files, even if no index lists the field."""
        folders = [self.directory / field for field in fields]
        return any(folder.is_dir() and not _has_no_files(folder) for folder in folders)

    def stored_codecs(self) -> list[str]:
        """Return the names of the codecs whose folders contain files, even if the index does not list them."""
        if not self.directory.is_dir():
            return []
        folders = sorted(path for path in self.directory.iterdir() if path.is_dir() and not _has_no_files(path))
        codecs = (codec_of_field(f"{folder.name}/{TARGET_CODES}") for folder in folders)
        return [codec for codec in codecs if codec is not None]

    def add_fields(
        self, fields: Sequence[Field], files: Sequence[Mapping[str, FieldFile]], codec: CodecRecord | None = None
    ) -> None:
        """Add fields to the index, replacing existing entries with the same names.

        Args:
            fields: the fields that a stage has written.
            files: the files of these fields, one mapping per shard.
            codec: the codec of the fields, if they are codes.

        Raises:
            FatalError: shards were appended to the dataset after these files were written.
        """
        with changing_index(self.directory):
            shards, dataset = self.shards(), self.record()
            if len(files) != len(shards):
                raise FatalError(
                    f"{self.directory} now has {len(shards)} shards, but {fields[0].name if fields else 'codes'} has "
                    f"{len(files)}: shards were appended in the meantime; start over with --restart",
                    code="changed_input",
                )
            added = [
                msgspec.structs.replace(shard, fields={**shard.fields, **new})
                for shard, new in zip(shards, files, strict=True)
            ]
            kept = _without_fields(dataset, fields)
            names = sorted_fields([*kept.fields, *(field.name for field in fields)])
            codecs = sorted([*kept.codecs, *([codec] if codec else [])], key=lambda listed: listed.name)
            made = msgspec.structs.replace(kept, fields=names, layout=[*kept.layout, *fields], codecs=codecs)
            write_shards(self.directory, added)
            write_dataset(self.directory, made)

    def remove_fields(self, fields: Sequence[Field], num_shards: int | None) -> None:
        """Remove fields from the index, then delete their files, if any exist; raises the same error as ``remove``."""
        names = {field.name for field in fields}
        if not self.has_files(names):
            return
        require_trusted_owner(self.directory, (self.directory / name for name in names))
        with changing_index(self.directory):
            write_dataset(self.directory, _without_fields(self.record(), fields))
            shards = []
            for shard in self.shards():
                files = {name: file for name, file in shard.fields.items() if name not in names}
                shards.append(msgspec.structs.replace(shard, fields=files))
            write_shards(self.directory, shards)
        self._remove_files(fields, num_shards)

    def _stored(self, field: str) -> list[str]:
        """Return the names of the files in a field's folder, without sidecars."""
        folder = self.directory / field
        found = sorted(f"{field}/{path.name}" for path in folder.iterdir()) if folder.is_dir() else []
        sidecars = {sidecar for name in found for sidecar in sidecar_files(name)}
        return [name for name in found if name not in sidecars]

    def _remove_files(self, fields: Sequence[Field], num_shards: int | None) -> None:
        # The index pack refers to the files of all fields.
        remove(self.directory / INDEX_PACK_FILE)
        for field in fields:
            # All numbers in the names of existing files, since any of them may be the index of a shard.
            found = {int(part) for name in self._stored(field.name) for part in name.split(".") if part.isdecimal()}
            files = {field.path(shard) for shard in (found if num_shards is None else range(num_shards))}
            names = files | {sidecar for file in files for sidecar in sidecar_files(file)}
            folder = self.directory / field.name
            remove_temp_files(folder, {PurePosixPath(name).name for name in names})
            stored = folder.iterdir() if folder.is_dir() else ()
            remove(*(path for path in stored if f"{field.name}/{path.name}" in names))
            remove_if_empty(folder, *(() if folder.parent == self.directory else (folder.parent,)))

    def _has_index_of(self, record: DatasetRecord, shards: Sequence[ShardRecord]) -> bool:
        if not all(path.exists() for path in self.index_files):
            return False
        try:
            dataset, found = self.record(), self.shards()
        except DamagedShard:
            return False
        fields = set(dataset.own_fields)
        if set(dataset.fields) != fields or any(set(shard.fields) != fields for shard in found):
            return False
        own = [field.name for field in base_fields(contexts=dataset.has_contexts)]
        base = [msgspec.structs.replace(s, fields={name: s.fields[name] for name in own}) for s in found]
        known = msgspec.structs.replace(dataset, fields=record.fields, codecs=[]).complete()
        return base == list(shards) and known == record.complete()


def _has_no_files(folder: Path) -> bool:
    return all(path.is_dir() and not path.is_symlink() and _has_no_files(path) for path in folder.iterdir())


def _without_fields(dataset: DatasetRecord, fields: Sequence[Field]) -> DatasetRecord:
    """Return the record of a dataset without these fields and their codecs."""
    names = {field.name for field in fields}
    codecs = {codec_of_field(name) for name in names}
    return msgspec.structs.replace(
        dataset,
        fields=[name for name in dataset.fields if name not in names],
        layout=[field for field in dataset.layout if field.name not in names],
        codecs=[codec for codec in dataset.codecs if codec.name not in codecs],
    )
