"""The dataset directory that stages write: its files, by what the index lists and what lies in the folders."""

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
        """Read as many lines of ``shards.jsonl`` as ``dataset.json`` counts shards; raises as ``record`` does."""
        return list(read_shards(self.directory, self.record().num_shards))

    def audio_checksum(self) -> str:
        """Return the checksum of cuts and audio, whatever codes there are."""
        return audio_checksum(self.shards(), (CUTS, *self.record().audio_fields))

    def file(self, field: str, shard: int) -> Path:
        """Return the path of the file of one shard of a field.

        Raises:
            ConfigError: the dataset has no such field, or is not finished.
        """
        found = published_field(field) or self.record().fields_by_name.get(field)
        if found is None:
            raise ConfigError(f"{self.directory} has no field {field!r}", code="unknown_field")
        return self.directory / found.path(shard)

    def is_empty(self) -> bool:
        """Return True if there is no directory, or nothing in it but folders that wait for files."""
        if not self.directory.exists():
            return True
        own = (STAGING_NAME, LOCK_NAME)
        found = (p for p in self.directory.iterdir() if not p.name.startswith(own))
        return all(path.is_dir() and not path.is_symlink() and _has_no_files(path) for path in found)

    def is_made_of(self, fields: Sequence[str], files: Iterable[PublishedFile]) -> bool:
        """Return True if these files are the fields' content; what other fields there are does not matter.

        Where the index lists the fields, all that it says of them must be among ``files``: names, sizes and checksums.
        Without it, one of the files in place must be, by its checksum. The names of all files in the folders of other
        fields must be, as of context audio where the index is that of a dataset without contexts.
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
        """Write the index of cuts and audio, unless it is there and whole: then it may list codecs too, and stays."""
        with changing_index(self.directory):
            if not self._has_index_of(record, shards):
                write_shards(self.directory, shards)
                write_dataset(self.directory, record)

    def remove(self, num_shards: int | None, added: Sequence[Field] = ()) -> None:
        """Remove all files of a dataset of so many shards, the index first; what others have put beside them stays.

        Args:
            num_shards: None for all shards that are there.
            added: fields that stages may have added, beside those that the index lists: it may be gone already.

        Raises:
            ConfigError: a folder of a field is a link, or a stranger's; nothing was removed.
        """
        with suppress(ConfigError, DamagedShard):
            added = [*added, *self.record().added_fields]
        codes = [field for codec in self.stored_codecs() for field in codec_fields(codec)]
        fields = [*added, *codes, *base_fields(contexts=True)]
        require_trusted_owner(self.directory, (self.directory / field.name for field in fields))
        remove(*self.index_files)
        self._remove_files(fields, num_shards)

    def has_files(self, fields: Iterable[str]) -> bool:
        """Return True if there are files in the folder of a field, whether or not the index lists it."""
        folders = [self.directory / field for field in fields]
        return any(folder.is_dir() and not _has_no_files(folder) for folder in folders)

    def stored_codecs(self) -> list[str]:
        """Return the names of the codecs that have a folder, whether or not the index lists them."""
        if not self.directory.is_dir():
            return []
        folders = sorted(path for path in self.directory.iterdir() if path.is_dir() and not _has_no_files(path))
        codecs = (codec_of_field(f"{folder.name}/{TARGET_CODES}") for folder in folders)
        return [codec for codec in codecs if codec is not None]

    def add_fields(
        self, fields: Sequence[Field], files: Sequence[Mapping[str, FieldFile]], codec: CodecRecord | None = None
    ) -> None:
        """List fields in the index, in the place of what it lists under their names.

        Args:
            fields: what a stage has made.
            files: for each shard the files of the fields.
            codec: whose codes they are, where they are codes.

        Raises:
            FatalError: the dataset has grown since these shards were made.
        """
        with changing_index(self.directory):
            shards, dataset = self.shards(), self.record()
            if len(files) != len(shards):
                raise FatalError(
                    f"{self.directory} has {len(shards)} shards now, and {fields[0].name if fields else 'codes'} of "
                    f"{len(files)}: shards were appended meanwhile; make it anew with --restart",
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
        """Remove the files of fields, if there are any, from the index first; raises as ``remove``."""
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
        """Return the names of the files in a field's folder, sidecars aside."""
        folder = self.directory / field
        found = sorted(f"{field}/{path.name}" for path in folder.iterdir()) if folder.is_dir() else []
        sidecars = {sidecar for name in found for sidecar in sidecar_files(name)}
        return [name for name in found if name not in sidecars]

    def _remove_files(self, fields: Sequence[Field], num_shards: int | None) -> None:
        for field in fields:
            # Numbers in the names of files that are there, which may be those of shards.
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
    """Return the record of a dataset without fields, and without the codecs whose they are."""
    names = {field.name for field in fields}
    codecs = {codec_of_field(name) for name in names}
    return msgspec.structs.replace(
        dataset,
        fields=[name for name in dataset.fields if name not in names],
        layout=[field for field in dataset.layout if field.name not in names],
        codecs=[codec for codec in dataset.codecs if codec.name not in codecs],
    )
