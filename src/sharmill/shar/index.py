"""The index of a dataset directory: its files ``shards.jsonl`` and ``dataset.json``, read and written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.layout import BASE_FIELDS, DATASET_FILE, FORMAT_VERSION, SHARDS_FILE
from sharmill.storage import checksum_bytes, open_atomic, write_atomic


class FieldFile(msgspec.Struct, frozen=True):
    """A file of a field and shard, relative to the dataset directory."""

    file: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.file)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.file!r} lies outside the dataset")


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``shards.jsonl``: number of cuts, seconds of target and context audio, and the fields' files."""

    index: int
    count: int
    target_seconds: float
    context_seconds: float
    fields: dict[str, FieldFile]


class CodecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a codec that its codes are read by. ``codebook_size`` is the number of values of one code."""

    name: str
    model: str
    checksum: str
    trained: bool
    sampling_rate: int
    samples_per_frame: int
    num_codebooks: int
    codebook_size: int


class DatasetRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of ``dataset.json``. ``limits`` are those that every context satisfies.

    ``contract: foreign`` says that another tool wrote the files and only the index is sharmill's: what sharmill
    promises of its cuts and codes does not hold.
    """

    format_version: int
    name: str
    fields: list[str]
    num_shards: int
    num_cuts: int
    target_seconds: float
    context_seconds: float
    audio_format: str
    sampling_rate: int | None
    limits: dict[str, Any]
    codecs: list[CodecRecord]
    contract: Literal["sharmill", "foreign"] = "sharmill"


class _Version(msgspec.Struct):
    format_version: int


_shard_decoder = msgspec.json.Decoder(ShardRecord)


def read_dataset(directory: Path) -> DatasetRecord:
    """Read ``dataset.json``.

    Raises:
        ConfigError: there is no finished dataset, or one of another format version.
        DamagedShard: the file is damaged.
    """
    path = directory / DATASET_FILE
    try:
        data = path.read_bytes()
        # First of all, since a dataset of another version may have other keys.
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format version {version}; this sharmill reads {FORMAT_VERSION}", code="wrong_version"
            )
        return msgspec.json.decode(data, type=DatasetRecord)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(
            f"{directory} is not a finished dataset: there is no {DATASET_FILE}", code="no_dataset"
        ) from error
    except NotADirectoryError as error:
        raise ConfigError(f"{directory} is not a folder", code="no_dataset") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_shards(directory: Path) -> Iterator[ShardRecord]:
    """Yield the lines of ``shards.jsonl``, in the order of the shards.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: the file is damaged.
    """
    path = directory / SHARDS_FILE
    try:
        with path.open("rb") as lines:
            for line in lines:
                yield _shard_decoder.decode(line)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory} is not a finished dataset: there is no {SHARDS_FILE}", code="no_dataset"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedShard(f"{path}: {error}") from error


def _unfinished(directory: Path, missing: str) -> ConfigError:
    return ConfigError(f"{directory} is not a finished dataset: there is no {missing}", code="no_dataset")


def write_shards(directory: Path, shards: Iterable[ShardRecord]) -> None:
    """Publish ``shards.jsonl``."""
    with open_atomic(directory / SHARDS_FILE) as stream:
        for shard in shards:
            stream.write(msgspec.json.encode(shard, order="sorted") + b"\n")


def write_dataset(directory: Path, record: DatasetRecord) -> None:
    """Publish ``dataset.json``, the last file of a dataset to be written."""
    write_atomic(directory / DATASET_FILE, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


@contextmanager
def changing_index(directory: Path) -> Iterator[None]:
    """Keep other processes from changing the index meanwhile: two runs may add codecs to one dataset.

    The lock is on the directory itself and leaves no file in it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def audio_checksum(shards: Sequence[ShardRecord]) -> str:
    """Return a checksum of the cuts and audio of a dataset, whatever codes it has.

    Raises:
        DamagedShard: a shard lacks one of these fields.
    """
    for shard in shards:
        if missing := [field for field in BASE_FIELDS if field not in shard.fields]:
            raise DamagedShard(f"{SHARDS_FILE} names no {missing[0]} of shard {shard.index}")
    base = [[shard.index, shard.count, [shard.fields[field].xxh3 for field in BASE_FIELDS]] for shard in shards]
    return checksum_bytes(msgspec.json.encode(base))
