"""The index of a dataset, ``shards.jsonl`` and ``dataset.json``: its records, and functions to read and write them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar
from urllib.parse import unquote

import msgspec

from sharmill.config import Precision, require
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.files.atomic import fsync, open_atomic, remove_temp_files, write_atomic
from sharmill.files.cache import Cache
from sharmill.files.checksums import checksum_bytes
from sharmill.files.location import Location, RemoteLocation, check_url, is_url, with_content
from sharmill.files.locks import FolderLock
from sharmill.files.staging import STAGING_NAME
from sharmill.files.stored import NOT_JSON
from sharmill.shar.fields import (
    CONTEXT_AUDIO,
    CUTS,
    DATASET_FILE,
    RECORDING,
    SHARDS_FILE,
    TARGET_AUDIO,
    Field,
    base_fields,
    codec_fields,
    codec_of_field,
    published_field,
)
from sharmill.shar.tar import open_field

FORMAT_VERSION: Final = 1
# Maximum time to wait while other processes change the index.
SECONDS_TO_WAIT_FOR_INDEX = 600.0
# The maximum size of dataset.json and of a line of shards.jsonl, so that a huge sparse file is not read into memory.
_MAX_BYTES: Final = 16 << 20

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(gt=0)]
# Integers that JSON readers and arrays represent exactly.
_AtMost = Annotated[int, msgspec.Meta(le=1 << 53)]
_Total = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class FieldFile(msgspec.Struct, frozen=True):
    """The file of a field in one shard: its path in the dataset directory, its size in bytes, and its XXH3 checksum."""

    file: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        # Web servers decode percent-encoded characters, and some treat a backslash as a slash.
        path = PurePosixPath(unquote(self.file).replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.file!r} lies outside the dataset")

    @property
    def max_bytes(self) -> float:
        """The maximum size in bytes that the file may have at a URL; infinite if the index does not list its size."""
        return self.size if self.size >= 0 else math.inf

    def below(self, directory: Location) -> Location:
        """Return the location of the file; in a dataset at a URL, only content with the recorded checksum is read."""
        return with_content(directory / self.file, self.xxh3, self.max_bytes)


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``shards.jsonl``: number of cuts, seconds of target and context audio, and the fields' files.

    ``context_seconds`` is 0 in a dataset without contexts. For a shard that was found without an index, only the names
    of its files are known: ``count`` and the sizes are -1, and the checksums are empty.
    """

    index: _AtMost
    count: _AtMost
    target_seconds: float
    context_seconds: float
    fields: dict[str, FieldFile]

    @property
    def files(self) -> dict[str, str]:
        """The path of each field's file, keyed by field."""
        return {field: file.file for field, file in self.fields.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of audio, keyed by ``target_audio`` and ``context_audio``."""
        return {TARGET_AUDIO: self.target_seconds, CONTEXT_AUDIO: self.context_seconds}


# No record uses `omit_defaults`: msgspec omits a value if it is the same object as the default, so the bytes of a
# record would depend on whether its values have been pickled.
class CodecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a codec that are needed to read its codes, or that tell how the codes were made.

    ``codebook_size`` is the number of values that one code can have. ``devices`` lists, in alphabetical order, the
    kinds of device on which the codes were made; it is empty if they are unknown.
    """

    name: str
    model: str
    checksum: str
    trained: bool
    sampling_rate: Positive
    samples_per_frame: Positive
    num_codebooks: Positive
    codebook_size: Positive
    devices: list[str] = []
    precision: Precision = "fp32"

    @property
    def fields(self) -> list[Field]:
        """The fields of the codec's codes: target codes and context codes, even if the dataset has no contexts."""
        return codec_fields(self.name)


class DatasetRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The content of ``dataset.json``. ``limits`` contains the limits that every context satisfies; empty without
    contexts.

    ``fields`` lists the names of the fields, and ``layout`` describes the fields. A file written before ``layout``
    existed implies the published layout, which ``complete`` fills in. Fields of another tool may lack a description.

    If ``contract`` is ``foreign``, another tool wrote the shards and sharmill only the index, so sharmill's guarantees
    for cuts and codes do not hold. ``match_precision`` is the precision of the speaker encoder, and ``match_devices``
    lists the kinds of device on which contexts were chosen; it is empty if only CPUs were used.
    """

    format_version: int
    name: str
    fields: list[str]
    num_shards: _Total
    num_cuts: _Total
    target_seconds: float
    context_seconds: float
    audio_format: str
    sampling_rate: int | None
    limits: dict[str, Any]
    codecs: list[CodecRecord]
    contract: Literal["sharmill", "foreign"] = "sharmill"
    match_precision: Precision = "fp32"
    match_devices: list[str] = []
    layout: list[Field] = []

    @property
    def has_contexts(self) -> bool:
        """True if the dataset has context audio."""
        return CONTEXT_AUDIO in self.fields

    @property
    def audio_fields(self) -> list[str]:
        """The audio fields that codecs encode: the target, which lhotse calls ``recording``, and the context."""
        target = TARGET_AUDIO if TARGET_AUDIO in self.fields else RECORDING
        return [target, CONTEXT_AUDIO] if self.has_contexts else [target]

    @property
    def own_fields(self) -> list[str]:
        """The names of the fields that a dataset written by sharmill with these codecs and added fields must have."""
        number = len(self.audio_fields)
        codes = [field for codec in self.codecs for field in codec.fields[:number]]
        return [field.name for field in (*base_fields(contexts=self.has_contexts), *codes, *self.added_fields)]

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence about each contradiction in the fields of a dataset written by sharmill."""
        for name, times in Counter(self.fields).items():
            if times > 1:
                yield f"the field {name} is listed {times} times"
        for name in sorted(set(self.own_fields) ^ set(self.fields)):
            yield f"the field {name} {'belongs to none of the codecs' if name in self.fields else 'is missing'}"
        attributes: dict[str, list[Field]] = {}
        for field in self.layout:
            attributes.setdefault(field.attribute, []).append(field)
        for attribute, fields in attributes.items():
            if len(fields) > 1 and any(codec_of_field(field.name) is None for field in fields):
                yield f"the fields {' and '.join(field.name for field in fields)} are all named {attribute} on a cut"
        if self.has_contexts and not self.limits:
            yield f"there is a field {CONTEXT_AUDIO}, but no limits of contexts"
        if not self.has_contexts and (self.limits or self.context_seconds):
            yield f"there is no field {CONTEXT_AUDIO}, but there are limits of contexts or seconds of context audio"

    @property
    def added_fields(self) -> list[Field]:
        """The fields that are not in the published layout."""
        return [field for field in self.layout if not field.is_published]

    @cached_property
    def fields_by_name(self) -> dict[str, Field]:
        """The fields that the dataset describes, by name."""
        return {field.name: field for field in self.layout}

    def complete(self) -> "DatasetRecord":
        """Return the record with a layout of all known fields, in the order of ``fields``."""
        if self.contract != "sharmill":
            return self
        known = {field.name: field for field in self.layout}
        fields = [published_field(name) or known.get(name) for name in dict.fromkeys(self.fields)]
        # Use sharmill's own descriptions of published fields; take from the file only whether cuts may lack codes.
        may_lack = {
            name for name, told in known.items() if told.optional and (told.kind == "array" or not told.is_published)
        }
        layout = [msgspec.structs.replace(one, optional=one.name in may_lack) for one in fields if one is not None]
        return msgspec.structs.replace(self, layout=layout)


class _Version(msgspec.Struct):
    format_version: int


_shard_decoder = msgspec.json.Decoder(ShardRecord)


def open_directory(dataset: str | Location, cache_dir: str | None = None, cache_gib: float = 100.0) -> Location:
    """Return the location of a dataset directory; files behind a URL are read through a cache.

    Raises:
        ConfigError: there is no index at the URL, or the URL or ``cache_gib`` is invalid.
        OSError: a server cannot be reached.
    """
    if not isinstance(dataset, str):
        return dataset
    if not is_url(dataset):
        return Path(dataset)
    try:
        check_url(dataset, "dataset")
        require(isinstance(cache_gib, (int, float)) and cache_gib > 0, f"cache_gib is {cache_gib!r}: it must exceed 0")
    except ValueError as error:
        raise ConfigError(str(error), code="bad_config_value") from error
    cache = Cache.at(cache_dir, cache_gib)
    directory = RemoteLocation(dataset.rstrip("/"), cache)
    try:
        for name in (DATASET_FILE, SHARDS_FILE):
            cache.refresh(str(directory / name))
    except RejectRecord as reject:
        raise ConfigError(
            f"no dataset can be read at {directory}: {reject.detail}; a dataset at a URL needs an index (sharmill "
            "index)",
            code="no_dataset",
        ) from reject
    return directory


def read_dataset(directory: Location) -> DatasetRecord:
    """Read ``dataset.json``.

    Raises:
        ConfigError: there is no finished dataset, or its format version is not supported.
        DamagedShard: the file is damaged.
    """
    path = directory / DATASET_FILE
    with open_index_file(directory, DATASET_FILE) as stream:
        data = stream.read(_MAX_BYTES)
    try:
        # Decode the version first, since a dataset of another version may have other keys.
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format version {version}; this sharmill reads {FORMAT_VERSION}", code="wrong_version"
            )
        return msgspec.json.decode(data, type=DatasetRecord).complete()
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_shards(directory: Location, num_shards: int | None = None) -> Iterator[ShardRecord]:
    """Yield the lines of ``shards.jsonl``, in the order of the shards.

    Args:
        num_shards: the number of shards that ``dataset.json`` counts. Later lines belong to an append that was not
            committed, and not to the dataset. If None, they are yielded too.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: the file is damaged.
    """
    return decode_shards(directory, num_shards, _shard_decoder)


def decode_shards(directory: Location, num_shards: int | None, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """Yield the decoded lines of ``shards.jsonl``; raises the same errors as ``read_shards``."""
    # Read large pieces: each read may be a request to a file server, and with small pieces the index of 100,000 shards
    # takes 8,000 requests.
    with open_index_file(directory, SHARDS_FILE, buffering=1 << 20) as lines:
        try:
            # An overlong line is cut off at the limit and then fails to parse.
            for line in islice(iter(partial(lines.readline, _MAX_BYTES), b""), num_shards):
                yield decoder.decode(line)
        except NOT_JSON as error:
            raise DamagedShard(f"{directory / SHARDS_FILE}: {error}") from error


def open_index_file(directory: Location, name: str, *, buffering: int = -1) -> BinaryIO:
    """Open a file of the index of a dataset.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: the file is not a regular file.
    """
    try:
        return open_field(directory / name, buffering=buffering)
    except DamagedShard:
        if isinstance(directory, RemoteLocation):
            raise
        path = directory / name
        if path.exists() and not path.is_dir():
            raise
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder", code="no_dataset")
    if directory.parts and directory.parts[0].endswith(":"):
        address = str(directory).replace(":/", "://", 1)
        raise ConfigError(f"{address} is a URL: copy the dataset to a folder, and name the folder", code="no_dataset")
    hint = ""
    if (directory / CUTS).is_dir() or any(directory.glob(f"{CUTS}.*")):
        hint = f"; finish the run that writes it or, for another tool's shards, run sharmill index {directory}"
    raise ConfigError(f"{directory} is not a finished dataset: it has no {name}{hint}", code="no_dataset")


def is_indexed(directory: Path) -> bool:
    """Return True if a folder has an index, or will have one after the run that writes it has finished."""
    return any((directory / name).exists() for name in (DATASET_FILE, SHARDS_FILE, STAGING_NAME))


def write_shards(directory: Path, shards: Iterable[ShardRecord]) -> None:
    """Write ``shards.jsonl`` atomically."""
    with open_atomic(directory / SHARDS_FILE) as stream:
        stream.writelines(msgspec.json.encode(shard, order="sorted") + b"\n" for shard in shards)


def write_dataset(directory: Path, record: DatasetRecord) -> None:
    """Write ``dataset.json`` atomically; it must be the last file of a dataset to be written."""
    data = msgspec.json.encode(record.complete())
    write_atomic(directory / DATASET_FILE, msgspec.json.format(data, indent=2) + b"\n")


@contextmanager
def changing_index(directory: Path) -> Iterator[None]:
    """Lock the index against changes by other processes, since two runs may add codecs to the same dataset.

    Temporary files of killed processes are removed.
    """
    with FolderLock(directory, wait_seconds=SECONDS_TO_WAIT_FOR_INDEX):
        remove_temp_files(directory, {SHARDS_FILE, DATASET_FILE})
        yield
    # The dataset may be finished now, so make the removal of the lock's folder survive a power failure.
    fsync(directory)


def audio_checksum(shards: Sequence[ShardRecord], fields: Sequence[str]) -> str:
    """Return a checksum of the contents of ``fields`` (cuts and audio) in all shards, which does not depend on codes.

    Raises:
        DamagedShard: a shard lacks one of these fields.
    """
    for shard in shards:
        if missing := [field for field in fields if field not in shard.fields]:
            raise DamagedShard(f"{SHARDS_FILE} names no {missing[0]} of shard {shard.index}")
    base = [[shard.index, shard.count, [shard.fields[field].xxh3 for field in fields]] for shard in shards]
    return checksum_bytes(msgspec.json.encode(base))
